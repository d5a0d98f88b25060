"""bisect: name the pass, and the operator, that first takes a result outside its error budget.

The module after each pass runs through TVM's own plain lowering on the inputs that fail, so the
first module that fails names the pass. The program is then cut off after an operator, compiled
whole, and the cut moved by halves until the first operator that fails is known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import tvm
from tvm import relax

from tvmcap import pipeline, quantized
from tvmcap.base import quantization
from tvmcap.base.codegen import make_target
from tvmcap.base.config import Config, make_config
from tvmcap.base.errors import ConfigError, TvmcapError
from tvmcap.base.signature import Signature, evaluate, flatten, unflatten
from tvmcap.capture.export import Captured, capture
from tvmcap.kernel.admission import admitted
from tvmcap.kernel.choice import Chooser
from tvmcap.kernel.stores import open_stores
from tvmcap.library import lower, plain
from tvmcap.runtime.vendor import NEEDS_TORCH, provide
from tvmcap.verify.check import Subject, check_set, example_leaves, floor_of, typical
from tvmcap.verify.cut import Cut, Operator
from tvmcap.verify.inputs import InputSet, draw, plan_inputs
from tvmcap.verify.result import Check

log = logging.getLogger("tvmcap")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BisectReport:
    """What bisection found.

    Attributes
    ----------
    ok: the whole chain is within budget on every input set, so there is nothing to find.
    stages: (pass, check) of the module after each pass, up to the first that fails.
    culprit: the pass that fails first; "capture" for the module as it was imported.
    operator: the first operator that fails, or None where no cut-off program fails by itself.
    """

    ok: bool
    stages: tuple[tuple[str, Check], ...] = ()
    culprit: str | None = None
    operator: Operator | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        stages = [{"pass": name, **check.to_json()} for name, check in self.stages]
        found = None if self.operator is None else asdict(self.operator)
        return {"ok": self.ok, "culprit": self.culprit, "operator": found, "stages": stages}

    def __str__(self) -> str:
        """Say what was found, and show the stages."""
        if self.ok:
            return "every pass is within the error budget"
        lines = [f"pass {self.culprit!r} is the first outside the error budget"]
        if self.operator is None:
            lines.append("no operator fails by itself at these sizes; it takes the whole program")
        else:
            where = f", {self.operator.line}" if self.operator.line else ""
            lines.append(f"operator {self.operator.target} ({self.operator.name}){where}")
        lines += [f"  {'pass' if c.ok else 'FAIL'}  {name}: {c}" for name, c in self.stages]
        if self.culprit in pipeline.OPTIONAL:
            lines.append(f"to go around it: disable=({self.culprit!r},)")
        return "\n".join(lines)


def bisect(
    fn: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: Config | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> BisectReport:
    """Find the pass and the operator of ``fn`` that first exceed the error budget.

    Parameters are those of ``build``; ``progress`` is called with what is being tried.
    Raises what capture and the passes raise.
    """
    config = make_config(config, **options)
    if config.backward:
        raise ConfigError(
            "bisect looks at what a function returns, and not at its gradients; leave backward "
            "out, or use tvmcap.verify(lib), which names the gradient that is wrong"
        )
    say = progress or (lambda what: None)
    target = make_target(config.target)
    say("capture")
    captured = capture(fn, args, kwargs, config)
    stages = _stages(captured, target, config)
    say("the whole chain")
    chosen = _failing(captured, stages[-1][1], target, config)
    if chosen is None:
        return BisectReport(True)
    found: list[tuple[str, Check]] = []
    for name, mod in stages:
        say(f"after pass {name}")
        found.append((name, _check(captured, mod, target, config, chosen)))
        if not found[-1][1].ok:
            break
    culprit = found[-1][0]
    return BisectReport(False, tuple(found), culprit, _operator(captured, chosen, config, say))


def _stages(captured: Captured, target: Any, config: Config) -> list[tuple[str, tvm.IRModule]]:
    """Return the module after capture and after every pass."""
    stores = open_stores(config, target)

    def lookup(task: Any) -> Any:
        return [] if config.tune == "none" else admitted(stores, task, target)

    trace = pipeline.Trace()
    if config.vendor_matmul:
        provide((NEEDS_TORCH,), "this program")
    quantize = quantized.quantizer(captured, config, target)
    front = pipeline.front(target, config.allow_tf32, config.vendor_matmul, quantize)
    choose = None if config.tune == "none" else Chooser(stores, target)
    passes = [*front, *pipeline.back(target, lookup, trace, choose)]
    stages = [("capture", captured.mod)]
    for step in passes:
        if step[0] not in config.disable:
            mod = pipeline.run(stages[-1][1], [step], target, replace(config, dump=None), trace)
            stages.append((step[0], mod))
    return stages


def _subject(captured: Captured, mod: tvm.IRModule, target: Any, config: Config) -> Subject:
    device = torch.device("cuda" if target.kind.name == "cuda" else "cpu")
    example = typical(captured, config)
    home = example[0].device if example else device
    keywords = tuple(captured.kwargs)
    ours = runner(mod, captured.signature, target)
    tf32 = config.allow_tf32 and target.kind.name == "cuda"
    sides = (ours, captured.eager, device, home)
    options = quantization.parse(config.quantize)
    floor = None if options is None else floor_of(options.to_json(), example)
    return Subject(captured.signature, *sides, example, keywords, tf32=tf32, floor_db=floor)


def _check(
    captured: Captured, mod: tvm.IRModule, target: Any, config: Config, chosen: InputSet
) -> Check:
    return check_set(_subject(captured, mod, target, config), chosen)


def _failing(captured: Captured, mod: tvm.IRModule, target: Any, config: Config) -> InputSet | None:
    """Return the first set of inputs on which the whole chain fails."""
    subject = _subject(captured, mod, target, config)
    for chosen in plan_inputs(captured.signature, subject.example, seed=config.seed):
        if not check_set(subject, chosen).ok:
            return chosen
    return None


def runner(mod: tvm.IRModule, signature: Signature, target: Any) -> Callable[..., Any]:
    """Compile a module of any stage without passes of ours; returns its callable."""
    planned = "tvmcap.outputs" in (mod["main"].attrs or {})
    executable = lower.lower(mod, target) if planned else plain.plain(mod, target)
    cuda = target.kind.name == "cuda"
    main = relax.VirtualMachine(executable, tvm.cuda(0) if cuda else tvm.cpu())["main"]

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = flatten(signature.in_tree, (*args, *kwargs.values()))
        if not planned:
            result = main(*leaves)
            outputs = [result] if isinstance(result, torch.Tensor) else list(result)
            return unflatten(signature.out_tree, outputs)
        sizes = _bind(signature, leaves)
        device = "cuda" if cuda else "cpu"
        outputs = [
            torch.empty(
                [evaluate(s, sizes) for s in o.shape], dtype=getattr(torch, o.dtype), device=device
            )
            for o in signature.outputs
        ]
        main(*leaves, *outputs)
        return unflatten(signature.out_tree, outputs)

    return call


def _bind(signature: Signature, leaves: Sequence[torch.Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec, leaf in zip(signature.inputs, leaves, strict=True):
        named = zip(spec.shape, leaf.shape, strict=True)
        sizes.update({s: int(n) for s, n in named if isinstance(s, str)})
    return sizes


def _operator(
    captured: Captured, chosen: InputSet, config: Config, say: Progress
) -> Operator | None:
    """Cut the program off after an operator, and halve the range of the first failure."""
    leaves = draw(captured.signature, chosen, example_leaves(captured))
    program = Cut.of(captured.eager, captured.signature, tuple(captured.kwargs), leaves)
    first, last = 0, len(program.nodes) - 1
    if last < 0 or not _cut_fails(program, last, chosen, config):
        return None
    while first < last:
        middle = (first + last) // 2
        say(f"operator {program.nodes[middle].name}")
        if _cut_fails(program, middle, chosen, config):
            last = middle
        else:
            first = middle + 1
    return program.describe(last)


def _cut_fails(program: Cut, index: int, chosen: InputSet, config: Config) -> bool:
    """Compile the program cut off after node ``index``, at fixed sizes, and compare."""
    fn = program.until(index)
    fixed = replace(config, dynamic=None, constants=(), dump=None)
    try:
        captured = capture(fn, program.leaves, None, fixed)
        target = make_target(config.target)
        mod = _stages(captured, target, fixed)[-1][1]
        inputs = InputSet(chosen.kind, {}, chosen.seed)
        return not _check(captured, mod, target, fixed, inputs).ok
    except TvmcapError as e:
        log.debug("bisect: %s cannot be cut off: %s", program.nodes[index].name, e)
        return False

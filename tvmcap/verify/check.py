"""``verify``: run a library and the PyTorch code on seeded inputs, and hold the error to a budget.

The budget is that of ``base.numerics``: twice eager's own largest error plus one ulp. Where the
library may use tf32, eager's products are in tf32 too. Largest errors of few elements are partly
luck: where a set fails, eager's is the largest of several runs that round otherwise
(``verify.rounding``). A set that fails then is drawn three more times, and the largest errors of
ours and of eager are compared over all draws.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tvmcap.base.errors import TvmcapError, VerifyError
from tvmcap.base.numerics import Array, Comparison, compare, to_numpy
from tvmcap.base.ranges import Samples
from tvmcap.base.signature import Signature, evaluate, flatten, unflatten
from tvmcap.verify import samples
from tvmcap.verify.accuracy import LUCK_DB, hold
from tvmcap.verify.again import NoReference, check_redrawn
from tvmcap.verify.inputs import InputSet, draw, pick, plan_inputs, varied
from tvmcap.verify.reference import (
    in_parts,
    parts_needed,
    reference_dtype,
    run_eager,
    run_reference,
)
from tvmcap.verify.result import Check, VerifyReport
from tvmcap.verify.rounding import rounded

log = logging.getLogger("tvmcap")

Progress = Callable[[int, int, str], None]


def verify(
    compiled: Any,
    *,
    reference: Callable[..., Any] | None = None,
    level: str = "quick",
    sizes: Sequence[Mapping[str, int]] | None = None,
    seed: int | None = None,
    limit_s: float | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a library with the PyTorch code it came from, run in higher precision.

    Parameters
    ----------
    compiled: what ``build`` or ``load`` returned; it must be able to run on this machine.
    reference: a function or module with the library's calling convention; by default the code that
        was captured. A loaded library has none, so it must be given there.
    level: ``"quick"`` or ``"full"`` (more sizes; NaN and Inf inputs), see ``verify.inputs``.
    sizes: sizes of the symbolic dimensions to check instead.
    seed: seed of the inputs; by default the library's ``config.seed``.
    limit_s: stop adding sets after so many seconds; the first three are always checked.
    progress: called with (sets done, sets in all, name of the set at hand).

    Raises VerifyError where there is nothing to run or to compare with. A failed comparison does
    not raise: see ``VerifyReport.ok`` and ``.require()``.
    """
    subject = Subject.of(compiled, reference)
    seed = int(getattr(compiled.config, "seed", 0) if seed is None else seed)
    example = subject.example
    if compiled.manifest.training is not None:
        from tvmcap.verify.gradients import verify_gradients

        return verify_gradients(
            compiled, subject.eager, example, subject.keywords, sizes=sizes, seed=seed
        )
    sets = plan_inputs(subject.signature, example, level=level, sizes=sizes, seed=seed)
    sets = [s for s in sets if s.kind != "nonfinite" or not subject.finite_only]
    checks: list[Check] = []
    start = time.monotonic()
    for i, chosen in enumerate(sets):
        if limit_s is not None and i >= 3 and time.monotonic() - start > limit_s:
            break
        if progress:
            progress(i, len(sets), str(chosen))
        checks.append(check_set(subject, chosen))
        log.debug("verify: %s", checks[-1])
    tensors = draw(subject.signature, replace(sets[0], kind="zeros"), example)
    name = str(reference_dtype(tensors)).removeprefix("torch.")
    return VerifyReport(tuple(checks), name, len(sets) - len(checks))


@dataclass(frozen=True)
class Subject:
    """What is compared: ``ours`` and ``eager`` with one calling convention, and where each runs.

    With ``tf32`` the error that eager makes with products in tf32 decides the budget. With
    ``floor_db``, for a quantized library, it is the noise: that far below the signal at least, on
    the values of ``example``, for others may be out of the ranges that it was made for. With
    ``finite_only`` NaN and Inf inputs are not checked: static ranges clip them.
    """

    signature: Signature
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    device: torch.device
    eager_device: torch.device
    example: Sequence[torch.Tensor] | None
    keywords: tuple[str, ...] = ()
    fixed: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    tf32: bool = False
    floor_db: float | None = None
    finite_only: bool = False

    @staticmethod
    def of(compiled: Any, reference: Callable[..., Any] | None) -> Subject:
        """Find the two sides of ``compiled``; raises VerifyError where one is missing."""
        if compiled.executor is None:
            raise VerifyError(
                "this library was built for another machine and cannot run here; load it there "
                "and call tvmcap.verify(lib, reference=fn)"
            )
        captured = compiled.captured
        if reference is None and captured is None:
            raise VerifyError(
                "a loaded library does not hold the PyTorch code it came from; give it: "
                "tvmcap.verify(lib, reference=fn)"
            )
        device = torch.device(device_of(compiled))
        example = None if captured is None else typical(captured, compiled.config)
        eager = reference if reference is not None else captured.eager
        home = _home(eager, example, device)
        keywords = () if captured is None else tuple(captured.kwargs)
        tf32 = device.type == "cuda" and bool(compiled.manifest.config.get("allow_tf32"))
        sides = (compiled, eager, device, home)
        quantized = compiled.manifest.quantization
        options = quantized["options"] if quantized else {}
        static = options.get("activations") == "static"
        return Subject(
            compiled.signature,
            *sides,
            example,
            keywords,
            tf32=tf32,
            floor_db=floor_of(options, example),
            finite_only=static,
        )

    def call(self, fn: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
        """Call ``fn`` with the flat inputs ``leaves``, its ``keywords`` by keyword."""
        values = self.arguments(leaves)
        count = len(values) - len(self.keywords)
        return fn(*values[:count], **dict(zip(self.keywords, values[count:], strict=True)))

    def arguments(self, leaves: list[torch.Tensor]) -> tuple[Any, ...]:
        """Rebuild the arguments of a call from the flat inputs."""
        return tuple(unflatten(self.signature.in_tree, leaves))

    def run_ours(self, leaves: list[torch.Tensor]) -> list[Array]:
        """Return the library's outputs in the order of the signature, on the host."""
        result = self.call(self.ours, [t.to(self.device) for t in leaves])
        return [to_numpy(t) for t in flatten(self.signature.out_tree, result)]

    def run_eager(self, leaves: list[torch.Tensor]) -> list[Array]:
        """Run the PyTorch code as it is; its outputs on the host."""
        result = run_eager(self.call, (self.eager, leaves), {}, self.tf32)
        return [to_numpy(t) for t in flatten(self.signature.out_tree, result)]

    def run_reference(
        self, leaves: list[torch.Tensor], eager: list[Array], sizes: Mapping[str, int]
    ) -> list[Array]:
        """Run the PyTorch code in higher precision, in parts where memory is short."""
        dtype = reference_dtype(leaves)
        sig = self.signature

        def run(thunk: Callable[[], Any]) -> Any:
            return run_reference(thunk, (), {}, dtype)

        outputs = [
            replace(o, shape=tuple(evaluate(s, sizes) for s in o.shape)) for o in sig.outputs
        ]
        parts = parts_needed(leaves, outputs)
        while True:
            try:
                if parts == 1:
                    result = run(lambda: self.call(self.eager, leaves))
                    return [to_numpy(t) for t in flatten(sig.out_tree, result)]
                return in_parts(
                    lambda piece: self.call(self.eager, piece), leaves, sig, parts, eager, run
                )
            except torch.OutOfMemoryError:
                parts *= 2


def device_of(compiled: Any) -> str:
    """``"cuda"`` or ``"cpu"``: where the library runs."""
    return "cuda" if compiled.manifest.target["kind"] == "cuda" else "cpu"


def example_leaves(captured: Any) -> list[torch.Tensor]:
    """Flatten the example inputs of ``captured`` in the order of its signature.

    With gradients, the parameters and buffers of a module are no part of it.
    """
    values = (*captured.args, *captured.kwargs.values())
    tree = captured.signature.in_tree
    return flatten({**tree, "items": tree["items"][: len(values)]}, values)


def typical(captured: Any, config: Any) -> list[torch.Tensor]:
    """Return the first calibration input where there are any, else the example."""
    given = config.calibration
    if isinstance(given, Samples):
        return samples.leaves(captured.signature, given.inputs[0], 0)
    return example_leaves(captured)


def floor_of(options: Mapping[str, Any], example: Sequence[torch.Tensor] | None) -> float | None:
    """Return what the noise of a quantized library is held to, None for another library.

    Static scales without inputs that they suit are held to nothing.
    """
    if not options:
        return None
    blind = example is None and options["activations"] == "static"
    return -math.inf if blind else float(options["budget_db"]) - LUCK_DB


def _home(
    fn: Callable[..., Any], example: Sequence[torch.Tensor] | None, device: torch.device
) -> torch.device:
    """Device that the PyTorch code runs on: of its parameters, else of its example."""
    if isinstance(fn, torch.nn.Module):
        for tensor in (*fn.parameters(), *fn.buffers()):
            return tensor.device
    return example[0].device if example else device


def check_set(subject: Subject, chosen: InputSet) -> Check:
    """Compare on one set of inputs; again where a failure may be luck."""
    return check_redrawn(lambda inputs, runs: _compare_once(subject, inputs, runs), chosen)


def _compare_once(subject: Subject, chosen: InputSet, runs: int) -> tuple[Comparison, ...]:
    held = subject.floor_db is not None and chosen.kind == "normal"
    example = subject.example or ()
    if held and varied(example) and all(t.numel() for t in example):
        leaves = pick(subject.signature, chosen, example)
    else:
        leaves = draw(subject.signature, chosen, subject.example, subject.fixed)
    home = [t.to(subject.eager_device) for t in leaves]
    versions = [t._version for t in home]
    try:
        what = "PyTorch refuses these inputs"
        eager = subject.run_eager(home)
        others = rounded(lambda: subject.run_eager(home), runs)
        what = "PyTorch cannot compute a higher-precision reference"
        wide = subject.run_reference(home, eager, chosen.sizes)
    except TvmcapError:
        raise
    except Exception as e:
        raise NoReference(f"{what}: {(str(e).splitlines() or [repr(e)])[0]}") from e
    if versions != [t._version for t in home]:
        raise VerifyError(
            "the PyTorch code writes to its arguments; verify a function that does not"
        )
    ours = subject.run_ours(leaves)
    specs = subject.signature.outputs
    found = [
        compare(o, r, e, name=s.name, dtype=s.dtype, others=[other[i] for other in others])
        for i, (o, r, e, s) in enumerate(zip(ours, wide, eager, specs, strict=True))
    ]
    if subject.floor_db is not None:
        floor = subject.floor_db if held else -math.inf
        found = [
            hold(*x, floor, clipped=subject.finite_only)
            for x in zip(found, ours, wide, eager, strict=True)
        ]
    return tuple(found)

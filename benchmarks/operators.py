"""Which ATen core operators the back end serves: writes the table of docs/operators.md.

python benchmarks/operators.py --write    # without it: prints the table
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from operator_samples import Sample, samples
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tvmcap.base.errors import CaptureError
from tvmcap.capture import graphs, ir, partition, parts
from tvmcap.capture.decompositions import for_inference, for_training
from tvmcap.capture.random import draw_first

DOCUMENT = Path(__file__).parent.parent / "docs" / "operators.md"
SIZES = "sym_"
"""What the names of operators begin with that tell a size."""
SUPPORTED, DECOMPOSED, MISSING = "supported", "decomposed", "PyTorch's kernel"
DRAWN, SIZE, NONE, YES = "drawn by PyTorch", "a size, known without work", "none", "yes"


_ONE_RESULT = ("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
"""Operators of whose results models use the first alone."""


@dataclass(frozen=True)
class Row:
    """What becomes of an operator, and of its gradient."""

    operator: str
    status: str
    gradient: str

    @property
    def is_ours(self) -> bool:
        """Whether the back end computes it."""
        return self.status in (SUPPORTED, DECOMPOSED)


def core_operators() -> Iterator[Any]:
    """Give every operator that PyTorch counts to its core set."""
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        operator = getattr(packet, overload or "default", None)
        if operator is not None and torch.Tag.core in operator.tags:
            yield operator


@dataclass(frozen=True)
class Case:
    """A call of an operator as a function of its tensors, those that can be differentiated first.

    Attributes
    ----------
    tensors: the example's.
    count: how many of them are floating-point.
    """

    operator: Any
    tensors: tuple[torch.Tensor, ...]
    count: int
    order: tuple[int, ...]
    rest: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(operator: Any, sample: Sample) -> Case:
        """Take the tensors out of the arguments."""
        leaves, spec = tree_flatten(sample)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        writes = [
            a.name for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        named = dict(zip((a.name for a in operator._schema.arguments), sample[0], strict=False))
        changed = {id(v) for k, v in {**named, **sample[1]}.items() if k in writes}
        smooth = {i: leaves[i].is_floating_point() and id(leaves[i]) not in changed for i in at}
        order = sorted(at, key=lambda i: not smooth[i])
        tensors = tuple(leaves[i] for i in order)
        count = sum(smooth.values())
        return Case(operator, tensors, count, tuple(order), tuple(leaves), spec)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call the operator; views become tensors of their own, and what it changes is a copy."""
        leaves = list(self.rest)
        changed = self.operator._schema.is_mutable
        for i, tensor in zip(self.order, tensors, strict=True):
            leaves[i] = tensor.clone() if changed else tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        found = self.operator(*args, **kwargs)
        if any(r.alias_info is not None for r in self.operator._schema.returns):
            found = tree_map(lambda x: x.neg() if isinstance(x, torch.Tensor) else x, found)
        results = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        return results[:1] if self.operator.__name__ in _ONE_RESULT else results

    def outputs(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the results that have a gradient."""
        return [x for x in self(*tensors) if x.is_floating_point() and x.requires_grad]


def cases() -> dict[str, Case]:
    """Return a call of every core operator that has one, by bare name."""
    known = samples()
    return {op.__name__: Case.of(op, known[op.__name__]) for op in core_operators()}


def rows() -> list[Row]:
    """Trace every core operator as torch.compile does, and see what is left to PyTorch."""
    return [_row(name, case) for name, case in cases().items()]


def _row(name: str, case: Case) -> Row:
    if name.startswith(SIZES):
        return Row(name, SIZE, NONE)
    if torch.Tag.nondeterministic_seeded in case.operator.tags:
        return Row(name, DRAWN, YES if name.startswith("native_dropout") else NONE)
    try:
        traced = _trace(case, case.tensors, _table(False))
        left = [operator for graph in traced for operator in _left(graph)]
        whole = any(n.target is case.operator for graph in traced for n in graph.graph.nodes)
    except Exception:  # its results have sizes, or are numbers, that only values tell
        return Row(name, MISSING, MISSING if _has_gradient(case) else NONE)
    status = MISSING if left else SUPPORTED if whole else DECOMPOSED
    if not _has_gradient(case) or name.split(".")[0].endswith("_backward"):
        return Row(name, status, NONE)
    tensors = [x.clone().requires_grad_(i < case.count) for i, x in enumerate(case.tensors)]
    both = _trace(case, tensors, _table(True))
    gradient = MISSING if any(_left(graph) for graph in both) else YES
    return Row(name, status, gradient)


@functools.cache
def _table(training: bool) -> Any:
    return for_training() if training else for_inference()


@functools.cache
def _known() -> set[str]:
    return ir.known_operators()


def _has_gradient(case: Case) -> bool:
    try:
        tensors = [x.clone().requires_grad_(i < case.count) for i, x in enumerate(case.tensors)]
        results = case.outputs(*tensors)
        if results:
            total = sum(x.sum() for x in results)
            torch.autograd.grad(total, tensors[: case.count], allow_unused=True)
        return bool(results)
    except (RuntimeError, NotImplementedError):
        return False


def _trace(case: Case, tensors: Any, table: Any) -> list[fx.GraphModule]:
    """Return the graphs that AOTAutograd makes: one, or a forward and a backward one."""
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        found.append(partition.copy(graph))
        return graph

    def cut(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        pair = partition.partition(joint, num_fwd_outputs, 1.0)
        return pair.forward, pair.backward

    fn = aot_function(case, keep, keep, partition_fn=cut, decompositions=table)
    results = [x for x in fn(*tensors) if x.requires_grad]
    if results:
        torch.autograd.grad(sum(x.sum() for x in results), tensors[: case.count], allow_unused=True)
    return found


def _left(graph: fx.GraphModule) -> list[str]:
    """Name the operators of a graph that stay with PyTorch."""
    draw_first(graph)
    found = parts.split(partition.copy(graph), torch.device("cpu"), _known(), _no)
    left = list(found.left)
    for name in found.served:
        part = getattr(found.graph, name)
        inputs = [n.name for n in part.graph.nodes if n.op == "placeholder"]
        try:
            graphs.read(part, inputs, {}, {})
        except CaptureError as e:
            left.append(str(e))
    return left


def _no(_: fx.Node) -> str:
    return ""


def document(found: list[Row]) -> str:
    """Return the text of docs/operators.md."""
    count = {status: sum(r.status == status for r in found) for status in (SUPPORTED, DECOMPOSED)}
    with_gradient = [r for r in found if r.gradient != NONE]
    ours = sum(r.gradient == YES for r in with_gradient)
    lines = [
        "# Operators",
        "",
        "What becomes of the ATen core operators (those that PyTorch tags `core`), the set that",
        "`torch.export` and AOTAutograd reduce models to. `python benchmarks/operators.py --write`",
        "writes this page, and a test keeps it true: each operator is traced as `torch.compile`",
        "does, and each that is served is run, with its gradient, against float64.",
        "",
        f"Of {len(found)} operators {count[SUPPORTED]} are supported and {count[DECOMPOSED]}",
        f"decomposed into supported ones. {ours} of the {len(with_gradient)} that can be",
        "differentiated have a gradient that is compiled, too.",
        "",
        "- **supported**: the operator has a lowering of its own.",
        "- **decomposed**: it is rewritten into operators that have one.",
        "- **PyTorch's kernel**: it has none. `tvmcap.build` refuses it, with the source line.",
        "  Under `torch.compile` that part of the graph stays with PyTorch, with one warning that",
        "  names the operator.",
        "- **drawn by PyTorch**: random numbers come from PyTorch's generator, as in eager.",
        "- **gradient**: *yes*: the backward graph is compiled; *none*: there is none, or",
        "  the operator is itself a gradient.",
        "",
        "An operator of your own gets a lowering with `tvmcap.register_op`, which also takes",
        '`lower="eager"`: then the library calls PyTorch\'s kernel',
        "([tutorial](../tutorials/08_cover_a_custom_operator.py)).",
        "",
        "| operator | status | gradient |",
        "| --- | --- | --- |",
        *(f"| `{r.operator}` | {r.status} | {r.gradient} |" for r in found),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/operators.md")
    text = document(rows())
    if parser.parse_args().write:
        DOCUMENT.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()

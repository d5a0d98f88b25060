"""What a fused PrimFunc does around its one reduction, read off its blocks.

FuseTIR leaves one block an operator: the reduction (the anchor) and then elementwise blocks, each
through a buffer. ``read`` follows those buffers and gives the expression of every output as a
function of the anchor's value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmcap.kernel import tvmscript

tvmscript.quicken()  # for the kernels around these epilogues

Expr = Any
"""A PrimExpr; TVM's Python classes have no common typed base that helps here."""

Buffer = Any
"""A tirx buffer: a Var whose type is a BufferType."""


@dataclass(frozen=True)
class Stage:
    """One elementwise block: ``buffer[axes] = value``."""

    axes: tuple[Any, ...]
    value: Expr


@dataclass(frozen=True)
class Epilogue:
    """From the anchor's value to what is stored.

    Attributes
    ----------
    anchor: the buffer that the reduction writes.
    outputs: the parameters written, in the order of the function's parameters.
    stages: each buffer that an elementwise block writes, with its expression.
    reads: parameters read besides the anchor's own operands (bias, residual, ...), in order of
        parameters.
    """

    anchor: Buffer
    outputs: tuple[Buffer, ...]
    stages: dict[Any, Stage]
    reads: tuple[Buffer, ...]
    _uses: dict[Any, int] = field(default_factory=dict)

    def stores(
        self,
        value: Expr,
        indices: Sequence[Expr],
        remap: Callable[[Buffer, list[Expr]], Expr] | None = None,
    ) -> tuple[list[Any], list[tuple[Buffer, Expr]]]:
        """Return what to compute first (Binds) and the value of each output at ``indices``.

        Parameters
        ----------
        value: the anchor's finished value at ``indices``, in the anchor's dtype.
        indices: index into the anchor, one expression a dimension; outputs are written at the same
            ones.
        remap: how to read a parameter at some indices; a plain load where not given.
        """
        walk = _Walk(self, value, list(indices), remap or (lambda b, i: tirx.BufferLoad(b, i)))
        if self._uses.get(self.anchor, 0) > 1 and not is_simple(value):
            walk.value = walk.bind("sum", str(self.anchor.dtype), value)
        values = [(out, walk.value_of(out, list(indices))) for out in self.outputs]
        return walk.binds, values


@dataclass(frozen=True)
class Fused:
    """A fused PrimFunc taken apart: the reduction block, and what follows it."""

    block: Any
    epilogue: Epilogue


def read(func: tirx.PrimFunc) -> Fused | None:
    """Take a PrimFunc apart; None where it is not one reduction, then elementwise blocks.

    Every elementwise block must read the anchor at its own point, so that outputs can be stored
    tile by tile.
    """
    found = blocks(func)
    anchors = [
        b for b in found or () if any(v.iter_type == tirx.IterVar.CommReduce for v in b.iter_vars)
    ]
    if found is None or len(anchors) != 1:
        return None
    anchor = anchors[0].writes[0].source
    stages: dict[Any, Stage] = {}
    for block in found:
        if block.same_as(anchors[0]):
            continue
        store, axes = block.body, [v.var for v in block.iter_vars]
        if not isinstance(store, tirx.BufferStore) or not same_all(store.indices, axes):
            return None
        stages[store.buffer] = Stage(tuple(axes), store.value)
    outputs = tuple(p for p in func.params if p in stages or p.same_as(anchor))
    uses, reads = _count_uses(stages, func.params, outputs)
    epilogue = Epilogue(anchor, outputs, stages, reads, uses)
    return Fused(anchors[0], epilogue) if outputs and _pointwise(epilogue) else None


def digest(func: tirx.PrimFunc) -> str:
    """Return a short hash of what a PrimFunc computes; names and attributes do not enter."""
    bare = tirx.PrimFunc(func.params, func.body)
    return hashlib.sha256(
        str(tvm_ffi.structural_hash(bare, map_free_vars=True)).encode()
    ).hexdigest()[:16]


class _Walk:
    """Evaluates outputs at one point; a value that is used more than once is computed once."""

    def __init__(
        self, epilogue: Epilogue, value: Expr, indices: list[Expr], load: Callable[..., Expr]
    ) -> None:
        self.epilogue, self.value, self.indices, self.load = epilogue, value, indices, load
        self.binds: list[Any] = []
        self.known: dict[Any, list[tuple[list[Expr], Expr]]] = {}

    def value_of(self, buffer: Buffer, indices: list[Expr]) -> Expr:
        if buffer.same_as(self.epilogue.anchor):
            if not same_all(indices, self.indices):
                raise _NotPointwise
            return self.value
        stage = self.epilogue.stages.get(buffer)
        if stage is None:
            return self.load(buffer, indices)
        for seen, value in self.known.get(buffer, ()):
            if same_all(seen, indices):
                return value
        value = self._evaluate(stage.value, dict(zip(stage.axes, indices, strict=True)))
        if self.epilogue._uses.get(buffer, 0) > 1 and not is_simple(value):
            value = self.bind(buffer.name, str(buffer.dtype), value)
        self.known.setdefault(buffer, []).append((indices, value))
        return value

    def bind(self, name: str, dtype: str, value: Expr) -> Expr:
        """Compute a value once; returns what then stands for it."""
        var, bound, use = named(name, dtype, value)
        self.binds.append(tirx.Bind(var, bound))
        return use

    def _evaluate(self, expr: Expr, axes: dict[Any, Expr]) -> Expr:
        def load(node: Any) -> Any:
            return self.value_of(node.source, list(node.indices))

        expr = tvm_ffi.structural_map(expr, (tirx.Var, lambda v: axes.get(v, v)))
        return tvm_ffi.structural_map(expr, (tvm.ir.TensorLoad, load))


class _NotPointwise(Exception):
    """An elementwise block reads the anchor at another point than its own."""


def _pointwise(epilogue: Epilogue) -> bool:
    shape = epilogue.anchor.shape
    if any(
        len(out.shape) != len(shape) or not same_all(out.shape, shape) for out in epilogue.outputs
    ):
        return False
    point = [tirx.Var(f"i{d}", "int64") for d in range(len(shape))]
    try:
        epilogue.stores(tirx.Var("acc", epilogue.anchor.dtype), point)
    except _NotPointwise:
        return False
    return True


def blocks(func: tirx.PrimFunc) -> list[Any] | None:
    """Return the blocks under the root in order, or None where the loops are not plain."""
    found: list[Any] = []
    root = getattr(func.body, "block", None)
    if not isinstance(root, SBlock):
        return None
    for stmt in root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]:
        loops = []
        while isinstance(stmt, tirx.For):
            loops.append(stmt.loop_var)
            stmt = stmt.body
        if not isinstance(stmt, SBlockRealize) or not _plain(stmt, loops):
            return None
        found.append(stmt.block)
    return found


def _plain(realize: Any, loops: list[Any]) -> bool:
    values = [v for v in realize.iter_values if not isinstance(v, tirx.IntImm)]
    return same_all(values, loops) and isinstance(realize.predicate, tirx.IntImm)


def is_simple(value: Expr) -> bool:
    """Whether an expression costs no more than its own name."""
    return isinstance(value, tirx.Var | tirx.IntImm | tirx.FloatImm | tvm.ir.TensorLoad)


def named(name: str, dtype: str, value: Expr) -> tuple[Any, Expr, Expr]:
    """Return a variable, what to bind it to, and the expression that then stands for ``value``.

    A bfloat16 value is kept as float32: TVM's BF16ComputeLegalize changes bound values' types but
    not those of their variables.
    """
    if dtype != "bfloat16":
        var = tirx.Var(name, dtype)
        return var, value, var
    var = tirx.Var(name, "float32")
    return var, tirx.Cast("float32", value), tirx.Cast("bfloat16", var)


def _count_uses(
    stages: dict[Any, Stage], params: Sequence[Any], outputs: Sequence[Any]
) -> tuple[dict[Any, int], tuple[Any, ...]]:
    """Count loads of each buffer, and the store of an output; list the parameters that are read."""
    uses: dict[Any, int] = {}
    for stage in stages.values():

        def count(node: Any) -> None:
            uses[node.source] = uses.get(node.source, 0) + 1

        tvm_ffi.structural_walk(stage.value, (tvm.ir.TensorLoad, count))
    reads = tuple(p for p in params if p in uses and p not in stages and p not in outputs)
    for out in outputs:
        uses[out] = uses.get(out, 0) + 1
    return uses, reads


def same_all(left: Sequence[Expr], right: Sequence[Expr]) -> bool:
    """Whether two lists of expressions are equal, one by one."""
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


def same(a: Expr, b: Expr) -> bool:
    """Whether two expressions are the same node or the same tree."""
    return bool(tvm_ffi.structural_equal(a, b))

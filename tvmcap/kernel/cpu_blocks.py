"""The blocks of a PrimFunc as plain data, elementwise producers inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from tvmcap.kernel import epilogue as ep

Expr = Any

#: Functions too dear to evaluate twice.
COSTLY = (
    "tirx.exp",
    "tirx.tanh",
    "tirx.erf",
    "tirx.sigmoid",
    "tirx.log",
    "tirx.pow",
    "tirx.sin",
    "tirx.cos",
)
GUARD = "prim.if_then_else"
_COMBINERS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)


@dataclass(frozen=True)
class Block:
    """``buffer[axes] = value``, or the ``combine`` of values over reduced axes from ``init``.

    ``combine`` is a TIR node class (Add, Mul, Max, Min), or None for an elementwise block.
    """

    buffer: Any
    axes: tuple[Any, ...]
    extents: tuple[Any, ...]
    reduced: tuple[Any, ...]
    reduced_extents: tuple[Any, ...]
    value: Expr
    combine: Any = None
    init: Expr = None


def parse(func: tirx.PrimFunc) -> list[Block] | None:
    """Return the blocks in order, or None where one is of another form."""
    blocks = ep.blocks(func)
    parsed = [_parse(block) for block in blocks or ()]
    return (
        None
        if blocks is None or any(b is None for b in parsed)
        else [b for b in parsed if b is not None]
    )


def _parse(block: Any) -> Block | None:
    store = block.body
    spatial = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.DataPar]
    reduced = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    axes = [v.var for v in spatial]
    if not isinstance(store, tirx.BufferStore) or len(spatial) + len(reduced) != len(
        block.iter_vars
    ):
        return None
    value = _short_indices(store.value, block.iter_vars)
    if any(str(v.var.ty) != "int64" for v in block.iter_vars) or not ep.same_all(
        store.indices, axes
    ):
        return None
    found = Block(
        store.buffer,
        tuple(axes),
        tuple(v.dom.extent for v in spatial),
        tuple(v.var for v in reduced),
        tuple(v.dom.extent for v in reduced),
        value,
    )
    return _reduction(found, store, block.init) if reduced else found


def _short_indices(value: Expr, iter_vars: Any) -> Expr:
    """Simplify indices with divisions: TOPI's reshapes divide by symbolic extents too."""
    analyzer, extents = Analyzer(), {v.var: v.dom.extent for v in iter_vars}
    for var in iter_vars:
        analyzer.bind(var.var, var.dom)

    def modulo(node: Any) -> Expr:
        return node.a if node.a in extents and ep.same(extents[node.a], node.b) else node

    def short(index: Expr) -> Expr:
        divisions: list[Any] = []
        tvm_ffi.structural_walk(index, ((tirx.FloorMod, tirx.FloorDiv), divisions.append))
        if not divisions:
            return index
        return tvm_ffi.structural_map(analyzer.simplify(index), (tirx.FloorMod, modulo))

    def load(node: Any) -> Expr:
        return tirx.BufferLoad(node.source, [short(i) for i in node.indices])

    return replace_loads(value, load)


def _reduction(found: Block, store: Any, init: Any) -> Block | None:
    value = found.value
    kind = next((c for c in _COMBINERS if isinstance(value, c)), None)
    if kind is None or not isinstance(init, tirx.BufferStore):
        return None
    for own, other in ((value.a, value.b), (value.b, value.a)):
        if _is_own(own, store) and not any(
            load.source.same_as(store.buffer) for load in loads(other)
        ):
            return replace(found, value=other, combine=kind, init=init.value)
    return None


def _is_own(expr: Any, store: Any) -> bool:
    return (
        isinstance(expr, tvm.ir.TensorLoad)
        and expr.source.same_as(store.buffer)
        and ep.same_all(expr.indices, store.indices)
    )


def loads(expr: Expr) -> list[Any]:
    """Return every load in an expression."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, (tvm.ir.TensorLoad, lambda node: found.append(node)))
    return found


def uses(expr: Expr, var: Any) -> bool:
    """Whether a variable stands in an expression."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, lambda v: found.append(v) if v.same_as(var) else None))
    return bool(found)


def calls(expr: Expr) -> set[str]:
    """Return the names of the operators that an expression calls."""
    names: set[str] = set()
    tvm_ffi.structural_walk(
        expr, (tvm.ir.Call, lambda node: names.add(getattr(node.op, "name", "?")))
    )
    return names


def substitute(expr: Expr, values: dict[Any, Expr]) -> Expr:
    """Return the expression with variables replaced."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda v: values.get(v, v)))


def replace_loads(expr: Expr, change: Callable[[Any], Expr]) -> Expr:
    """Return the expression with every load replaced by ``change(load)``."""
    return tvm_ffi.structural_map(expr, (tvm.ir.TensorLoad, change))


def inline(blocks: Sequence[Block], params: Sequence[Any]) -> list[Block]:
    """Return the blocks with elementwise producers moved into their consumers.

    Kept: outputs, padding (its guard would sit in an inner loop), and costly values that several
    blocks read.
    """
    kept = list(blocks)
    for buffer in [
        b.buffer
        for b in blocks
        if b.combine is None and not any(b.buffer.same_as(p) for p in params)
    ]:
        (block,) = (b for b in kept if b.buffer.same_as(buffer))
        readers = [b for b in kept if any(ld.source.same_as(buffer) for ld in loads(b.value))]
        if readers and _worth(block, readers):
            kept = [
                _into(b, block) if any(b is r for r in readers) else b
                for b in kept
                if b is not block
            ]
    return kept


def _worth(block: Block, readers: list[Block]) -> bool:
    names = calls(block.value)
    if GUARD in names or (len(readers) > 1 and names & set(COSTLY)):
        return False
    return all(_single_point(reader, block.buffer) for reader in readers)


def _single_point(reader: Block, buffer: Any) -> bool:
    """Whether the reader needs one element a point, which is safe to evaluate early."""
    reads = [ld for ld in loads(reader.value) if ld.source.same_as(buffer)]
    if len(reads) > 1 and GUARD in calls(reader.value):
        return False
    return all(ep.same_all(ld.indices, reads[0].indices) for ld in reads)


def _into(reader: Block, block: Block) -> Block:
    reads = [ld for ld in loads(reader.value) if ld.source.same_as(block.buffer)]
    value = substitute(block.value, dict(zip(block.axes, reads[0].indices, strict=True)))
    var, bound, use = ep.named(block.buffer.name, str(block.buffer.dtype), value)
    point = value if len(reads) == 1 else use
    changed = replace_loads(
        reader.value, lambda ld: point if ld.source.same_as(block.buffer) else ld
    )
    return replace(reader, value=changed if len(reads) == 1 else tirx.Let(var, bound, changed))

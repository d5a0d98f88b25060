"""Sums over the rows of a matrix on a GPU, with the elementwise work before and after them.

A bias gradient is one: ``gradient * derivative`` summed over the batch. Where the product is needed
as a matrix as well, one pass over memory writes it and adds it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule

from tvmcap.base import codegen
from tvmcap.graph.columns import summed_matrix
from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.features import copy_func
from tvmcap.kernel.sums import Sums, layout
from tvmcap.kernel.sums_kernel import sums_kernel
from tvmcap.schedules.row_math import put

#: Columns that blocks of threads divide among them.
COLUMNS = 32


@dataclass(frozen=True)
class _Parts:
    """The sum of a PrimFunc, and its elementwise blocks before and after that."""

    before: list[Any]
    total: Any
    after: list[Any]


def suits(func: tirx.PrimFunc, target: Any) -> bool:
    """Whether ``scheduled`` takes a PrimFunc."""
    return target.kind.name == "cuda" and _parts(Schedule(func)) is not None


def scheduled(func: tirx.PrimFunc, target: Any) -> tirx.PrimFunc | None:
    """Write elementwise blocks, a float32 sum of a matrix over its rows, and elementwise blocks.

    Those before the sum have the matrix's shape, and any of them may be an output; those after it
    have the shape of a row. Rows may be symbolic; columns are a multiple of ``COLUMNS``. None for
    another PrimFunc.
    """
    found = read(func) if target.kind.name == "cuda" else None
    if found is None:
        return None
    capability = codegen.compute_capability(target)
    shared = int(target.attrs["max_shared_memory_per_block"])
    return sums_kernel(found, layout(found, capability, shared), capability)


def read(func: tirx.PrimFunc) -> Sums | None:
    """Take a PrimFunc apart; None where it is not such a sum."""
    sch = Schedule(copy_func(func))
    parts = _parts(sch)
    shape = None if parts is None else summed_matrix(sch.get(parts.total))
    if parts is None or shape is None:
        return None
    outputs = {sch.get(b).name_hint for b in sch.get_output_blocks(sch.get_sblock("root"))}
    stored, last = (
        [b for b in side if sch.get(b).name_hint in outputs] for side in (parts.before, parts.after)
    )
    for block in (*parts.before, *parts.after):
        if block not in stored and block not in last:
            sch.compute_inline(block)
    row, column = (tirx.Var(name, "int64") for name in ("row", "column"))

    def value(block: Any) -> tuple[Any, Any]:
        """Return what a block writes and its value, in terms of the row and the column."""
        found = sch.get(block)
        point = _point(found, row, column)
        axes = {v.var: at for v, at in zip(found.iter_vars, point, strict=True)}
        return found.body.buffer, put(found.body.value, axes)

    buffer, sum_ = value(parts.total)
    total = next(x for x in (sum_.a, sum_.b) if not _loads(x, buffer))
    ends = [value(b) for b in last] or [(buffer, tirx.BufferLoad(buffer, [column]))]
    return Sums(
        params=tuple(sch.mod["main"].params),
        rows=shape[0],
        columns=int(shape[1]),
        row=row,
        column=column,
        matrices=tuple(map(value, stored)),
        total=(buffer, total),
        end=ends[0],
    )


def _point(block: Any, row: Any, column: Any) -> list[Any]:
    """Return what stands for a block's axes; the sum adds over rows, what follows it has none."""
    if _reduces(block):
        return [row if _adds(v) else column for v in block.iter_vars]
    return [row, column][-len(block.iter_vars) :]


def _loads(value: Any, buffer: Any) -> bool:
    return getattr(value, "source", None) is not None and value.source.same_as(buffer)


def _parts(sch: Schedule) -> _Parts | None:
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    sums = [i for i, block in enumerate(blocks) if _reduces(sch.get(block))]
    if len(sums) != 1:
        return None
    before, total, after = blocks[: sums[0]], blocks[sums[0]], blocks[sums[0] + 1 :]
    shape = summed_matrix(sch.get(total))
    if shape is None or not isinstance(shape[1], tirx.IntImm) or int(shape[1]) % COLUMNS:
        return None
    fits = all(_fills(sch.get(b), shape) for b in before)
    fits = fits and all(_fills(sch.get(b), shape[1:]) for b in after)
    outputs = {sch.get(b).name_hint for b in sch.get_output_blocks(sch.get_sblock("root"))}
    ends = [b for b in (total, *after) if sch.get(b).name_hint in outputs]
    return _Parts(before, total, after) if fits and len(ends) == 1 else None


def _reduces(block: Any) -> bool:
    return any(map(_adds, block.iter_vars))


def _adds(axis: Any) -> bool:
    return bool(axis.iter_type == tirx.IterVar.CommReduce)


def _fills(block: Any, shape: Sequence[Any]) -> bool:
    """Whether a block computes each element of a tensor of ``shape`` at its own point."""
    store, axes = block.body, [v.var for v in block.iter_vars]
    return (
        isinstance(store, tirx.BufferStore)
        and not _reduces(block)
        and ep.same_all(store.indices, axes)
        and ep.same_all(store.buffer.shape, shape)
    )

"""Sums over the rows of a matrix on a GPU, with the elementwise work before and after them.

A bias gradient is one: ``gradient * derivative`` summed over the batch. Where the product is needed
as a matrix as well, one pass over memory writes it and adds it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

from tvmcap.graph.columns import summed_matrix
from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.features import copy_func
from tvmcap.schedules import gpu_math

COLUMNS, VECTOR = 32, 8
"""Columns of a block, and neighbouring ones of a thread: 16 bytes of 16-bit values."""
ROWS, WARPS = 256, 32
"""Rows that the threads of a block read at once, and its warps."""


@dataclass(frozen=True)
class _Parts:
    """The sum of a PrimFunc, and its elementwise blocks before and after that."""

    before: list[Any]
    total: Any
    after: list[Any]


def suits(func: tirx.PrimFunc, target: Any) -> bool:
    """Whether ``schedule`` takes a PrimFunc."""
    return target.kind.name == "cuda" and _parts(Schedule(func)) is not None


def schedule(func: tirx.PrimFunc, target: Any) -> Schedule | None:
    """Schedule elementwise blocks, a float32 sum of a matrix over its rows, and elementwise blocks.

    Those before the sum have the matrix's shape, and any of them may be an output; those after it
    have the shape of a row. Rows may be symbolic; columns are a multiple of a block's. A block
    reads its columns of all rows, ``ROWS`` at once; its threads keep their sums in registers and
    meet in shared memory at the end. None for another PrimFunc.
    """
    if target.kind.name != "cuda":
        return None
    sch = Schedule(copy_func(func))
    parts = _parts(sch)
    if parts is None:
        return None
    total = parts.total
    outputs = {sch.get(b).name_hint for b in sch.get_output_blocks(sch.get_sblock("root"))}
    stored, last = (
        [b for b in side if sch.get(b).name_hint in outputs] for side in (parts.before, parts.after)
    )
    for block in (*parts.before, *parts.after):
        if block not in stored and block not in last:
            sch.compute_inline(block)
    # what is stored is computed into registers, which the sum and a copy read
    copies = [sch.cache_write(b, 0, "local", sch.get_consumers(b)) for b in stored]
    partial = _walk_rows(sch, total, copies)
    _share_blocks(sch, partial, total, last)
    outer, own, across, step, _ = sch.get_loops(partial)
    high, low = sch.split(own, factors=[WARPS, ROWS // WARPS])
    beside = sch.fuse(low, across)
    for loop, thread in ((outer, "blockIdx.x"), (high, "threadIdx.y"), (beside, "threadIdx.x")):
        sch.bind(loop, thread)
    _keep_in_registers(sch, partial, beside, step, stored, copies)
    _meet(sch, total, last)
    return sch


def scheduled(func: tirx.PrimFunc, target: Any) -> tirx.PrimFunc | None:
    """Return the PrimFunc as ``schedule`` does it, with quick forms; None where it does not."""
    sch = schedule(func, target)
    return None if sch is None else _quickened(sch.mod["main"])


def _quickened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute what is stored in 16 bits by the quick forms: one pass is bound by them otherwise."""

    def store(node: Any) -> Any:
        if str(node.buffer.dtype) not in ("float16", "bfloat16"):
            return node
        return tirx.BufferStore(node.buffer, gpu_math.quick(node.value), node.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.BufferStore, store)))


def _walk_rows(sch: Schedule, total: Any, copies: Sequence[Any]) -> Any:
    """Part the sum by the rows of one step, and let the copies share its loops."""
    column, row = sch.get_loops(total)
    _, inner = sch.split(column, factors=[None, COLUMNS])
    sch.split(inner, factors=[COLUMNS // VECTOR, VECTOR])
    _, own = sch.split(row, factors=[None, ROWS])
    partial = sch.rfactor(own, 0)
    outer, across, vector, step, own = sch.get_loops(partial)
    sch.reorder(outer, own, across, step, vector)
    steps = [step]
    for copy in copies:
        row, column = sch.get_loops(copy)
        outer, inner = sch.split(column, factors=[None, COLUMNS])
        across, vector = sch.split(inner, factors=[COLUMNS // VECTOR, VECTOR])
        step, own = sch.split(row, factors=[None, ROWS])
        sch.reorder(outer, own, across, step, vector)
        steps.append(step)
    if copies:
        sch.merge(*steps)
    return partial


def _share_blocks(sch: Schedule, partial: Any, total: Any, last: Sequence[Any]) -> None:
    """Let what follows the sums of threads run in the same block of threads."""
    outer, *within, _ = sch.get_loops(total)
    sch.fuse(*within)
    outers = [outer]
    for block in last:
        (column,) = sch.get_loops(block)
        outer, _ = sch.split(column, factors=[None, COLUMNS])
        outers.append(outer)
    sch.merge(sch.get_loops(partial)[0], *outers)


def _keep_in_registers(
    sch: Schedule,
    sums: Any,
    beside: Any,
    step: Any,
    stored: Sequence[Any],
    copies: Sequence[Any],
) -> None:
    """Add up in registers; whole vectors are read and written."""
    sch.set_scope(sums, 0, "shared")
    shared = sch.cache_write(sums, 0, "local")
    sch.reverse_compute_at(shared, beside, preserve_unit_loops=True)
    # a block's own columns first: then the rest is what shared memory has to hold
    sch.transform_layout(shared, ("write", 0), lambda r, c: (c // COLUMNS, r, c % COLUMNS))
    sch.vectorize(sch.get_loops(shared)[-1])
    for block, copy in reversed(list(zip(stored, copies, strict=True))):
        sch.compute_at(block, step, preserve_unit_loops=True)
        sch.unroll(sch.get_loops(block)[-1])
        sch.vectorize(sch.get_loops(copy)[-1])
        _read_vectors(sch, block, step)
    _read_vectors(sch, sums, step)
    sch.decompose_reduction(sums, step)


def _read_vectors(sch: Schedule, block: Any, step: Any) -> None:
    """Read what a block reads of matrices into registers first, whole vectors at once.

    The arithmetic stays scalar: TVM's CUDA code for constants in vectors of eight is wrong.
    """
    for i, region in enumerate(sch.get(block).reads):
        source = region.source
        if source.scope() == "global" and len(source.shape) == 2:
            if isinstance(source.shape[1], tirx.IntImm) and int(source.shape[1]) % VECTOR == 0:
                read = sch.cache_read(block, i, "local")
                sch.compute_at(read, step, preserve_unit_loops=True)
                sch.vectorize(sch.get_loops(read)[-1])


def _meet(sch: Schedule, total: Any, last: Sequence[Any]) -> None:
    """Add the sums of a block's threads: a warp a part of the rows, a lane a column."""
    _, column, row = sch.get_loops(total)
    own, shared = sch.split(row, factors=[None, WARPS])
    sch.reorder(shared, own)
    sch.bind(column, "threadIdx.x")
    sch.bind(shared, "threadIdx.y")
    if last:
        sch.set_scope(total, 0, "local")
    for block in last:
        sch.bind(sch.get_loops(block)[-1], "threadIdx.x")


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
    return any(v.iter_type == tirx.IterVar.CommReduce for v in block.iter_vars)


def _fills(block: Any, shape: Sequence[Any]) -> bool:
    """Whether a block computes each element of a tensor of ``shape`` at its own point."""
    store, axes = block.body, [v.var for v in block.iter_vars]
    return (
        isinstance(store, tirx.BufferStore)
        and not _reduces(block)
        and ep.same_all(store.indices, axes)
        and ep.same_all(store.buffer.shape, shape)
    )

"""Ensures a product of 16-bit operands, or of int8, runs on tensor cores by one fixed schedule.

Any sizes will do. It follows TVM's dlight MatmulTensorization, which knows tiles of one size, no
bfloat16, and int8 only with a software pipeline that this TVM does not lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import get_root_block
from tvm.s_tir.dlight.gpu import matmul as dlight

from tvmcap.kernel import prim_func
from tvmcap.kernel.tensor_intrinsics import (
    SHARED,
    SUMS,
    available,
    import_tensor_intrinsics,
    intrinsic_group,
)
from tvmcap.schedules import gemm_match

_EDGE = 16
"""Rows, columns and depth of one tensor-core instruction."""
_WARP = 32
_VECTOR = 4
"""Elements that a thread moves at once; TVM writes no zeros of eight int8."""
_PAD_BYTES = 16


@dataclass(frozen=True)
class Tile:
    """What a thread block computes: ``warps`` of ``fragments`` of 16 x 16, along rows and columns.

    ``depth`` fragments of K are in shared memory at a time: an even number, as two sets of
    registers take turns.
    """

    warps: tuple[int, int]
    fragments: tuple[int, int]
    depth: int

    @property
    def extents(self) -> list[int]:
        """Rows, columns and K that a block has at a time."""
        edges = [w * f * _EDGE for w, f in zip(self.warps, self.fragments, strict=True)]
        return [*edges, self.depth * _EDGE]

    def shared_bytes(self, trans_b: bool, width: int = 2) -> int:
        """Bytes of shared memory: two stages of padded rows, then the 32-bit results.

        ``width`` is the bytes of an element of the operands.
        """
        rows, columns, k = self.extents
        pad = _PAD_BYTES // width
        b = columns * (k + pad) if trans_b else k * (columns + pad)
        return max(2 * width * (rows * (k + pad) + b), 4 * rows * columns)


LARGE = Tile((4, 4), (2, 2), 4)
NARROW = Tile((1, 4), (2, 1), 4)


def schedule(func: tirx.PrimFunc, target: Any, tile: Tile | None = None) -> tirx.PrimFunc | None:
    """Return the scheduled product, or None where ``func`` is none that this schedule fits."""
    gemm = gemm_match.read(func) if len(prim_func.written(func)) == 1 else None
    if gemm is None or not available(target, str(gemm.a.dtype)):
        return None
    sch = s_tir.Schedule(func)
    found = _normalize(sch)
    if found is None:
        return None
    main, trans_b = found
    import_tensor_intrinsics()
    dtype = _dtype(sch.get(main).reads[0])
    if tile is None:
        tile = _default(sch.get(main))
    if tile.shared_bytes(trans_b, _width(dtype)) > int(target.attrs["max_shared_memory_per_block"]):
        return None
    sch.pad_einsum(main, [1, *tile.extents])
    _tensorize(sch, main, tile, intrinsic_group(dtype, trans_b))
    return sch.mod["main"]


def suits(gemm: Any, target: Any) -> bool:
    """Whether a product (``gemm_match.Gemm``) is better off here than on CUDA cores.

    Few rows or columns would leave most of a fragment empty.
    """
    operands = {str(gemm.a.dtype), str(gemm.b.dtype)}
    sums, outputs = str(gemm.fused.epilogue.anchor.dtype), gemm.fused.epilogue.outputs
    wide = all(not isinstance(e, int) or e > _EDGE for e in (gemm.rows, gemm.n))
    one = len(operands) == 1 and sums == SUMS.get(min(operands)) and len(outputs) == 1
    return available(target, min(operands)) and one and wide


def _default(block: Any) -> Tile:
    """Choose the tile: a narrow one where rows are known to be few."""
    rows = block.iter_vars[1].dom.extent
    return NARROW if isinstance(rows, tirx.IntImm) and int(rows) <= 64 else LARGE


def _dtype(region: Any) -> str:
    return str(region.source.dtype)


def _width(dtype: str) -> int:
    return int(tvm_ffi.dtype(dtype).itemsize)


def tile_of(trace: Sequence[Any]) -> Tile | None:
    """Return the tile that a trace of MetaSchedule's tensor-core rule chose (JSON data), or None.

    Its loops are SSSRRSRS: blocks twice, warps, two steps along K, fragments, K, fragments.
    """
    instructions, decisions = trace
    if not any(name == "Tensorize" for name, *_ in instructions):
        return None
    tilings = [v for i, v in decisions if instructions[i][0] == "SamplePerfectTile"]
    rows, columns, k = ([int(f) for f in tiling] for tiling in tilings[:3])
    fragments = (rows[3] * rows[4], columns[3] * columns[4])
    return Tile((rows[2], columns[2]), fragments, k[1] * k[2] + k[1] * k[2] % 2)


def _normalize(sch: Any) -> tuple[Any, bool] | None:
    """Write the one product as C[S, I, J] += A[S, I, K] * B, None where there is none.

    B stays [S, J, K] or [S, K, J], as it lies in memory; returns the block and whether K is last.
    """
    blocks = sch.get_child_blocks(get_root_block(sch))
    reductions = dlight.get_reduction_blocks(sch, blocks)
    if reductions is None or dlight.get_index_map(sch.get(reductions[0])) is None:
        return None
    main = reductions[0]
    stage = sch.get(main)
    operands = {_dtype(read) for read in stage.reads}
    if len(operands) != 1 or _dtype(stage.writes[0]) != SUMS.get(min(operands)):
        return None
    last = stage.reads[1].region[-1].min
    axes = {v.var: v.iter_type for v in stage.iter_vars}
    trans_b = axes.get(last) == tirx.IterVar.CommReduce
    reads = [sch.reindex(main, ("read", i)) for i in (0, 1)]
    write = sch.reindex(main, ("write", 0))
    whole, a, b, c = dlight.get_index_map(sch.get(main))
    if not trans_b:
        kinds = dlight.IterKind
        order = [kinds.kIter_S, kinds.kIter_K, kinds.kIter_J]
        b = dlight.make_iter_fusion_index_map(dlight.detect_iter_traits(sch.get(main))[1], order)
    sch.transform_layout(reads[0], ("write", 0), a)
    sch.transform_layout(reads[1], ("write", 0), b)
    sch.transform_layout(write, ("read", 0), c)
    sch.transform_block_layout(main, whole)
    return main, trans_b


def _tensorize(sch: Any, main: Any, tile: Tile, group: dict[str, str]) -> None:
    """Tile, stage through shared memory in a software pipeline, and put wmma in."""
    batch, i, j, k = sch.get_loops(main)
    i, i_inner = sch.split(i, [None, _EDGE])
    j, j_inner = sch.split(j, [None, _EDGE])
    k, k_inner = sch.split(k, [None, _EDGE])
    sch.reorder(i, j, k, i_inner, j_inner, k_inner)
    outer = sch.blockize(i_inner)
    i0, i1, i2 = sch.split(i, [None, tile.warps[0], tile.fragments[0]])
    j0, j1, j2 = sch.split(j, [None, tile.warps[1], tile.fragments[1]])
    k0, k1 = sch.split(k, [None, tile.depth])
    # of the next stage: its loads to registers before this one's products, its stores after them
    sch.annotate(k0, "software_pipeline_order", [0, 3, 1, 4, 5, 2, 6])
    sch.annotate(k0, "software_pipeline_stage", [0, 0, 0, 0, 0, 1, 1])
    sch.annotate(k1, "software_pipeline_order", [0, 1, 2])
    sch.annotate(k1, "software_pipeline_stage", [0, 0, 1])
    sch.reorder(i0, j0, j1, i1, k0, k1, i2, j2)
    warp = sch.fuse(j1, i1)
    sch.bind(sch.fuse(batch, i0), "blockIdx.x")
    sch.bind(j0, "blockIdx.y")
    sch.bind(warp, "threadIdx.y")
    for index in (0, 1):
        _to_shared(sch, outer, index, k0, tile)
    fragments = [sch.cache_read(outer, n, f"wmma.matrix_{x}") for n, x in enumerate("ab")]
    for fragment in fragments:
        sch.compute_at(fragment, k1)
    copy = sch.cache_write(outer, 0, SHARED)
    sch.storage_align(copy, 0, -2, 16, 4)
    store = sch.cache_write(outer, 0, "wmma.accumulator")
    sch.reverse_compute_at(store, warp)
    sch.reverse_compute_at(copy, warp)
    stored = _fragments(sch, store)
    init = sch.get_child_blocks(sch.decompose_reduction(outer, k0))[0]
    for fragment, name in zip(fragments, ("load_a", "load_b"), strict=True):
        sch.tensorize(_fragments(sch, fragment, unroll=True), group[name])
    sch.tensorize(sch.get_loops(init)[-2], group["init"])
    sch.tensorize(stored, group["store"])
    sch.tensorize(sch.get_loops(main)[-3], group["compute"])
    dlight.auto_inline_consumer_chain(sch, copy)
    fused = sch.fuse(*sch.get_loops(copy)[-2:])
    _, lane, vector = sch.split(fused, [None, _WARP, _VECTOR])
    sch.bind(lane, "threadIdx.x")
    sch.vectorize(vector)


def _to_shared(sch: Any, outer: Any, index: int, at: Any, tile: Tile) -> None:
    """Load an operand's tile with all threads, rows padded by 16 bytes against bank conflicts."""
    width = _width(_dtype(sch.get(outer).reads[index]))
    block = sch.cache_read(outer, index, SHARED)
    sch.compute_at(block, at)
    fused = sch.fuse(*sch.get_loops(block)[-2:])
    warps = tile.warps[0] * tile.warps[1]
    _, warp, lane, vector = sch.split(fused, [None, warps, _WARP, _VECTOR])
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    sch.vectorize(vector)
    sch.storage_align(block, 0, axis=-2, factor=_EDGE, offset=_PAD_BYTES // width)
    sch.annotate(block, "tirx.manifest_shared_memory_local_stage", 1)
    sch.annotate(block, "double_buffer_scope", 0)
    dlight.auto_inline_producers(sch, block)


def _fragments(sch: Any, block: Any, *, unroll: bool = False) -> Any:
    """Split a block's last two loops into fragments; returns the loop to tensorize."""
    i, j = sch.get_loops(block)[-2:]
    i0, i1 = sch.split(i, [None, _EDGE])
    j0, j1 = sch.split(j, [None, _EDGE])
    sch.reorder(i0, j0, i1, j1)
    for loop in (i0, j0) if unroll else ():
        sch.unroll(loop)
    return i1

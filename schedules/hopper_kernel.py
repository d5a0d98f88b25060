"""The TIRx text of the Hopper GEMM."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules import hopper_epilogue, hopper_ops
from tvmcap.schedules.gpu_epilogue import Views
from tvmcap.schedules.hopper_mainloop import (
    Shared,
    fetcher,
    multiplier,
    operand_map,
    releaser,
)
from tvmcap.schedules.hopper_plan import plan


def gemm_kernel(gemm: Any, knobs: Any) -> tirx.PrimFunc:
    """Write the kernel over the buffers of the fused function.

    A producer thread fills a ring of stages through TMA, two consumer warp groups multiply. The
    caller adds the parameters.
    """
    p = plan(gemm, knobs, hopper_ops.int32)
    views, maps, out_maps = Views(gemm), list[Any](), list[Any]()
    layouts = (gemm.a_layout == "mk", gemm.layout == "nk")
    stages, split, pingpong = knobs.stages, knobs.split, knobs.groups == "tiles"
    num_tiles = p.m_tiles * p.n_tiles * p.batch
    grid = _grid(p, num_tiles)
    shared = knobs.cluster_m * knobs.cluster_n > 1
    signals = (knobs.cluster_m + knobs.cluster_n - 1) * p.sharing
    release = releaser(p)
    fetch, warm = fetcher(p, layouts, maps)
    multiply = multiplier(p, layouts, release)
    finish = hopper_epilogue.writer(gemm, p, views, out_maps)

    def encode() -> None:
        maps.append(operand_map(p, 0, gemm.a, layouts[0]))
        maps.append(operand_map(p, 1, gemm.b, layouts[1]))
        if knobs.tma_store:
            out_maps.extend(hopper_epilogue.output_maps(gemm, p))

    @T.inline
    def locate(tile: Any, rank: Any, at: Any) -> None:
        """First row and column of this CTA's tile and its batch; tiles go in groups of rows."""
        inner = T.meta_var(tile % (p.m_tiles * p.n_tiles))
        first = T.meta_var(inner // (knobs.group * p.n_tiles) * knobs.group)
        within = T.meta_var(inner % (knobs.group * p.n_tiles))
        at[3] = T.min(knobs.group, p.m_tiles - first)
        at[0] = ((first + within % at[3]) * knobs.cluster_m + rank % knobs.cluster_m) * knobs.bm
        column = T.meta_var(within // at[3] * knobs.cluster_n)
        at[1] = (column + rank // knobs.cluster_m % knobs.cluster_n) * knobs.bn
        at[2] = tile // (p.m_tiles * p.n_tiles)

    @T.inline
    def skip(ring: Any, count: Any) -> None:
        """Pass ``count`` stages."""
        ring[1] = T.bitwise_xor(ring[1], T.bitwise_and((ring[0] + count) // stages, 1))
        ring[0] = (ring[0] + count) % stages

    @T.inline
    def produce(cid: Any, rank: Any, sm: Any, span: Any) -> None:
        ring = T.alloc_local([2], "int32")
        at = T.alloc_local([4], "int32")
        tile = T.alloc_local([1], "int32")
        ring[0] = 0
        ring[1] = 1
        tile[0] = cid
        if tile[0] < num_tiles:
            locate(tile[0], rank, at)
            if knobs.warm:
                for kt in T.serial(T.min(span[1], stages)):
                    warm(kt + span[0], at, rank)
        if knobs.dependent:
            T.ptx.griddepcontrol.wait()
        while tile[0] < num_tiles:
            locate(tile[0], rank, at)
            for kt in T.serial(span[1]):
                hopper_ops.wait(sm.empty.ptr_to([ring[0]]), ring[1])
                T.ptx.mbarrier.arrive.expect_tx.shared.b64(
                    sm.full.ptr_to([ring[0]]), T.uint32(p.stage_bytes)
                )
                fetch(sm, ring[0], kt + span[0], at, rank)
                skip(ring, 1)
            tile[0] = tile[0] + grid
        if shared:  # no CTA may end while others still arrive at its barriers
            for _ in T.serial(stages):
                hopper_ops.wait(sm.empty.ptr_to([ring[0]]), ring[1])
                skip(ring, 1)

    @T.inline
    def consume(cid: Any, rank: Any, sm: Any, span: Any, tx: Any, acc: Any) -> None:
        ring = T.alloc_local([2], "int32")
        at = T.alloc_local([4], "int32")
        tile = T.alloc_local([1], "int32")
        group = T.alloc_local([1], "int32")
        group[0] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), tx // 128 - 1, 0, 32)
        wg = T.meta_var(group[0])
        lane = T.meta_var(tx % 128)
        count = T.meta_var(span[1])
        ring[0] = 0
        ring[1] = 0
        tile[0] = cid
        if pingpong:  # the groups take turns at the main loop: barriers 4 and 5
            tile[0] = cid + wg * grid
            if wg == 1:
                skip(ring, count)
                T.ptx.bar.arrive(T.uint32(4), T.uint32(256))
        while tile[0] < num_tiles:
            locate(tile[0], rank, at)
            if pingpong:
                T.ptx.bar.sync(T.Cast("uint32", 4 + wg), T.uint32(256))
            multiply(sm, ring, count, wg, lane, rank, acc)
            if pingpong:
                T.ptx.bar.arrive(T.Cast("uint32", 5 - wg), T.uint32(256))
            T.ptx.wgmma.wait_group.sync.aligned(0)
            if knobs.late:
                if count > 0:
                    release(sm, (ring[0] + stages - 1) % stages, lane, rank)
            finish(sm, acc, at, wg, lane, rank)
            if pingpong:
                skip(ring, count)
                tile[0] = tile[0] + 2 * grid
            else:
                tile[0] = tile[0] + grid
        if knobs.tma_store:
            if lane == 0:
                T.ptx["cp.async.bulk.wait_group"](0)

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        encode()
        T.device_entry()
        T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", 1)
        views.declare()
        ids = T.meta_var(hopper_ops.cluster_ids(grid, p.cluster))
        tx = T.thread_id([384])
        sm = T.meta_var(Shared(p))
        span = T.meta_var(_span(p, ids[1]))
        if tx == 0:
            T.ptx.prefetch.tensormap(T.address_of(maps[0]))
            T.ptx.prefetch.tensormap(T.address_of(maps[1]))
            for i in T.unroll(stages):
                T.ptx.mbarrier.init.shared.b64(sm.full.ptr_to([i]), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(sm.empty.ptr_to([i]), T.uint32(signals))
            if split > 1:
                T.ptx.mbarrier.init.shared.b64(sm.summed.ptr_to([0]), T.uint32(1))
                T.ptx.mbarrier.arrive.expect_tx.shared.b64(
                    sm.summed.ptr_to([0]), T.uint32(p.partial_bytes)
                )
            T.ptx.fence.mbarrier_init.release.cluster()
        if p.cluster > 1:
            hopper_ops.cluster_meet()
        else:
            T.cuda.cta_sync()
        if knobs.dependent:  # the next kernel may start, and wait as below
            T.ptx.griddepcontrol.launch_dependents()
        if tx < 128:
            T.ptx["setmaxnreg.dec.sync.aligned.u32"](40)
            if tx < 32:
                if T.cuda.elect_sync():
                    produce(ids[0], ids[1], sm, span)
        else:
            T.ptx["setmaxnreg.inc.sync.aligned.u32"](232)
            if knobs.dependent:
                T.ptx.griddepcontrol.wait()
            acc = T.alloc_buffer((p.accumulators,), p.held, scope="local")
            consume(ids[0], ids[1], sm, span, tx, acc)

    return kernel


def _grid(p: Any, num_tiles: Any) -> Any:
    """Clusters launched: one a tile, or at most what fits."""
    each = p.knobs.split > 1 or not p.knobs.persistent
    if isinstance(num_tiles, int):
        return max(num_tiles if each else min(num_tiles, p.clusters), 1)
    return T.max(num_tiles if each else T.min(num_tiles, p.clusters), 1)


def _span(p: Any, rank: Any) -> Any:
    """First k step of this CTA and how many it takes."""
    split, steps = p.knobs.split, p.k_steps
    if split == 1:
        return 0, steps
    part = rank // (p.knobs.cluster_m * p.knobs.cluster_n)
    span = T.alloc_local([2], "int32")
    T.buffer_store(span, part * steps // split, [0])
    T.buffer_store(span, (part + 1) * steps // split - part * steps // split, [1])
    return span[0], span[1]

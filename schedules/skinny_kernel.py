"""The TIRx text of the skinny GEMM: few rows, bound by reading the weight once.

The operands of wgmma are exchanged: 64 columns of the output are its M, the rows of x its N, so
that few rows waste little of the tensor cores. One thread streams both operands through TMA into a
ring of shared-memory stages, a warp group for every 64 columns multiplies them. The blocks of a
cluster share one tile, each a slice of the k steps; a block sends every row of its float32 partial
sums to the block that finishes the row, into that block's shared memory. Instruction shapes,
descriptors and swizzles: PTX ISA 9.0, "Asynchronous warpgroup-level matrix instructions".
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules import hopper_ops
from tvmcap.schedules.gpu_epilogue import Views
from tvmcap.schedules.skinny_finish import finisher, leaver, toucher
from tvmcap.schedules.skinny_plan import LINE, Plan, Shared, skinny_bytes

__all__ = ["skinny_bytes", "skinny_kernel"]

_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global.tile"


def skinny_kernel(gemm: Any, knobs: Any) -> tirx.PrimFunc:
    """Write the kernel over the buffers of the fused function.

    Parameters are added by the caller. A dependent kernel may start while the one before it still
    runs: it brings its first stages of w to L2, then waits.
    """
    p, views, maps = Plan(gemm, knobs), Views(gemm), list[Any]()
    dependent = knobs.dependent
    produce, multiply = producer(p, maps, dependent), multiplier(p)
    touch, leave, finish = toucher(gemm, p, views), leaver(p), finisher(gemm, p, views)

    def encode() -> None:
        extents = (p.k, p.n) if p.k_major else (p.n, p.k)
        maps.append(hopper_ops.new_map(gemm.b, extents, p.w_box, 2, promotion=3))
        maps.append(hopper_ops.new_map(gemm.a, (p.k, p.m), (LINE, p.bn), 2, promotion=3))

    @T.inline
    def prepare(sm: Any, rank: Any, m_0: Any) -> None:
        T.ptx.prefetch.tensormap(T.address_of(maps[0]))
        T.ptx.prefetch.tensormap(T.address_of(maps[1]))
        for i in T.unroll(p.stages):
            T.ptx.mbarrier.init.shared.b64(sm.full.ptr_to([i]), T.uint32(1))
            T.ptx.mbarrier.init.shared.b64(sm.empty.ptr_to([i]), T.uint32(p.threads // 32))
        if p.split > 1:
            rows = T.meta_var(T.max(T.min(p.m - m_0 - rank * p.own, p.own), 0))
            T.ptx.mbarrier.init.shared.b64(sm.summed.ptr_to([0]), T.uint32(1))
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(
                sm.summed.ptr_to([0]), T.Cast("uint32", rows * (p.split * p.bm * 4))
            )
        T.ptx.fence.mbarrier_init.release.cluster()

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        encode()
        T.device_entry()
        views.declare()
        ids = T.meta_var(hopper_ops.cluster_ids(p.tiles, p.split))
        tx = T.thread_id([p.threads + 32])
        sm = T.meta_var(Shared(p))
        rank: T.int32 = ids[1]
        m_0: T.int32 = tirx.truncmod(ids[0], p.m_tiles) * p.bn
        n_0: T.int32 = tirx.truncdiv(ids[0], p.m_tiles) * p.bm
        first: T.int32 = rank * p.k_steps // p.split
        count: T.int32 = (rank + 1) * p.k_steps // p.split - first
        if tx >= p.threads:
            if T.cuda.elect_sync():
                prepare(sm, rank, m_0)
        if p.split > 1:  # sums may be sent only to blocks that run
            T.ptx.barrier.cluster.arrive.relaxed()
        T.cuda.cta_sync()
        if tx >= p.threads:
            if T.cuda.elect_sync():
                produce(sm, first, count, m_0, n_0)
            if p.split > 1:
                T.ptx.barrier.cluster.wait()
        else:
            if dependent:
                T.ptx.griddepcontrol.launch_dependents()
                T.ptx.griddepcontrol.wait()
            touch(tx, m_0 + rank * p.own, n_0)
            acc = T.alloc_buffer((p.accumulators,), "float32", scope="local")
            multiply(sm, acc, tx, count)
            if p.split > 1:
                T.ptx.barrier.cluster.wait()
            leave(sm, acc, tx, rank, m_0)
            finish(sm, tx, m_0 + rank * p.own, n_0)

    return kernel


def producer(p: Plan, maps: list[Any], dependent: bool) -> Any:
    """Return the thread that streams w and x; ``maps`` are filled in before use."""

    @T.inline
    def prefetch(first: Any, count: Any, n_0: Any) -> None:
        for step in T.serial(T.min(count, p.stages)):
            for i in T.unroll(p.w_loads):
                T.ptx[_PREFETCH](T.address_of(maps[0]), *p.w_at(first + step, n_0, i))

    @T.inline
    def load(sm: Any, stage: Any, step: Any, m_0: Any, n_0: Any, policy: Any) -> None:
        for i in T.unroll(p.w_loads):
            T.ptx[_LOAD + ".L2::cache_hint"](
                sm.w.ptr_to([stage * p.bm * p.bk + i * p.w_box[0] * p.w_box[1]]),
                T.address_of(maps[0]),
                *p.w_at(step, n_0, i),
                sm.full.ptr_to([stage]),
                policy,
            )
        for i in T.unroll(p.bk // LINE):
            T.ptx[_LOAD](
                sm.x.ptr_to([stage * p.bn * p.bk + i * p.bn * LINE]),
                T.address_of(maps[1]),
                step * p.bk + i * LINE,
                m_0,
                sm.full.ptr_to([stage]),
            )

    @T.inline
    def produce(sm: Any, first: Any, count: Any, m_0: Any, n_0: Any) -> None:
        stage: T.int32 = 0
        phase: T.int32 = 1
        policy: T.uint64 = T.uint64(0)
        T.ptx.createpolicy.fractional.L2__evict_first.b64(policy)
        if dependent:
            prefetch(first, count, n_0)
            T.ptx.griddepcontrol.wait()
        for step in T.serial(count):
            T.cuda.mbarrier_wait(sm.empty.ptr_to([stage]), phase)
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(
                sm.full.ptr_to([stage]), T.uint32(p.stage_bytes)
            )
            load(sm, stage, first + step, m_0, n_0, policy)
            stage = stage + 1
            if stage == p.stages:
                stage = 0
                phase = phase ^ 1

    return produce


def multiplier(p: Plan) -> Any:
    """Return the loop of a warp group over its block's k steps.

    The instruction's 64 rows are columns of the output, its N the rows of x.
    """
    mma = hopper_ops.wgmma(p.dtype, p.bn)
    flags = (1, 1, int(not p.k_major), 0)  # signs of both operands, majorities

    def describe(descriptor: Any, tile: Any) -> Any:
        where = T.address_of(descriptor)  # rows of 8 follow each other after 64 16-byte units
        return T.cuda.wgmma.encode_matrix_descriptor(where, tile, 1, 64, 3)

    @T.inline
    def step(acc: Any, at_w: Any, at_x: Any) -> None:
        T.ptx.wgmma.fence.sync.aligned()
        for kk in T.unroll(p.bk // 16):
            w = T.meta_var(at_w + p.shift(p.bm, p.k_major, kk))
            x = T.meta_var(at_x + p.shift(p.bn, True, kk))
            mma(acc, 0, w, x, T.bool(True), flags)
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(0)

    @T.inline
    def multiply(sm: Any, acc: Any, tx: Any, count: Any) -> None:
        stage: T.int32 = 0
        phase: T.int32 = 0
        desc_w: T.uint64 = T.uint64(0)
        desc_x: T.uint64 = T.uint64(0)
        for i in T.unroll(p.accumulators):
            acc[i] = T.float32(0)
        describe(desc_w, sm.w.ptr_to([tx // 128 * p.w_group]))
        describe(desc_x, sm.x.ptr_to([0]))
        for _ in T.serial(count):
            at_w: T.uint64 = desc_w + T.Cast("uint64", stage * (p.bm * p.bk // 8))
            at_x: T.uint64 = desc_x + T.Cast("uint64", stage * (p.bn * p.bk // 8))
            T.cuda.mbarrier_wait(sm.full.ptr_to([stage]), phase)
            step(acc, at_w, at_x)
            if tx % 32 == 0:
                T.ptx.mbarrier.arrive.shared.b64(sm.empty.ptr_to([stage]))
            stage = stage + 1
            if stage == p.stages:
                stage = 0
                phase = phase ^ 1

    return multiply

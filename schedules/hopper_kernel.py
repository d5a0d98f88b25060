"""The TIRx text of the Hopper GEMM."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules.gpu_epilogue import Views, position

SHARED_BYTES = 227 * 1024
"""Shared memory that a thread block may have on sm_90 (CUDA C++ Programming Guide)."""

BM = 128
_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
_WGMMA_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def stage_bytes(knobs: Any) -> int:
    """Bytes of shared memory of a setting: the ring, the staged result, barriers and alignment."""
    ring: int = knobs.stages * (BM + knobs.bn) * knobs.bk * 2
    return ring + (BM * knobs.bn * 2 if knobs.tma_store else 128) + 2048


def encode_map(tensor_map: Any, buffer: Any, extents: Any, box: Any) -> Any:
    """Describe a matrix to TMA: rows that follow each other, 128-byte swizzle, zeros past the edge.

    ``extents`` and ``box`` (of one load or store) give columns first.
    """
    modes = (1, 1, 0, 3, 2, 0)  # element strides, no interleave, swizzle, L2 promotion, zero fill
    args = (str(buffer.dtype), 2, buffer.data, *extents, extents[0] * 2, *box, *modes)
    return T.call_packed("runtime.cuTensorMapEncodeTiled", tensor_map, *args)


def gemm_kernel(gemm: Any, knobs: Any) -> tirx.PrimFunc:
    """Write the kernel over the buffers of the fused function.

    Parameters are added by the caller.
    """
    A, B, C = gemm.a, gemm.b, gemm.fused.epilogue.outputs[0]
    N, K, M = gemm.n, gemm.k, gemm.rows
    M = M if isinstance(M, int) else tirx.Cast("int32", M)
    BN, BK, stages, group, late = knobs.bn, knobs.bk, knobs.stages, knobs.group, int(knobs.late)
    through_tma, nk = knobs.tma_store, gemm.layout == "nk"
    dtype = str(A.dtype)
    out_dtype = str(C.dtype)
    kind = _WGMMA_TYPES[dtype]
    mma = f"wgmma.mma_async.sync.aligned.m64n{BN}k16.f32.{kind}.{kind}"
    num_acc = BN // 2
    k_tiles, n_tiles = -(-K // BK), -(-N // BN)
    atoms, chunks = BK // 64, BN // 64
    num_sm = 132
    tx_bytes = (BM + BN) * BK * 2
    # K-major B: 64 k x BN rows an atom. N-major B: 64 n x BK rows a chunk, transposed by wgmma
    b_box = (64, BN) if nk else (64, BK)
    b_dims = (K, N) if nk else (N, K)
    lead = 1 if nk else BK * 8  # 16-byte units between 64-column chunks
    trans_b = 0 if nk else 1

    views = Views(gemm)

    def finish(value: Any, row: Any, col: Any) -> Any:
        """The one output's value; past the edge it reads the edge's operands and TMA clips it."""
        return views.values(value, position(gemm, T.min(row, M - 1), T.min(col, N - 1)))[0]

    def describe(descriptor: Any, tile: Any, leading: int) -> Any:
        where = T.address_of(descriptor)  # rows of 8 follow each other after 64 16-byte units
        return T.cuda.wgmma.encode_matrix_descriptor(where, tile, leading, 64, 3)

    def scatter(value: Any, row: Any, col: Any) -> None:
        views.store(value, position(gemm, row, col))

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        A_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode_map(A_map, A, (K, M), (64, BM))
        B_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode_map(B_map, B, b_dims, b_box)
        C_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if through_tma:
            encode_map(C_map, C, (N, M), (64, 64))
        T.device_entry()
        views.declare()
        bx = T.cta_id([num_sm])
        tx = T.thread_id([384])
        pool = T.SMEMPool()
        A_sm = pool.alloc((stages * BM * BK,), dtype, align=1024)
        B_sm = pool.alloc((stages * BN * BK,), dtype, align=1024)
        C_sm = pool.alloc((BM * BN if through_tma else 64,), out_dtype, align=1024)
        full = pool.alloc((stages,), "uint64", align=8)
        empty = pool.alloc((stages,), "uint64", align=8)
        pool.commit()
        stage: T.int32
        phase: T.int32
        tile: T.int32
        m_tiles: T.int32
        rows: T.int32
        stage = 0
        phase = 0
        m_tiles = (M + BM - 1) // BM
        tile = bx
        if tx == 0:
            for i in T.unroll(stages):
                T.ptx.mbarrier.init.shared.b64(full.ptr_to([i]), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(empty.ptr_to([i]), T.uint32(2))
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if tx < 128:
            T.ptx["setmaxnreg.dec.sync.aligned.u32"](40)
            if tx == 0:
                while tile < m_tiles * n_tiles:
                    m_p: T.int32
                    n_p: T.int32
                    rows = T.min(group, m_tiles - tile // (group * n_tiles) * group)
                    m_p = (tile // (group * n_tiles) * group + tile % (group * n_tiles) % rows) * BM
                    n_p = (tile % (group * n_tiles) // rows) * BN
                    for kt in T.serial(k_tiles):
                        T.cuda.mbarrier_wait(empty.ptr_to([stage]), phase ^ 1)
                        T.ptx.mbarrier.arrive.expect_tx.shared.b64(
                            full.ptr_to([stage]), T.uint32(tx_bytes)
                        )
                        for ki in T.unroll(atoms):
                            T.ptx[_LOAD](
                                A_sm.ptr_to([stage * BM * BK + ki * BM * 64]),
                                T.address_of(A_map),
                                kt * BK + ki * 64,
                                m_p,
                                full.ptr_to([stage]),
                            )
                        if nk:
                            for ki in T.unroll(atoms):
                                T.ptx[_LOAD](
                                    B_sm.ptr_to([stage * BN * BK + ki * BN * 64]),
                                    T.address_of(B_map),
                                    kt * BK + ki * 64,
                                    n_p,
                                    full.ptr_to([stage]),
                                )
                        else:
                            for ni in T.unroll(chunks):
                                T.ptx[_LOAD](
                                    B_sm.ptr_to([stage * BN * BK + ni * BK * 64]),
                                    T.address_of(B_map),
                                    n_p + ni * 64,
                                    kt * BK,
                                    full.ptr_to([stage]),
                                )
                        stage = stage + 1
                        if stage == stages:
                            stage = 0
                            phase = phase ^ 1
                    tile = tile + num_sm
        else:
            T.ptx["setmaxnreg.inc.sync.aligned.u32"](232)
            wg = T.meta_var(tx // 128 - 1)
            lane = T.meta_var(tx % 128)
            acc = T.alloc_buffer((num_acc,), "float32", scope="local")
            pair = T.alloc_buffer((2,), out_dtype, scope="local")
            desc_a: T.uint64
            desc_b: T.uint64
            m_t: T.int32
            n_t: T.int32
            row: T.int32
            col: T.int32
            while tile < m_tiles * n_tiles:
                for i in T.unroll(num_acc):
                    acc[i] = T.float32(0)
                for kt in T.serial(k_tiles):
                    T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                    T.ptx.wgmma.fence.sync.aligned()
                    for kk in T.unroll(BK // 16):
                        a_at = T.meta_var(stage * BM * BK + kk // 4 * BM * 64 + wg * 64 * 64)
                        b_0 = T.meta_var(stage * BN * BK)
                        b_at = T.meta_var(
                            b_0 + kk // 4 * BN * 64 + kk % 4 * 16 if nk else b_0 + kk * 16 * 64
                        )
                        ab = T.meta_var((desc_a, desc_b))  # noqa: F821 (declared by annotation)
                        describe(ab[0], A_sm.ptr_to([a_at + kk % 4 * 16]), 1)
                        describe(ab[1], B_sm.ptr_to([b_at]), lead)
                        sums = T.meta_var([acc[i] for i in range(num_acc)])
                        T.ptx[mma](*sums, *ab, (kt + kk > 0), 1, 1, 0, trans_b)
                    T.ptx.wgmma.commit_group.sync.aligned()
                    T.ptx.wgmma.wait_group.sync.aligned(late)
                    if late == 0:
                        if lane == 0:
                            T.ptx.mbarrier.arrive.shared.b64(empty.ptr_to([stage]))
                    else:
                        if kt > 0:
                            if lane == 0:
                                T.ptx.mbarrier.arrive.shared.b64(
                                    empty.ptr_to([(stage + stages - 1) % stages])
                                )
                    stage = stage + 1
                    if stage == stages:
                        stage = 0
                        phase = phase ^ 1
                if late > 0:
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    if lane == 0:
                        T.ptx.mbarrier.arrive.shared.b64(
                            empty.ptr_to([(stage + stages - 1) % stages])
                        )
                rows = T.min(group, m_tiles - tile // (group * n_tiles) * group)
                m_t = (
                    tile // (group * n_tiles) * group + tile % (group * n_tiles) % rows
                ) * BM + wg * 64
                n_t = (tile % (group * n_tiles) // rows) * BN
                row = lane // 32 * 16 + lane % 32 // 4
                col = lane % 4 * 2
                if through_tma:
                    if lane == 0:
                        T.ptx["cp.async.bulk.wait_group.read"](0)
                    T.ptx.bar.sync(T.Cast("uint32", wg + 1), T.uint32(128))
                for i in T.unroll(num_acc // 4):
                    for r in T.unroll(2):
                        if through_tma:
                            for c in T.unroll(2):
                                pair[c] = finish(
                                    acc[i * 4 + r * 2 + c], m_t + row + r * 8, n_t + col + i * 8 + c
                                )
                            # 64-column chunks of 128-byte rows, 16-byte units swizzled
                            for c in T.vectorized(2):
                                C_sm[
                                    wg * 64 * BN
                                    + i // 8 * 4096
                                    + (row + r * 8) * 64
                                    + T.bitwise_xor(i % 8, lane % 32 // 4) * 8
                                    + col
                                    + c
                                ] = pair[c]
                        else:
                            for c in T.unroll(2):
                                if m_t + row + r * 8 < M and n_t + col + i * 8 + c < N:
                                    scatter(
                                        acc[i * 4 + r * 2 + c],
                                        m_t + row + r * 8,
                                        n_t + col + i * 8 + c,
                                    )
                if through_tma:
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.ptx.bar.sync(T.Cast("uint32", wg + 1), T.uint32(128))
                    if lane == 0:
                        for c in T.unroll(BN // 64):
                            T.ptx[_STORE](
                                T.address_of(C_map),
                                n_t + c * 64,
                                m_t,
                                C_sm.ptr_to([wg * 64 * BN + c * 4096]),
                            )
                        T.ptx.cp.async_.bulk.commit_group()
                tile = tile + num_sm
            if through_tma:
                if lane == 0:
                    T.ptx["cp.async.bulk.wait_group"](0)

    return kernel

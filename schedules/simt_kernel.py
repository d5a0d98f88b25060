"""The TIRx text of the SIMT GEMM."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules.gpu_epilogue import Views, flatten, position


def shared_floats(knobs: Any) -> int:
    """Floats of shared memory: the tiles of A and B, or the partial sums that replace them."""
    depth: int = knobs.bk * knobs.groups
    sums: int = (knobs.groups - 1) * knobs.bm * knobs.bn
    tiles: int = depth * (knobs.bm + 4) + depth * (knobs.bn + 4)
    return max(tiles, sums)


def simt_kernel(gemm: Any, knobs: Any) -> tirx.PrimFunc:
    """Write the kernel over the buffers of the fused function.

    Parameters are added by the caller.
    """
    A, B = gemm.a, gemm.b
    M, N, K, batch = gemm.rows, gemm.n, gemm.k, _product(gemm.batch)
    BM, BN, BK, TM, TN, groups = knobs.bm, knobs.bn, knobs.bk, knobs.tm, knobs.tn, knobs.groups
    depth, wide = BK * groups, min(TN, 4)
    columns = BN // TN  # threads along a row of the tile
    team = BM // TM * columns  # threads of one group
    threads = team * groups
    a_pitch, b_pitch = BM + 4, BN + 4
    m_tiles, n_tiles = _ceil(M, BM), _ceil(N, BN)
    km, kn = gemm.a_layout == "km", gemm.layout == "kn"

    views = Views(gemm)

    def store(value: Any, lead: Any, row: Any, col: Any) -> None:
        views.store(value, [*_split(lead, gemm.batch), *position(gemm, row, col)])

    def load_a(flat: Any, lead: Any, m: Any, k: Any) -> Any:
        first = lead * M * K if gemm.a_batched else 0
        return flat[first + k * M + m] if km else flat[first + m * K + k]

    def load_b(flat: Any, lead: Any, k: Any, n: Any) -> Any:
        first = lead * K * N if gemm.b_batched else 0
        return flat[first + k * N + n] if kn else flat[first + n * K + k]

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        T.device_entry()
        bx = T.cta_id([_int32(m_tiles * n_tiles * batch)])
        tx = T.thread_id([threads])
        A_flat = flatten(A)
        B_flat = flatten(B)
        views.declare()
        pool = T.SMEMPool()
        shared = pool.alloc((shared_floats(knobs),), "float32", align=16)
        pool.commit()
        acc = T.alloc_buffer((TM * TN,), "float32", scope="local")
        part = T.alloc_buffer((TM * TN,), "float32", scope="local")
        a_reg = T.alloc_buffer((TM,), "float32", scope="local")
        b_reg = T.alloc_buffer((TN,), "float32", scope="local")
        block = T.meta_var(T.Cast("int64", bx))
        lead = T.meta_var(block // (m_tiles * n_tiles))
        m_0 = T.meta_var(block % (m_tiles * n_tiles) // n_tiles * BM)
        n_0 = T.meta_var(block % n_tiles * BN)
        group = T.meta_var(tx // team)
        t_m = T.meta_var(tx % team // columns)
        t_n = T.meta_var(tx % columns)
        b_sm = T.meta_var(depth * a_pitch)  # where B's tile starts
        for i in T.unroll(TM * TN):
            acc[i] = T.float32(0)
        for kt in T.serial(_ceil(K, depth)):
            k_0 = T.meta_var(T.Cast("int64", kt) * depth)
            for i in T.unroll(_ceil(BM * depth, threads)):
                at = T.meta_var(i * threads + tx)
                if at < BM * depth:
                    m = T.meta_var(at % BM if km else at // depth)
                    k = T.meta_var(at // BM if km else at % depth)
                    shared[k * a_pitch + m] = T.if_then_else(
                        tirx.all(m_0 + T.Cast("int64", m) < M, k_0 + T.Cast("int64", k) < K),
                        T.Cast(
                            "float32",
                            load_a(
                                A_flat, lead, m_0 + T.Cast("int64", m), k_0 + T.Cast("int64", k)
                            ),
                        ),
                        T.float32(0),
                    )
            for i in T.unroll(_ceil(BN * depth, threads)):
                at = T.meta_var(i * threads + tx)
                if at < BN * depth:
                    k = T.meta_var(at // BN if kn else at % depth)
                    n = T.meta_var(at % BN if kn else at // depth)
                    shared[b_sm + k * b_pitch + n] = T.if_then_else(
                        tirx.all(n_0 + T.Cast("int64", n) < N, k_0 + T.Cast("int64", k) < K),
                        T.Cast(
                            "float32",
                            load_b(
                                B_flat, lead, k_0 + T.Cast("int64", k), n_0 + T.Cast("int64", n)
                            ),
                        ),
                        T.float32(0),
                    )
            T.cuda.cta_sync()
            # a short sum for each tile, added to the long one: the error grows with the root of
            # both lengths
            for i in T.unroll(TM * TN):
                part[i] = T.float32(0)
            for kk in T.unroll(BK):
                for j in T.unroll(TM // min(TM, 4)):
                    for v in T.vectorized(min(TM, 4)):
                        a_reg[j * 4 + v] = shared[
                            (group * BK + kk) * a_pitch + t_m * TM + j * 4 + v
                        ]
                for j in T.unroll(TN // wide):
                    for v in T.vectorized(wide):
                        b_reg[j * wide + v] = shared[
                            b_sm + (group * BK + kk) * b_pitch + j * columns * wide + t_n * wide + v
                        ]
                for i in T.unroll(TM):
                    for j in T.unroll(TN):
                        part[i * TN + j] = part[i * TN + j] + a_reg[i] * b_reg[j]
            for i in T.unroll(TM * TN):
                acc[i] = acc[i] + part[i]
            T.cuda.cta_sync()
        if groups > 1:
            if group > 0:
                for i in T.unroll(TM * TN):
                    shared[(group - 1) * BM * BN + i * team + tx % team] = acc[i]
            T.cuda.cta_sync()
            if group == 0:
                for g in T.unroll(groups - 1):
                    for i in T.unroll(TM * TN):
                        acc[i] = acc[i] + shared[g * BM * BN + i * team + tx % team]
        if group == 0:
            for i in T.unroll(TM):
                for j in T.unroll(TN):
                    m = T.meta_var(m_0 + T.Cast("int64", t_m * TM + i))
                    n = T.meta_var(
                        n_0 + T.Cast("int64", j // wide * columns * wide + t_n * wide + j % wide)
                    )
                    if tirx.all(m < M, n < N):
                        store(acc[i * TN + j], lead, m, n)

    return kernel


def _int32(extent: Any) -> Any:
    return extent if isinstance(extent, int) else tirx.Cast("int32", extent)


def _ceil(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def _product(extents: Any) -> Any:
    total: Any = 1
    for extent in extents:
        total = total * extent
    return total


def _split(flat: Any, extents: Any) -> list[Any]:
    """Indices of a flat index in row-major order."""
    found: list[Any] = []
    for extent in reversed(extents[1:]):
        extent = tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
        found.append(tirx.floormod(flat, extent))
        flat = tirx.floordiv(flat, extent)
    return [flat, *reversed(found)] if extents else []

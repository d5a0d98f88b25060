"""From the warp groups' partial sums to the outputs of the skinny GEMM."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.kernel.epilogue import same
from tvmcap.schedules.gpu_epilogue import Views, offset, position
from tvmcap.schedules.skinny_plan import Plan

_SEND = (
    "__forceinline__ __device__ void tvmcap_send_pair("
    "void* sums, void* barrier, unsigned rank, float a, float b)"
    "{ unsigned at = __cvta_generic_to_shared(sums), bar = __cvta_generic_to_shared(barrier);"
    '  asm volatile("{ .reg .b32 there, signal; mapa.shared::cluster.u32 there, %0, %2;'
    " mapa.shared::cluster.u32 signal, %1, %2;"
    " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [signal];"
    ' st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there+32], %4, [signal]; }"'
    ' :: "r"(at), "r"(bar), "r"(rank), "f"(a), "f"(b) : "memory"); }'
)

_TOGETHER = 8
"""Rows whose operands a thread loads before it needs the first."""


def leaver(p: Plan) -> Any:
    """Return what leaves a thread's sums where their rows are finished, and waits for the others.

    A thread holds rows ``i * 8 + lane % 4 * 2 + c`` of x at columns ``lane // 4 + r * 8`` of its
    warp's 16. Sums for another block count their bytes at its barrier: neither the cluster nor
    memory must be waited for.
    """

    def send(where: Any, barrier: Any, to: Any, *pair: Any) -> Any:
        arguments = (where, barrier, T.Cast("uint32", to), *pair)
        return T.cuda.func_call("tvmcap_send_pair", *arguments, source_code=_SEND)

    @T.inline
    def leave(sm: Any, acc: Any, tx: Any, rank: Any, m_0: Any) -> None:
        for i in T.unroll(p.accumulators // 4):
            for c in T.unroll(2):
                row = T.meta_var(i * 8 + tx % 4 * 2 + c)
                column = T.meta_var(tx // 32 * 16 + tx % 32 // 4)
                at = T.meta_var((rank * p.own + row % p.own) * p.pitch + column)
                low, high = T.meta_var((acc[i * 4 + c], acc[i * 4 + 2 + c]))
                if p.split > 1:
                    if m_0 + row < p.m:
                        send(sm.sums.ptr_to([at]), sm.summed.ptr_to([0]), row // p.own, low, high)
                else:
                    sm.sums[at] = low
                    sm.sums[at + 8] = high
        if p.split > 1:
            T.cuda.mbarrier_wait_acquire_cluster(sm.summed.ptr_to([0]), 0)
        else:
            T.ptx.bar.sync(T.uint32(1), T.uint32(p.threads))

    return leave


def toucher(gemm: Any, p: Plan, views: Views) -> Any:
    """Return what brings the epilogue's operands to L2 while w streams."""

    def operands(row: Any, column: Any) -> list[Any]:
        """Return the distinct parameters' elements that the epilogue reads at a point."""
        found: list[Any] = []

        def load(buffer: Any, at: list[Any]) -> Any:
            value = views.load(buffer, at)
            if buffer in views.flat and not any(same(value, other) for other in found):
                found.append(value)
            return value

        views.epilogue.stores(T.float32(0), _inside(gemm, p, row, column), load)
        return found

    def prefetch(row: Any, column: Any, of_rows: bool) -> None:
        for one, other in zip(operands(row, column), operands(row + 1, column), strict=True):
            if same(one, other) != of_rows:
                T.evaluate(T.ptx["prefetch.global.L2"](tirx.address_of(one)))

    @T.inline
    def touch(tx: Any, first_row: Any, n_0: Any) -> None:
        prefetch(first_row, n_0 + tx % p.bm, False)
        rows = T.meta_var(T.max(T.min(p.m - first_row, p.own), 0))
        for turn in T.serial((rows + 1) // 2):  # as many as there are: no address is kept for later
            prefetch(first_row + tx // p.bm + turn * 2, n_0 + tx % p.bm, True)

    return touch


def finisher(gemm: Any, p: Plan, views: Views) -> Any:
    """Return what finishes a block's own rows: a warp has neighbouring columns of one row.

    Values past the edge are computed of the edge's operands and not stored: no branch and no store
    stands between the loads of a thread's rows, of which only so many are held in registers.
    """
    outputs = gemm.fused.epilogue.outputs

    def total(sm: Any, own: Any, column: Any) -> Any:
        """Sum what the ranks have left of one of this block's rows."""
        at = (own if p.own > 1 else 0) * p.pitch + column
        buffer, value = T.alloc_buffer((1,), "float32", scope="local"), T.float32(0)
        for rank in range(p.split):
            value = value + sm.sums[rank * p.own * p.pitch + at]
        T.buffer_store(buffer, value, [0])
        return buffer[0]

    def evaluate(value: Any, row: Any, column: Any) -> list[Any]:
        """Return variables that hold the outputs' values."""
        held = [T.alloc_buffer((1,), str(output.dtype), scope="local") for output in outputs]
        values = views.values(value, _inside(gemm, p, row, column))
        for buffer, result in zip(held, values, strict=True):
            T.buffer_store(buffer, result, [0])
        return held

    def store(held: list[Any], row: Any, column: Any) -> None:
        at = position(gemm, row, column)
        for output, buffer in zip(outputs, held, strict=True):
            T.buffer_store(views.flat[output], buffer[0], [offset(output, at)])

    def finish(sm: Any, tx: Any, first_row: Any, n_0: Any) -> None:
        column = n_0 + tx % p.bm
        for start in range(0, _turns(p), _TOGETHER):
            rows = [tx // p.bm + 2 * i for i in range(start, min(start + _TOGETHER, _turns(p)))]
            sums = [total(sm, own, tx % p.bm) for own in rows]
            held = [evaluate(v, first_row + own, column) for v, own in zip(sums, rows, strict=True)]
            for own, values in zip(rows, held, strict=True):
                inside = tirx.all(own < p.own, first_row + own < p.m, column < p.n)
                with T.If(inside), T.Then():
                    store(values, first_row + own, column)

    return finish


def _turns(p: Plan) -> int:
    """Rows that a thread finishes: there are two threads for every column."""
    return (p.own + 1) // 2


def _inside(gemm: Any, p: Plan, row: Any, column: Any) -> list[Any]:
    return position(gemm, T.min(row, p.m - 1), T.min(column, p.n - 1))

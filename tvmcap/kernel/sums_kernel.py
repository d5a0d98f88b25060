"""The TIRx text of sums over the rows of a matrix: one pass that also writes what it adds up.

A thread takes eight neighbouring columns of every so many rows. It copies them to shared memory
some rows ahead, so that enough bytes are under way, and keeps its sums in registers. The threads of
a block meet in shared memory, and the blocks of a cluster, which part the rows, at the first of
them. The last rows come first: the kernel before wrote them last, and the one after reads the first
rows first, so that more is found in the L2 cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.sums import Layout, Sums
from tvmcap.kernel.vectors import BYTES, VECTOR, Result, Vector, move, written
from tvmcap.schedules import hopper_ops
from tvmcap.schedules.gpu_epilogue import flatten, offset
from tvmcap.schedules.row_math import put
from tvmcap.schedules.row_plan import WARP, itemsize

Expr = Any
Buffer = Any

_FINISHED = 4  # columns of a thread that adds up what warps and blocks found
# what is read leaves the L2 cache before what is written, which the next kernel reads
_COPY = (
    "__forceinline__ __device__ void tvmcap_copy16_once(void* to, void* from)"
    "{ unsigned at = __cvta_generic_to_shared(to); unsigned long long policy;"
    '  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));'
    '  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"'
    '  :: "r"(at), "l"(from), "l"(policy) : "memory"); }'
)


def sums_kernel(s: Sums, layout: Layout, capability: int) -> tirx.PrimFunc:
    """Write the kernel for a compute capability, 90 for sm_90."""
    writer = _Writer(s, layout, capability)

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        T.device_entry()
        T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", 1)  # else nvcc saves registers
        ids = T.meta_var(hopper_ops.cluster_ids(s.columns // s.width, layout.cluster))
        tx = T.thread_id([layout.threads])
        writer.write(ids[0], ids[1], tx)

    launch = hopper_ops.launch_params(layout.cluster, writer.early)
    return tirx.PrimFunc(s.params, kernel.body).with_attr("tirx.kernel_launch_params", launch)


class _Writer:
    """Writes one kernel into the function that is being built."""

    def __init__(self, s: Sums, layout: Layout, capability: int) -> None:
        self.s, self.layout, self.cluster = s, layout, layout.cluster
        self.copies, self.early, self.pairs = layout.ahead > 0, capability >= 90, capability >= 80
        self.lanes = s.width // VECTOR
        self.groups = layout.threads // self.lanes
        self.inputs = s.read()

    def write(self, block: Any, rank: Any, tx: Any) -> None:
        """Write the body for a thread of a block."""
        s = self.s
        self.tx = tx
        self.flat = {p: flatten(p) for p in s.params if hasattr(p, "dtype")}
        self.column = T.Cast("int64", block * s.width + tx % self.lanes * VECTOR)
        self.first = T.Cast("int64", rank * self.groups + tx // self.lanes)
        self._allocate()
        if self.cluster > 1:
            self._prepare(tx)
        with T.unroll(VECTOR) as i:
            T.buffer_store(self.sums, T.float32(0), [i])
        if self.early:  # it may have started before the kernel before it has ended
            T.evaluate(T.ptx.griddepcontrol.wait())
        self._walk()
        if self.early:  # the next kernel may start, and waits for what this one still writes
            T.evaluate(T.ptx.griddepcontrol.launch_dependents())
        self._finish(block, rank, tx)

    def _allocate(self) -> None:
        s, pool, layout = self.s, T.SMEMPool(), self.layout
        self.partial = pool.alloc((layout.warps * s.width,), "float32", align=16)
        if self.cluster > 1:
            self.received = pool.alloc(((self.cluster - 1) * s.width,), "float32", align=16)
            self.barrier = pool.alloc((1,), "uint64", align=8)
        ring = (layout.ahead + 1) * layout.threads * VECTOR
        if self.copies:
            self.rings = {b: pool.alloc((ring,), str(b.dtype), align=16) for b in self.inputs}
        pool.commit()
        self.sums = T.alloc_buffer((VECTOR,), "float32", scope="local")
        self.homes = {b: Vector(b, self.pairs) for b in self.inputs}
        self.outs = {b: Result(b, self.flat[b], self.pairs) for b, _ in s.matrices}

    def _prepare(self, tx: Any) -> None:
        """Make the barrier at which the first block of a cluster waits for the others' sums."""
        sent = (self.cluster - 1) * self.s.width * 4
        with T.If(tx == 0), T.Then():
            T.evaluate(T.ptx.mbarrier.init.shared.b64(self.barrier.ptr_to([0]), T.uint32(1)))
            arrive = T.ptx.mbarrier.arrive.expect_tx.shared.b64
            T.evaluate(arrive(self.barrier.ptr_to([0]), T.uint32(sent)))
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())

    def _walk(self) -> None:
        """Take the thread's rows, one after the other, from the last."""
        s, ahead, stride = self.s, self.layout.ahead, self.groups * self.cluster
        rows = tirx.floordiv(T.max(s.rows - self.first, T.int64(0)) + (stride - 1), stride)
        count, place = T.alloc_local([1], "int32"), T.alloc_local([1], "int64")
        T.buffer_store(count, T.Cast("int32", rows), [0])
        T.buffer_store(place, (s.rows - 1 - self.first) * s.columns + self.column, [0])

        def copy(step: Any, later: int) -> None:
            with T.If(step < count[0]), T.Then():
                self._copy(step, place[0] - later * stride * s.columns)
            T.evaluate(T.ptx["cp.async.commit_group"]())

        for step in range(ahead):
            copy(T.int32(step), step)
        with T.serial(count[0]) as step:
            row = s.rows - 1 - (self.first + T.Cast("int64", step) * stride)
            # TVM moves no vectors where a variable says; it is there for the copies' sake
            here = T.Bind(place[0]) if self.copies else row * s.columns + self.column
            if self.copies:
                T.evaluate(T.ptx["cp.async.wait_group"](ahead - 1))
            for buffer, home in self.homes.items():
                source, start = self.flat[buffer], here
                if self.copies:
                    source, start = self.rings[buffer], self._slot(step)
                move(home.values, 0, source, start)
            if self.copies:
                copy(step + ahead, ahead)
            self._row(row, here)
            T.buffer_store(place, place[0] - stride * s.columns, [0])

    def _slot(self, step: Any) -> Expr:
        return (step % (self.layout.ahead + 1) * self.layout.threads + self.tx) * VECTOR

    def _copy(self, step: Any, start: Expr) -> None:
        """Have the vectors from ``start`` on copied to the step's slot, which is this thread's."""
        for buffer, ring in self.rings.items():
            for at in range(0, VECTOR, BYTES // itemsize(buffer)):
                source = self.flat[buffer].ptr_to([start + at])
                to = ring.ptr_to([self._slot(step) + at])
                T.evaluate(T.cuda.func_call("tvmcap_copy16_once", to, source, source_code=_COPY))

    def _row(self, row: Expr, start: Expr) -> None:
        """Compute a row's vector of every output, write it, and add it up."""
        for buffer, value in self.s.matrices:
            out = self.outs[buffer]
            out.compute(partial(self._at, value, buffer, row))
            out.write(start)
        buffer, value = self.s.total
        with T.unroll(VECTOR // 2) as pair:
            for c in range(2):
                i = pair * 2 + c
                found = self._at(value, buffer, row, pair, c)
                T.buffer_store(self.sums, self.sums[i] + found, [i])

    def _at(self, value: Expr, target: Buffer, row: Expr, pair: Any, c: int) -> Expr:
        """Return an expression at element ``2 * pair + c`` of a thread's vector of a row."""
        point = [self.s.row, self.s.column]

        def load(node: Any) -> Any:
            buffer = node.source
            if buffer in self.outs:
                return self.outs[buffer].at(pair, c)
            if buffer in self.homes and ep.same_all(node.indices, point):
                return self.homes[buffer].at(pair, c)
            return self._load(node)

        value = tvm_ffi.structural_map(value, (tvm.ir.TensorLoad, load))
        column = self.column + T.Cast("int64", pair * 2 + c)
        return written(put(value, {self.s.row: row, self.s.column: column}), target)

    def _load(self, node: Any) -> Expr:
        """Read a parameter where it lies."""
        where = offset(node.source, list(node.indices))
        return tirx.BufferLoad(self.flat[node.source], [where])

    def _finish(self, block: Any, rank: Any, tx: Any) -> None:
        """Add up over warps, then over the blocks of a cluster, and write the result."""
        sums = self.sums
        s, lane = self.s, tx % WARP
        distance = self.lanes
        while distance < WARP:
            with T.unroll(VECTOR) as i:
                moved = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), sums[i], distance, WARP, WARP)
                T.buffer_store(sums, sums[i] + moved, [i])
            distance *= 2
        with T.If(lane < self.lanes), T.Then():
            move(self.partial, tx // WARP * s.width + lane * VECTOR, sums, 0)
        T.evaluate(T.cuda.cta_sync())
        if self.cluster > 1:
            T.evaluate(hopper_ops.cluster_meet())  # the first block's barrier is ready by then
        with T.If(tx < s.width // _FINISHED), T.Then():
            total = T.alloc_buffer((_FINISHED,), "float32", scope="local")
            start = tx * _FINISHED
            self._add(total, self.partial, start, self.layout.warps, first=True)
            if self.cluster == 1:
                self._end(block, start, total)
                return
            with T.If(rank == 0):
                with T.Then():
                    T.evaluate(hopper_ops.wait(self.barrier.ptr_to([0]), 0))
                    self._add(total, self.received, start, self.cluster - 1, first=False)
                    self._end(block, start, total)
                with T.Else():
                    where = self.received.ptr_to([(rank - 1) * s.width + start])
                    values = [total[i] for i in range(_FINISHED)]
                    T.evaluate(hopper_ops.send(where, self.barrier.ptr_to([0]), 0, values))

    def _add(self, total: Any, parts: Any, start: Any, count: int, *, first: bool) -> None:
        """Add ``count`` rows of shared memory to ``total``, in order."""
        with T.unroll(_FINISHED) as i:
            value = T.float32(0) if first else total[i]
            for part in range(count):
                value = value + parts[part * self.s.width + start + i]
            T.buffer_store(total, value, [i])

    def _end(self, block: Any, start: Any, total: Any) -> None:
        s, (buffer, value) = self.s, self.s.end

        def load(node: Any, i: Any) -> Any:
            if node.source.same_as(s.total[0]):
                return total[i]
            return self._load(node)

        with T.unroll(_FINISHED) as i:
            column = T.Cast("int64", block * s.width + start + i)
            found = tvm_ffi.structural_map(value, (tvm.ir.TensorLoad, lambda node: load(node, i)))
            found = written(put(found, {s.column: column}), buffer)
            T.buffer_store(self.flat[buffer], found, [column])

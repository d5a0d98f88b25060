"""The TIRx text of a row program: every row is read once and kept by the threads that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules.row_estimate import is_tight
from tvmcap.schedules.row_math import (
    Element,
    combine,
    each,
    float_of,
    fold,
    put,
    shuffle,
    start,
    written,
)
from tvmcap.schedules.row_plan import WARP, Pass, plan, shared_bytes, used
from tvmcap.schedules.row_program import Output, RowProgram, Value
from tvmcap.schedules.row_storage import Storage

Expr = Any
_RESIDENT = "tirx.launch_bounds_min_blocks_per_sm"


def row_kernel(program: RowProgram, knobs: Any) -> tirx.PrimFunc:
    """Write the kernel over the buffers of the PrimFunc; parameters are added by the caller."""
    writer = _Writer(program, knobs)
    blocks = (program.rows + knobs.rows - 1) // knobs.rows
    blocks = blocks if isinstance(blocks, int) else tirx.Cast("int32", blocks)

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        T.device_entry()
        bx = T.cta_id([blocks])
        tx = T.thread_id([knobs.threads * knobs.rows])
        writer.write(bx, tx)

    return kernel


def launch_params(program: RowProgram, knobs: Any) -> list[str]:
    """Return the kernel's launch attributes."""
    early = ["tirx.use_programtic_dependent_launch"] if knobs.dependent else []
    shared = ["tirx.use_dyn_shared_memory"] if shared_bytes(program, knobs) else []
    return ["blockIdx.x", "threadIdx.x", *early, *shared]


class _Writer(Storage):
    """Writes one kernel into the function that is being built."""

    def write(self, bx: Any, tx: Any) -> None:
        """Write the body for a thread of a block."""
        if self.knobs.resident == 1:
            self._body(bx, tx)
            return
        with T.attr(T.int32(0), _RESIDENT, self.knobs.resident):
            self._body(bx, tx)

    def _body(self, bx: Any, tx: Any) -> None:
        program, knobs = self.program, self.knobs
        self.thread = tx % knobs.threads if knobs.rows > 1 else tx
        self.slot = tx // knobs.threads
        row = T.Cast("int64", bx * knobs.rows + self.slot if knobs.rows > 1 else bx)
        self.inside = row < program.rows if knobs.rows > 1 else None
        # threads past the last row work on that one and store nothing
        self.row = T.min(row, program.rows - 1) if knobs.rows > 1 else row
        self.allocate()
        if knobs.dependent:  # the next kernel may start, and this one waits for the one before
            T.evaluate(T.ptx.griddepcontrol.launch_dependents())
            T.evaluate(T.ptx.griddepcontrol.wait())
        self.fetch()
        for number, part in enumerate(plan(program, self.keep)):
            for value in part.scalars:
                self._scalar(value)
            self._pass(number, part)
        for value in program.values:
            if not value.by_column and value.var not in self.places:
                self._scalar(value)  # what follows the last reduction
        self._row_outputs()

    def _pass(self, number: int, part: Pass) -> None:
        fetched = {v for v in self.kept if v.kind == "load"}
        computed = [v for v in part.values if v.var not in part.inlined and v not in fetched]
        wanted = [v for v in used(self.program, part) if v not in computed]
        totals = {v: start(v, self.knobs.vector) for v in part.reductions}
        local = {
            v: self.registers(v, self.knobs.vector)
            for v in computed
            if v not in self.kept or self.shared
        }

        if number and not self.shared and is_tight(self.program, self.knobs):
            self.hide([v for v in wanted if v in self.kept])

        def chunk(step: Any) -> None:
            here = local | self.unpack(step, wanted)
            for value in computed:
                if value.kind == "load":
                    self.load(value, local[value], 0, step)
                else:
                    self._stage(value, step, here, part)
            for value, total in totals.items():

                def add(i: Element, value: Value = value, total: Any = total) -> None:
                    item = T.Cast(str(total.dtype), self._at(value.expr, step, i, here, part))
                    T.buffer_store(total, combine(value, total[i.at], item), [i.at])

                each(self.knobs.vector, add)
            for output in part.outputs:
                self._store(output, step, here, part)

        if computed or totals or part.outputs:
            self.columns(chunk, self.knobs.keep == "registers")
        self._finish(totals)

    def _home(self, value: Value, step: Any, local: dict[Value, Any]) -> tuple[Any, Any]:
        """Return the buffer of a value at a column, and where the step's vector starts in it."""
        if value in local:
            return local[value], 0
        return self.kept[value], self.kept_at(step)

    def _stage(self, value: Value, step: Any, local: dict[Value, Any], part: Pass) -> None:
        home, start = self._home(value, step, local)

        def store(i: Element) -> None:
            T.buffer_store(home, self._at(value.expr, step, i, local, part), [start + i.at])

        each(self.knobs.vector, store)
        if value in self.kept and self.shared:
            self.pack(value, home, step)

    def _at(self, expr: Expr, step: Any, i: Element, local: dict[Value, Any], part: Pass) -> Expr:
        """Return an expression at an element of the step's vector."""
        for value in reversed(part.values):
            if value.var in part.inlined:
                expr = put(expr, {value.var: value.expr})
        places = self.fixed()
        places[self.program.column] = self.column(step) + T.Cast("int64", i.at)
        floats = {}
        for value in {**local, **self.kept}:
            home, start = self._home(value, step, local)
            places[value.var] = tirx.BufferLoad(home, [start + i.at])
            if home in self.words:
                word = self.words[home][tirx.floordiv(start + i.at - i.half, 2)]
                floats[value.var] = float_of(word, i.half)

        def widened(cast: Any) -> Expr:
            return floats.get(cast.value, cast) if str(cast.ty) == "float32" else cast

        expr = tvm_ffi.structural_map(expr, (tirx.Cast, widened))
        return written(put(expr, places), self.program)

    def _store(self, output: Output, step: Any, local: dict[Value, Any], part: Pass) -> None:
        dtype, vector = str(output.buffer.dtype), self.knobs.vector
        value = T.alloc_buffer((vector,), dtype, scope="local")

        def compute(i: Element) -> None:
            T.buffer_store(value, self._at(output.value.var, step, i, local, part), [i.at])

        each(self.knobs.vector, compute)

        def move(at: Any, index: Any) -> None:
            T.buffer_store(self.flat[output.buffer], value[at], [index])

        def store() -> None:
            self.move(output.buffer, move, output.index, step)

        self._guarded(self.inside, store)

    def _guarded(self, condition: Any, store: Callable[[], None]) -> None:
        if condition is None:
            store()
            return
        with T.If(condition), T.Then():
            store()

    # --- values of a row

    def _scalar(self, value: Value) -> None:
        """Compute a value of the whole row on every thread."""
        home = T.alloc_buffer((1,), value.dtype, scope="local")
        expr = put(value.expr, self.fixed())
        if value.kind == "load":
            expr = self.flat[value.buffer][expr]
        T.buffer_store(home, written(expr, self.program), [0])
        self.places[value.var] = home[0]

    def _finish(self, totals: dict[Value, Any]) -> None:
        """Combine the accumulators of all threads of a row; every thread gets the result."""
        threads, warps = self.knobs.threads, self.knobs.threads // WARP
        for value, total in totals.items():
            fold(value, total, self.knobs.vector)
            shuffle(value, total, min(threads, WARP))
        if warps > 1:
            for value, total in totals.items():
                where = self.slot * warps + self.thread // WARP
                with T.If(self.thread % WARP == 0), T.Then():
                    T.buffer_store(self.partials[value], total[0], [where])
            if totals:
                T.evaluate(T.cuda.cta_sync())
            for value, total in totals.items():
                where = self.slot * warps + self.thread % warps
                T.buffer_store(total, self.partials[value][where], [0])
                shuffle(value, total, warps)
        for value, total in totals.items():
            home = T.alloc_buffer((1,), value.dtype, scope="local")
            T.buffer_store(home, T.Cast(value.dtype, total[0]), [0])
            self.places[value.var] = home[0]

    def _row_outputs(self) -> None:
        outputs = [o for o in self.program.outputs if not o.by_column]
        if not outputs:
            return
        first = self.thread == 0
        first = first if self.inside is None else tirx.And(first, self.inside)
        with T.If(first), T.Then():
            for output in outputs:
                index = put(output.index, self.fixed())
                result = self.places[output.value.var]
                T.buffer_store(self.flat[output.buffer], result, [index])

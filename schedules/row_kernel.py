"""The TIRx text of a row program: every row is read once and kept by the threads that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules.gpu_epilogue import flatten
from tvmcap.schedules.row_math import (
    Element,
    accumulator,
    combine,
    each,
    float_of,
    fold,
    put,
    shuffle,
    start,
    written,
)
from tvmcap.schedules.row_plan import WARP, Pass, keeps, lanes_of, plan, shared_bytes, steps
from tvmcap.schedules.row_program import Output, RowProgram, Value

Expr = Any


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


class _Writer:
    """Writes one kernel into the function that is being built."""

    def __init__(self, program: RowProgram, knobs: Any) -> None:
        self.program, self.knobs = program, knobs
        self.keep = keeps(program, knobs)
        self.places: dict[Any, Expr] = {}
        self.kept: dict[Any, Any] = {}
        self.words: dict[Any, Any] = {}  # pairs of bfloat16, by the buffer that holds them
        self.flat: dict[Any, Any] = {}
        self.partials: dict[Value, Any] = {}

    def write(self, bx: Any, tx: Any) -> None:
        """Write the body for a thread of a block."""
        program, knobs = self.program, self.knobs
        self.flat = {p: flatten(p) for p in program.params}
        self.thread = tx % knobs.threads if knobs.rows > 1 else tx
        self.slot = tx // knobs.threads
        row = T.Cast("int64", bx * knobs.rows + self.slot if knobs.rows > 1 else bx)
        self.inside = row < program.rows if knobs.rows > 1 else None
        # threads past the last row work on that one and store nothing
        self.row = T.min(row, program.rows - 1) if knobs.rows > 1 else row
        self._allocate()
        for part in plan(program, self.keep):
            for value in part.scalars:
                self._scalar(value)
            self._pass(part)
        for value in program.values:
            if not value.by_column and value.var not in self.places:
                self._scalar(value)  # what follows the last reduction
        self._row_outputs()

    # --- storage

    def _allocate(self) -> None:
        program, knobs = self.program, self.knobs
        warps = knobs.threads // WARP
        reductions = [v for v in program.values if v.combine is not None]
        pool: Any = T.SMEMPool() if shared_bytes(program, knobs) else None
        for value in reductions if warps > 1 else ():
            wide = accumulator(value.dtype)
            self.partials[value] = pool.alloc((knobs.rows * warps,), wide, align=16)
        elements = steps(program, knobs) * knobs.vector
        for value in self.keep:
            if knobs.keep == "shared":
                whole = (elements * knobs.threads * knobs.rows,)
                self.kept[value] = pool.alloc(whole, value.dtype, align=16)
            else:
                self.kept[value] = self._registers(value, elements)
        if pool is not None:
            pool.commit()

    def _registers(self, value: Value, elements: int) -> Any:
        home = T.alloc_buffer((elements,), value.dtype, scope="local")
        if value.kind == "load" and value.dtype == "bfloat16" and elements % 2 == 0:
            self.words[home] = T.decl_buffer(
                (elements // 2,), "uint32", data=home.data, scope="local"
            )
        return home

    def _kept_at(self, step: Any) -> Any:
        """Return where the vector of a step starts in storage that is kept."""
        knobs = self.knobs
        if knobs.keep == "registers":
            return step * knobs.vector
        width = steps(self.program, knobs) * knobs.threads * knobs.vector
        return self.slot * width + (step * knobs.threads + self.thread) * knobs.vector

    # --- one pass

    def _pass(self, part: Pass) -> None:
        local = {
            v: self._registers(v, self.knobs.vector)
            for v in part.values
            if v not in self.kept and v.var not in part.inlined
        }
        totals = {v: start(v, self.knobs.vector) for v in part.reductions}
        computed = [v for v in part.values if v.var not in part.inlined]
        # what is loaded and kept first, all of it in flight at once
        early = [v for v in computed if v.kind == "load" and v in self.kept]
        if early and self.knobs.keep == "registers":

            def fetch(step: Any) -> None:
                for value in early:
                    self._load(value, step, local)

            self._columns(fetch)
            computed = [v for v in computed if v not in early]

        def chunk(step: Any) -> None:
            for value in computed:
                if value.kind == "load":
                    self._load(value, step, local)
                else:
                    self._stage(value, step, local, part)
            for value, total in totals.items():

                def add(i: Element, value: Value = value, total: Any = total) -> None:
                    item = T.Cast(str(total.dtype), self._at(value.expr, step, i, local, part))
                    T.buffer_store(total, combine(value, total[i.at], item), [i.at])

                each(self.knobs.vector, add)
            for output in part.outputs:
                self._store(output, step, local, part)

        if computed or totals or part.outputs:
            self._columns(chunk)
        self._finish(totals)

    def _columns(self, chunk: Callable[[Any], None]) -> None:
        """Write ``chunk(step)`` for each vector of the thread; the last may lie past the end."""
        knobs, columns = self.knobs, self.program.columns
        full, rest = divmod(columns, knobs.threads * knobs.vector)
        if full:
            with (T.unroll if knobs.keep == "registers" else T.serial)(full) as step:
                chunk(step)
        if rest:
            with T.If((full * knobs.threads + self.thread) * knobs.vector < columns), T.Then():
                chunk(full)

    def _column(self, step: Any) -> Expr:
        knobs = self.knobs
        return T.Cast("int64", (step * knobs.threads + self.thread) * knobs.vector)

    def _home(self, value: Value, step: Any, local: dict[Value, Any]) -> tuple[Any, Any]:
        """Return the buffer of a value at a column, and where the step's vector starts in it."""
        return (local[value], 0) if value in local else (self.kept[value], self._kept_at(step))

    def _load(self, value: Value, step: Any, local: dict[Value, Any]) -> None:
        home, start = self._home(value, step, local)
        self._move(
            value.buffer,
            lambda at, index: T.buffer_store(home, self.flat[value.buffer][index], [start + at]),
            value.expr,
            step,
        )

    def _move(self, buffer: Any, move: Callable[[Any, Any], None], index: Expr, step: Any) -> None:
        """Write ``move(element, flat index)`` for a vector, in instructions as wide as may be."""
        width = lanes_of(buffer, self.knobs.vector)
        for part in range(self.knobs.vector // width):
            base = T.int64(part * width)
            if width == 1:
                move(base, self._index(index, self._column(step) + base))
                continue
            with T.vectorized(T.int64(width)) as lane:
                move(base + lane, self._index(index, self._column(step) + base + lane))

    def _index(self, index: Expr, column: Expr) -> Expr:
        return put(index, self._fixed() | {self.program.column: column})

    def _fixed(self) -> dict[Any, Expr]:
        return {self.program.row: self.row, **self.places}

    def _stage(self, value: Value, step: Any, local: dict[Value, Any], part: Pass) -> None:
        home, start = self._home(value, step, local)

        def store(i: Element) -> None:
            T.buffer_store(home, self._at(value.expr, step, i, local, part), [start + i.at])

        each(self.knobs.vector, store)

    def _at(self, expr: Expr, step: Any, i: Element, local: dict[Value, Any], part: Pass) -> Expr:
        """Return an expression at an element of the step's vector."""
        for value in reversed(part.values):
            if value.var in part.inlined:
                expr = put(expr, {value.var: value.expr})
        places = self._fixed()
        places[self.program.column] = self._column(step) + T.Cast("int64", i.at)
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
            self._move(output.buffer, move, output.index, step)

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
        expr = put(value.expr, self._fixed())
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
                index = put(output.index, self._fixed())
                result = self.places[output.value.var]
                T.buffer_store(self.flat[output.buffer], result, [index])

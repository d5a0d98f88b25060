"""Where a row kernel keeps the values of a row, and how they get there from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from tvmcap.schedules.gpu_epilogue import flatten
from tvmcap.schedules.row_math import accumulator, put
from tvmcap.schedules.row_plan import (
    WARP,
    copied_bytes,
    itemsize,
    keeps,
    lanes_of,
    shared_bytes,
    steps,
)
from tvmcap.schedules.row_program import RowProgram, Value

Expr = Any
UNROLLED = 16
"""Vectors of a thread up to which loads that start a row are written one after the other."""

_HIDE = """
__forceinline__ __device__ unsigned tvmcap_hide(unsigned word) {
  asm volatile("" : "+r"(word));
  return word;
}
"""


class Storage:
    """Storage of one kernel in the function that is being built.

    Attributes
    ----------
    keep: values that passes hand on.
    kept: the buffer of each.
    places: what stands for a value of a row.
    row, thread, slot: of the thread: its row, its number in it, the row's number in the block.
    """

    def __init__(self, program: RowProgram, knobs: Any) -> None:
        self.program, self.knobs = program, knobs
        self.keep = keeps(program, knobs)
        self.shared = knobs.keep == "shared"
        self.places: dict[Any, Expr] = {}
        self.kept: dict[Any, Any] = {}
        self.words: dict[Any, Any] = {}  # pairs of bfloat16, by the buffer that holds them
        self.flat: dict[Any, Any] = {}
        self.partials: dict[Value, Any] = {}
        self.row: Any = None
        self.thread: Any = None
        self.slot: Any = None

    def allocate(self) -> None:
        """Allocate partial results and what is kept."""
        program, knobs = self.program, self.knobs
        self.flat = {p: flatten(p) for p in program.params}
        warps = knobs.threads // WARP
        reductions = [v for v in program.values if v.combine is not None]
        pool: Any = T.SMEMPool() if shared_bytes(program, knobs) else None
        for value in reductions if warps > 1 else ():
            wide = accumulator(value.dtype)
            self.partials[value] = pool.alloc((knobs.rows * warps,), wide, align=16)
        elements = steps(program, knobs) * knobs.vector
        for value in self.keep:
            if self.shared:
                whole = (elements * knobs.threads * knobs.rows,)
                self.kept[value] = pool.alloc(whole, value.dtype, align=16)
            else:
                self.kept[value] = self.registers(value, elements)
        if pool is not None:
            pool.commit()

    def registers(self, value: Value, elements: int) -> Any:
        """Return registers for elements of a value."""
        home = T.alloc_buffer((elements,), value.dtype, scope="local")
        if value.kind == "load" and value.dtype == "bfloat16" and elements % 2 == 0:
            self.words[home] = T.decl_buffer(
                (elements // 2,), "uint32", data=home.data, scope="local"
            )
        return home

    def fetch(self) -> None:
        """Load what is kept of the parameters, all of it in flight at once."""
        program, knobs = self.program, self.knobs
        loads = [v for v in self.keep if v.kind == "load"]
        copied = {v for v in loads if self.shared and copied_bytes(v, knobs)}

        def each(step: Any) -> None:
            for value in loads:
                if value in copied:
                    self._copy(value, step)
                else:
                    self.load(value, self.kept[value], self.kept_at(step), step)

        if loads:
            self.columns(each, steps(program, knobs) <= UNROLLED)
        if copied:  # a thread reads only what it copied
            T.evaluate(T.ptx["cp.async.wait_all"]())

    def _copy(self, value: Value, step: Any) -> None:
        """Copy a vector to shared memory, past the registers."""
        home, start = self.kept[value], self.kept_at(step)
        size = copied_bytes(value, self.knobs)
        lanes = size // itemsize(value)
        name = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global"
        for at in range(0, self.knobs.vector, lanes):
            index = self.index(value.expr, self.column(step) + T.int64(at))
            source = self.flat[value.buffer].ptr_to([index])
            T.evaluate(T.ptx[name](home.ptr_to([start + at]), source, size))

    def hide(self, values: Sequence[Value]) -> None:
        """Have the compiler read kept registers anew, where it would keep them widened instead."""
        for value in values:
            home = self.kept[value]
            size = int(home.shape[0]) * itemsize(value)
            if itemsize(value) >= 4 or size % 4:
                continue
            words = self.words.get(home)
            if words is None:
                words = T.decl_buffer((size // 4,), "uint32", data=home.data, scope="local")
            with T.unroll(size // 4) as i:
                word = T.cuda.func_call(
                    "tvmcap_hide", words[i], source_code=_HIDE, return_type="uint32"
                )
                T.buffer_store(words, word, [i])

    def unpack(self, step: Any, wanted: Sequence[Value]) -> dict[Value, Any]:
        """Return registers with the step's vectors of kept values in shared memory."""
        found = {}
        for value in self.kept:
            if self.shared and value in wanted:
                home, start = self.kept[value], self.kept_at(step)
                found[value] = self.registers(value, self.knobs.vector)
                self._between(value, found[value], 0, home, start)
        return found

    def pack(self, value: Value, vector: Any, step: Any) -> None:
        """Keep a step's vector, which is in registers, in shared memory."""
        self._between(value, self.kept[value], self.kept_at(step), vector, 0)

    def _between(self, value: Value, to: Any, to_at: Any, source: Any, at: Any) -> None:
        lanes = lanes_of(value, self.knobs.vector)
        for part in range(0, self.knobs.vector, lanes):
            if lanes == 1:
                T.buffer_store(to, source[at + part], [to_at + part])
                continue
            with T.vectorized(lanes) as lane:
                T.buffer_store(to, source[at + part + lane], [to_at + part + lane])

    def kept_at(self, step: Any) -> Any:
        """Return where the vector of a step starts in storage that is kept."""
        knobs = self.knobs
        if not self.shared:
            return step * knobs.vector
        width = steps(self.program, knobs) * knobs.threads * knobs.vector
        return self.slot * width + (step * knobs.threads + self.thread) * knobs.vector

    def columns(self, chunk: Callable[[Any], None], unrolled: bool) -> None:
        """Write ``chunk(step)`` for each vector of the thread; the last may lie past the end."""
        knobs, columns = self.knobs, self.program.columns
        full, rest = divmod(columns, knobs.threads * knobs.vector)
        if full:
            with (T.unroll if unrolled else T.serial)(full) as step:
                chunk(step)
        if rest:
            with T.If((full * knobs.threads + self.thread) * knobs.vector < columns), T.Then():
                chunk(full)

    def column(self, step: Any) -> Expr:
        """Return the first column of a step's vector."""
        knobs = self.knobs
        return T.Cast("int64", (step * knobs.threads + self.thread) * knobs.vector)

    def load(self, value: Value, home: Any, start: Any, step: Any) -> None:
        """Load a step's vector of a parameter."""
        self.move(
            value.buffer,
            lambda at, index: T.buffer_store(home, self.flat[value.buffer][index], [start + at]),
            value.expr,
            step,
        )

    def move(self, buffer: Any, move: Callable[[Any, Any], None], index: Expr, step: Any) -> None:
        """Write ``move(element, flat index)`` for a vector, in instructions as wide as may be."""
        width = lanes_of(buffer, self.knobs.vector)
        for part in range(self.knobs.vector // width):
            base = T.int64(part * width)
            if width == 1:
                move(base, self.index(index, self.column(step) + base))
                continue
            with T.vectorized(T.int64(width)) as lane:
                move(base + lane, self.index(index, self.column(step) + base + lane))

    def index(self, index: Expr, column: Expr) -> Expr:
        """Return a flat index at a column of the thread's row."""
        return put(index, self.fixed() | {self.program.column: column})

    def fixed(self) -> dict[Any, Expr]:
        """Return what stands for the row and its values."""
        return {self.program.row: self.row, **self.places}

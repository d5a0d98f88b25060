"""What a row kernel computes in each pass over a row, and what it keeps between passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from tvmcap.kernel import cpu_blocks as cb
from tvmcap.schedules.row_program import Output, RowProgram, Value

WARP = 32

VECTOR_BYTES = 16
"""Widest load and store of one thread (PTX ISA, "ld": v4.b32)."""

_VECTOR_TYPES = ("bfloat16", "float16", "float32", "int32", "int8", "uint8")


@dataclass(frozen=True)
class Pass:
    """One pass over the columns of a row.

    Attributes
    ----------
    scalars: values of a row that are known from here on.
    values: computed at each column, in order; ``inlined`` of them are used once.
    reductions, outputs: what the pass feeds.
    """

    scalars: tuple[Value, ...]
    values: tuple[Value, ...]
    inlined: frozenset[Any]
    reductions: tuple[Value, ...]
    outputs: tuple[Output, ...]


def itemsize(value: Any) -> int:
    """Bytes of an element of a value or a buffer."""
    size: int = tvm.DataType(str(value.dtype)).itemsize
    return size


@lru_cache(maxsize=64)
def kept(program: RowProgram, recompute: bool) -> tuple[Value, ...]:
    """Return the values of a row that passes hand on, so that it is read from memory once.

    With ``recompute`` they are the parameters themselves, and each pass computes from those; else
    the latest values that a later pass needs, before a cast that widens them.
    """
    if recompute:
        needed = [_needed(program, number, ()) for number in range(passes(program))]
        loads = [v for v in program.values if v.kind == "load" and v.by_row and v.by_column]
        return tuple(v for v in loads if sum(v in values for values in needed) > 1)
    found: dict[Value, None] = {}
    for value in program.values:
        for source in inputs(program, value.expr):
            if source.by_row and source.by_column and source.phase < value.phase:
                found[_narrow(program, source)] = None
    return tuple(v for v in program.values if v in found)


def plan(program: RowProgram, keep: Sequence[Value]) -> list[Pass]:
    """Return the passes where ``keep`` stay between them."""
    done: set[Value] = set()
    found = []
    for number in range(passes(program)):
        values = _needed(program, number, done)
        done |= values & set(keep)
        ordered = tuple(v for v in program.values if v in values)
        reductions, outputs = _targets(program, number)
        exprs = [v.expr for v in (*ordered, *reductions)]
        uses = [v for expr in exprs for v in _variables(expr)] + [o.value.var for o in outputs]
        inlined = frozenset(
            v.var
            for v in ordered
            if v.kind == "stage" and v not in keep and sum(map(v.var.same_as, uses)) == 1
        )
        scalars = tuple(
            v
            for v in program.values
            if v.phase == number and v.kind != "reduction" and not v.by_column
        )
        found.append(Pass(scalars, ordered, inlined, reductions, outputs))
    return found


@lru_cache(maxsize=64)
def passes(program: RowProgram) -> int:
    """Return the number of passes over the columns."""
    reductions = [v.phase for v in program.values if v.combine is not None]
    outputs = [ready(o.value) for o in program.outputs if o.by_column]
    return max(reductions + outputs) + 1


def ready(value: Value) -> int:
    """Return the first pass in which a value can be used."""
    return value.phase + (value.combine is not None)


def inputs(program: RowProgram, expr: Any) -> list[Value]:
    """List the values that an expression is made of."""
    known = {v.var: v for v in program.values}
    return [known[v] for v in dict.fromkeys(_variables(expr)) if v in known]


@lru_cache(maxsize=64)
def vector(program: RowProgram) -> int:
    """Return how many elements the widest load takes: the start of every row must allow it."""
    moved = [(v.buffer, v.expr) for v in program.values if v.kind == "load" and v.by_column]
    moved += [(o.buffer, o.index) for o in program.outputs if o.by_column]
    narrow = min(itemsize(buffer) for buffer, _ in moved)
    lanes = VECTOR_BYTES // max(narrow, 2)
    analyzer, zero = Analyzer(), tirx.IntImm("int64", 0)
    starts = [cb.substitute(index, {program.column: zero}) for _, index in moved]
    while lanes > 1 and not all(
        program.columns % lanes == 0
        and analyzer.can_prove_equal(tirx.floormod(start, tirx.IntImm("int64", lanes)), zero)
        for start in starts
    ):
        lanes //= 2
    return lanes


def lanes_of(buffer: Any, vector: int) -> int:
    """Return how many of ``vector`` elements one instruction moves."""
    if str(buffer.dtype) not in _VECTOR_TYPES:
        return 1
    return min(vector, VECTOR_BYTES // itemsize(buffer))


def keeps(program: RowProgram, knobs: Any) -> tuple[Value, ...]:
    """Return the values that a setting keeps between passes."""
    return () if knobs.keep == "reload" else kept(program, knobs.recompute)


def used(program: RowProgram, part: Pass) -> list[Value]:
    """List the values that a pass's expressions and outputs are made of."""
    exprs = [v.expr for v in (*part.values, *part.reductions) if v.kind != "load"]
    found = [v for expr in exprs for v in inputs(program, expr)]
    return list(dict.fromkeys(found + [o.value for o in part.outputs]))


def copied_bytes(value: Value, knobs: Any) -> int:
    """Return the bytes that one copy from memory to shared memory moves, 0 where none can."""
    size = lanes_of(value, knobs.vector) * itemsize(value)
    return size if size in (4, 8, 16) else 0


def steps(program: RowProgram, knobs: Any) -> int:
    """Return the vectors of a row that each thread handles."""
    share: int = -(-program.columns // (knobs.threads * knobs.vector))
    return share


def shared_bytes(program: RowProgram, knobs: Any) -> int:
    """Return the bytes of shared memory of a setting: partial results, and rows kept there."""
    warps = knobs.threads // WARP
    total = 0
    if warps > 1:
        reductions = [v for v in program.values if v.combine is not None]
        total += sum(knobs.rows * warps * max(itemsize(v), 4) + 16 for v in reductions)
    if knobs.keep == "shared":
        wide = steps(program, knobs) * knobs.threads * knobs.vector * knobs.rows
        total += sum(wide * itemsize(v) + 16 for v in keeps(program, knobs))
    return total


def kept_registers(program: RowProgram, knobs: Any) -> int:
    """Return the registers of a thread that hold kept values."""
    if knobs.keep != "registers":
        return 0
    elements: int = steps(program, knobs) * knobs.vector
    return sum(-(-elements * itemsize(v) // 4) for v in keeps(program, knobs))


def _needed(program: RowProgram, number: int, done: Iterable[Value]) -> set[Value]:
    """Values at a column that pass ``number`` computes; those in ``done`` are there."""
    reductions, outputs = _targets(program, number)
    done, found = set(done), set()
    todo = [v for r in reductions for v in inputs(program, r.expr)] + [o.value for o in outputs]
    while todo:
        value = todo.pop()
        if value.by_column and value not in done and value not in found:
            found.add(value)
            todo += inputs(program, value.expr)
    return found


def _targets(program: RowProgram, number: int) -> tuple[tuple[Value, ...], tuple[Output, ...]]:
    reductions = (v for v in program.values if v.combine is not None and v.phase == number)
    outputs = (o for o in program.outputs if o.by_column and ready(o.value) == number)
    return tuple(reductions), tuple(outputs)


def _narrow(program: RowProgram, value: Value) -> Value:
    """Return what a value is the wider cast of, which holds the same in fewer bytes."""
    while isinstance(value.expr, tirx.Cast) and value.kind == "stage":
        sources = inputs(program, value.expr)
        if len(sources) != 1 or not value.expr.value.same_as(sources[0].var):
            break
        if itemsize(sources[0]) >= itemsize(value) or sources[0].phase != value.phase:
            break
        value = sources[0]
    return value


def _variables(expr: Any) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, found.append))
    return found

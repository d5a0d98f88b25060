"""The copies that bring other layouts of B into a panel of the CPU GEMM, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmcap.schedules import cpu_build as b

Expr = Any


def copy_rows(
    view: Any,
    row: Callable[[Expr], Expr],
    steps: Expr,
    columns: Expr,
    packed: Any,
    lanes: int,
    width: int,
) -> Any:
    """Return the packing of a panel whose row ``k`` starts at ``view[row(k)]``."""

    def whole(k: Expr, at: Expr) -> Any:
        value = as_float(view, b.lanes(row(k) + at, lanes), f"x{lanes}")
        return tirx.BufferStore(packed, value, [b.lanes(k * width + at, lanes)])

    def group(v: Expr) -> Any:
        part = _edge(lambda k, j: row(k) + j, view, steps, columns, packed, v * lanes, lanes, width)
        full = b.loop("k", steps, lambda k: whole(k, v * lanes))
        return tirx.IfThenElse(columns >= (v + 1) * lanes, full, part)

    every = b.loop("k", steps, lambda k: b.seq(*(whole(k, v) for v in range(0, width, lanes))))
    return tirx.IfThenElse(columns >= b.const(width), every, b.loop("v", width // lanes, group))


def copy_columns(
    view: Any,
    column: Callable[[Expr], Expr],
    steps: Expr,
    columns: Expr,
    packed: Any,
    lanes: int,
    width: int,
) -> Any:
    """Return the packing of a panel whose column ``j`` starts at ``view[column(j)]``.

    Squares of ``lanes`` by ``lanes`` elements are transposed in registers: each line of memory is
    read once.
    """

    def square(v: Expr, k: Expr) -> Any:
        rows = [
            as_float(view, b.lanes(column(v * lanes + j) + k, lanes), f"x{lanes}")
            for j in range(lanes)
        ]

        def put(i: int, value: Expr) -> Any:
            return tirx.BufferStore(packed, value, [b.lanes((k + i) * width + v * lanes, lanes)])

        return _transpose(rows, lanes, put)

    def line(v: Expr, k: Expr) -> Any:
        return b.loop(
            "j",
            lanes,
            lambda j: tirx.BufferStore(
                packed, as_float(view, column(v * lanes + j) + k), [k * width + v * lanes + j]
            ),
        )

    def group(v: Expr) -> Any:
        squares = tirx.truncdiv(steps, b.const(lanes))
        done = squares * lanes
        full = b.seq(
            b.loop("s", squares, lambda s: square(v, s * lanes)),
            b.loop("k", steps - done, lambda k: line(v, done + k)),
        )
        part = _edge(
            lambda k, j: column(j) + k, view, steps, columns, packed, v * lanes, lanes, width
        )
        return tirx.IfThenElse(columns >= (v + 1) * lanes, full, part)

    return b.loop("v", width // lanes, group)


def _edge(
    at: Callable[[Expr, Expr], Expr],
    view: Any,
    steps: Expr,
    columns: Expr,
    packed: Any,
    first: Expr,
    lanes: int,
    width: int,
) -> Any:
    """Return the copy of ``lanes`` columns from ``first``, zeros from ``columns`` on."""

    def element(k: Expr, j: Expr) -> Any:
        nothing = tirx.FloatImm("float32", 0.0)
        value = tirx.if_then_else(j < columns, as_float(view, at(k, j)), nothing)
        return tirx.BufferStore(packed, value, [k * width + j])

    return b.loop("k", steps, lambda k: b.loop("j", lanes, lambda j: element(k, first + j)))


def _transpose(rows: list[Expr], lanes: int, put: Callable[[int, Expr], Any]) -> Any:
    """Return the stores ``put(i, column i of rows)``.

    Step s = 1, 2, 4, ... swaps the off-diagonal s by s blocks of every 2s by 2s block.
    """
    square, pair = b.Registers(lanes, lanes, "square"), b.Registers(2, lanes, "pair")
    stmts = [square.store(i, row) for i, row in enumerate(rows)]
    step = 1
    while step < lanes:
        below = [x if not x & step else lanes + x - step for x in range(lanes)]
        above = [x + step if not x & step else lanes + x for x in range(lanes)]
        for i in (i for i in range(lanes) if not i & step):
            both = [square.load(i), square.load(i + step)]
            stmts += [
                pair.store(0, shuffle(both, below)),
                pair.store(1, shuffle(both, above)),
                square.store(i, pair.load(0)),
                square.store(i + step, pair.load(1)),
            ]
        step *= 2
    columns = [put(i, square.load(i)) for i in range(lanes)]
    return b.seq(square.allocated, pair.allocated, *stmts, *columns)


def shuffle(pair: list[Expr], lanes: list[int]) -> Expr:
    """Return the elements ``lanes`` of two vectors, those of the second counted after the first."""
    return tirx.Shuffle(pair, [tirx.IntImm("int32", x) for x in lanes])


def as_float(buffer: Any, index: Expr, lanes: str = "") -> Expr:
    """Return an element, or as many neighbours as ``lanes`` (``"x16"``) says, in float32."""
    value = tirx.BufferLoad(buffer, [index])
    return value if str(buffer.dtype) == "float32" else tirx.Cast(f"float32{lanes}", value)

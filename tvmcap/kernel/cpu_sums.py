"""Long sums on a CPU: short blocks added to running totals, which keep what rounding loses.

The error of one long chain of additions grows with its length. Here a chain is as long as a block,
and the totals follow W. Kahan ("Further remarks on reducing truncation errors", 1965): the rounding
error of an addition goes into the next one. Both lie in registers or on the stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.stmt import ForKind

from tvmcap.kernel.cpu_blocks import Block
from tvmcap.schedules import cpu_build as b

Expr = Any
At = dict[Any, Expr]
Axes = list[tuple[Any, Expr]]

#: Additions in a row before the result joins the total.
STEPS = 16
#: The same for a result of few elements, whose rounding errors do not average out.
FEW_STEPS, FEW = 4, 16


def is_float_sum(block: Block) -> bool:
    """Whether a block is a sum whose rounding errors matter."""
    return block.combine is tirx.Add and str(block.buffer.dtype) in ("float32", "float64")


def steps_of(axes: Axes) -> int | None:
    """Return how many points ``axes`` span; None where symbolic."""
    total = 1
    for _, extent in axes:
        if not isinstance(extent, tirx.IntImm):
            return None
        total *= extent.value
    return total


def steps_for(block: Block) -> int:
    """Return after how many additions the result of a block joins its total."""
    elements = steps_of(list(zip(block.axes, block.extents, strict=True)))
    return FEW_STEPS if elements is not None and elements <= FEW else STEPS


def nest(axes: Axes, at: At, body: Callable[[At], Any]) -> Any:
    """Return serial loops over ``axes`` around ``body``."""
    if not axes:
        return body(at)
    (axis, extent), *rest = axes
    return b.loop(axis.name, extent, lambda v: nest(rest, {**at, axis: v}, body))


def blocks(extent: Expr, size: int, body: Callable[[Expr], Any], flush: Any) -> Any:
    """Return ``body`` for every index below ``extent``, and ``flush`` after every ``size``."""
    full = tirx.truncdiv(extent, b.const(size))
    rest = extent - full * size

    def some(start: Expr, count: Expr | int) -> Any:
        return b.seq(b.loop("s", count, lambda s: body(start + s)), flush)

    turns = b.loop("k", full, lambda k: some(k * size, size))
    if isinstance(rest, tirx.IntImm) and rest.value == 0:
        return turns
    return b.seq(turns, some(full * size, rest))


def nest_in_blocks(
    axes: Axes, steps: int, body: Callable[[At], Any], flush: Any, at: At | None = None
) -> Any:
    """Return serial loops over ``axes``, and ``flush`` after about ``steps`` bodies."""
    axes, inside = list(axes), 1
    short: Axes = []
    while len(axes) > 1 and (points := steps_of([axes[-1]])) and inside * points <= steps:
        inside *= points
        short.insert(0, axes.pop())
    *outer, (axis, extent) = axes
    size = max(steps // inside, 1)

    def line(at: At) -> Any:
        return blocks(extent, size, lambda i: nest(short, {**at, axis: i}, body), flush)

    return nest(outer, at or {}, line)


class Totals:
    """The totals behind accumulators: ``slots`` vectors of ``lanes``, one for each accumulator."""

    def __init__(self, acc: Any, slots: int, lanes: int) -> None:
        self.acc, self.slots, self.lanes = acc, slots, lanes
        # The new total has memory of its own: TVM would take (total + x) - total for x.
        self.total, self.lost, self.next = (
            tirx.decl_buffer((slots * lanes,), acc.dtype, name)
            for name in ("total", "lost", "next")
        )
        self.zero = tirx.const(0.0, str(acc.dtype))
        self.inf = tirx.const(float("inf"), str(acc.dtype))

    def start(self) -> Any:
        """Return the allocation of empty totals."""

        def empty(buffer: Any) -> Any:
            return self._each(lambda at: tirx.BufferStore(buffer, self.zero, [at]))

        made = map(tirx.AllocBuffer, (self.total, self.lost, self.next))
        return b.seq(*made, empty(self.total), empty(self.lost))

    def flush(self) -> Any:
        """Return what adds the accumulators to the totals and empties them."""
        return b.seq(
            *self._add(self.slots, lambda at: tirx.BufferLoad(self.acc, [at])),
            self._each(lambda at: tirx.BufferStore(self.acc, self.zero, [at])),
        )

    def fold(self, half: int) -> Any:
        """Return what adds the upper lanes of a single total to the ``half`` lower ones."""
        return b.seq(
            *self._add(
                1,
                lambda at: (
                    tirx.BufferLoad(self.total, [at + half])
                    - tirx.BufferLoad(self.lost, [at + half])
                ),
                half,
            )
        )

    def _add(self, slots: int, value: Callable[[Expr], Expr], lanes: int = 0) -> list[Any]:
        def load(buffer: Any, at: Expr) -> Expr:
            return tirx.BufferLoad(buffer, [at])

        def put(at: Expr) -> Any:
            return tirx.BufferStore(self.acc, value(at) - load(self.lost, at), [at])

        def add(at: Expr) -> Any:
            return tirx.BufferStore(self.next, load(self.total, at) + load(self.acc, at), [at])

        def keep(at: Expr) -> Any:
            after = load(self.next, at)
            error = (after - load(self.total, at)) - load(self.acc, at)
            finite = tirx.And(after < self.inf, self.zero - self.inf < after)
            return tirx.BufferStore(self.lost, tirx.Select(finite, error, self.zero), [at])

        def take(at: Expr) -> Any:
            return tirx.BufferStore(self.total, load(self.next, at), [at])

        return [self._each(step, slots, lanes) for step in (put, add, keep, take)]

    def _each(self, body: Callable[[Expr], Any], slots: int = 0, lanes: int = 0) -> Any:
        lanes = lanes or self.lanes
        kind = ForKind.VECTORIZED if lanes > 1 else ForKind.SERIAL

        def slot(i: int) -> Any:
            return b.loop("l", lanes, lambda lane: body(lane + i * self.lanes), kind)

        return b.seq(*(slot(i) for i in range(slots or self.slots)))

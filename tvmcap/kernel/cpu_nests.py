"""Loop nests for one block on a CPU: vectors, accumulators in registers, exact tails.

A vector loop over ``extent`` elements runs ``ceil(extent / width)`` times, and its last turn starts
at ``extent - width``: some elements are then computed twice, to the same value, and no remainder is
left. Extents below the width take a scalar loop. Sums cannot overlap, so vectors along a reduced
axis leave a scalar remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.stmt import ForKind

from tvmcap.kernel import cpu_sums
from tvmcap.kernel.cpu_along import along
from tvmcap.kernel.cpu_blocks import Block, loads, substitute, uses
from tvmcap.kernel.cpu_sums import nest
from tvmcap.schedules import cpu_build as b

Expr = Any
Finish = Callable[[dict[Any, Expr], Expr], Any]
"""Given the axes' values and the finished value of an element, returns its store."""


@dataclass(frozen=True)
class Machine:
    """float32 lanes of a vector, vector registers, and threads."""

    lanes: int
    registers: int
    threads: int


def overlapped(extent: Expr, width: int, body: Callable[[Expr, bool], Any]) -> Any:
    """Return full-width turns ``body(start, True)``; where too short, ``body(at, False)``."""
    turns = b.ceildiv(extent, width)
    wide = b.loop("v", turns, lambda v: body(tirx.min(v * width, extent - width), True))
    if isinstance(extent, tirx.IntImm):
        if extent.value % width == 0:
            return b.loop("v", extent.value // width, lambda v: body(v * width, True))
        return wide if extent.value >= width else b.loop("j", extent, lambda j: body(j, False))
    return tirx.IfThenElse(
        extent >= b.const(width), wide, b.loop("j", extent, lambda j: body(j, False))
    )


def width_for(extent: Expr, block: Block, machine: Machine) -> int:
    """Return the widest vector that an extent can fill; 1 where the block has to stay scalar."""
    dtypes = {str(ld.source.dtype) for ld in loads(block.value)} | {str(block.buffer.dtype)}
    if "bool" in dtypes:
        return 1
    width = machine.lanes
    while isinstance(extent, tirx.IntImm) and width > max(extent.value, 1):
        width //= 2
    return width


def spatial(block: Block, fixed: dict[Any, Expr], store: Finish, machine: Machine) -> Any:
    """Return the loops of an elementwise block over the axes that are not ``fixed``."""
    free = [(a, e) for a, e in zip(block.axes, block.extents, strict=True) if a not in fixed]
    if not free:
        return store(fixed, substitute(block.value, fixed))
    *outer, (last, extent) = free
    width = width_for(extent, block, machine)

    def element(at: dict[Any, Expr]) -> Any:
        return store(at, substitute(block.value, at))

    def inner(at: dict[Any, Expr]) -> Any:
        # TVM has no form for one bfloat16 value in all lanes; LLVM makes vectors of this loop
        same = str(block.buffer.dtype) == "bfloat16" and not uses(block.value, last)
        kind = ForKind.SERIAL if same else ForKind.VECTORIZED

        def turn(start: Expr, wide: bool) -> Any:
            if not wide or width == 1:
                return element({**at, last: start})
            return b.loop("l", width, lambda lane: element({**at, last: start + lane}), kind)

        return overlapped(extent, width, turn)

    return nest(outer, fixed, inner)


def crossed_axis(block: Block) -> tuple[Any, Expr] | None:
    """Return the axis along which memory lies that the vectors of a block cross, and its extent.

    The vectors of a transpose load from as many lines of memory as they have elements; the next
    step along this axis loads from the same lines. None where no load is such.
    """
    *axes, last = block.axes
    for load in loads(block.value):
        for axis, extent in zip(axes, block.extents, strict=False):
            lies = len(load.indices) > 1 and load.indices[-1].same_as(axis)
            if lies and any(uses(index, last) for index in load.indices[:-1]):
                return axis, extent
    return None


def crossed(
    block: Block, fixed: dict[Any, Expr], strip: tuple[Any, Expr, Expr], store: Finish, m: Machine
) -> Any:
    """Return the loops of an elementwise block over its last axis and a strip of another.

    ``strip`` is that axis, where to start and how many steps to take: each vector takes all of them
    before the next vector, so that what it loads from stays near.
    """
    last, extent = block.axes[-1], block.extents[-1]
    width = width_for(extent, block, m)
    axis, first, count = strip

    def vector(start: Expr, step: Expr, lanes: int) -> Any:
        at = {**fixed, axis: first + step}

        def element(place: Expr) -> Any:
            where = {**at, last: place}
            return store(where, substitute(block.value, where))

        if lanes == 1:
            return element(start)
        return b.loop("l", lanes, lambda lane: element(start + lane), ForKind.VECTORIZED)

    def turn(start: Expr, wide: bool) -> Any:
        return b.loop("s", count, lambda step: vector(start, step, width if wide else 1))

    return overlapped(extent, width, turn)


def reduction(
    block: Block,
    fixed: dict[Any, Expr],
    store: Finish,
    machine: Machine,
    rows: list[dict[Any, Expr]] | None = None,
) -> Any:
    """Return the loops of a reduction over the axes that ``fixed`` does not already give.

    ``rows`` are the values of one further axis whose elements share registers; chosen here where
    not given.
    """
    free = [(a, e) for a, e in zip(block.axes, block.extents, strict=True) if a not in fixed]
    if along_reduced(block, [a for a, _ in free]):
        width = width_for(block.reduced_extents[-1], block, machine)
        return nest(free, fixed, lambda at: along(block, at, width, store))
    if not free:
        return _tile(block, fixed, [{}], None, 1, store)
    *outer, (last, extent) = free
    width = width_for(extent, block, machine)

    def column(at: dict[Any, Expr], group: list[dict[Any, Expr]]) -> Any:
        return overlapped(
            extent,
            width,
            lambda start, wide: _tile(
                block, {**at, last: start}, group, last, width if wide else 1, store
            ),
        )

    shared = register_axis(block, outer, last, machine) if rows is None else None
    if shared is None:
        outer = [x for x in outer if not rows or x[0] not in rows[0]]
        return nest(outer, fixed, lambda at: column(at, rows or [{}]))
    axis, size, count = shared
    return nest(
        [x for x in outer if x[0] is not axis],
        fixed,
        lambda at: overlapped(
            size, count, lambda i, _: column(at, [{axis: i + r} for r in range(count)])
        ),
    )


def along_reduced(block: Block, free: list[Any]) -> bool:
    """Whether memory is contiguous along the last reduced axis, not a free spatial one."""
    last = [ld.indices[-1] for ld in loads(block.value) if len(ld.indices)]
    if free and any(uses(index, free[-1]) for index in last):
        return False
    return any(isinstance(i, tirx.Var) and i.same_as(block.reduced[-1]) for i in last)


def register_axis(
    block: Block, axes: list[tuple[Any, Expr]], last: Any, machine: Machine
) -> tuple[Any, Expr, int] | None:
    """Return an axis some vector load is free of, its extent, and how many rows share it."""
    vectors = [ld for ld in loads(block.value) if any(uses(i, last) for i in ld.indices)]
    for axis, extent in reversed(axes):
        shared = any(not any(uses(i, axis) for i in ld.indices) for ld in vectors)
        if shared and isinstance(extent, tirx.IntImm) and extent.value >= 2:
            return axis, extent, min(extent.value, machine.registers // 4)
    return None


def _tile(
    block: Block,
    at: dict[Any, Expr],
    rows: list[dict[Any, Expr]],
    last: Any,
    lanes: int,
    store: Finish,
) -> Any:
    """Return the reduction of ``rows`` by ``lanes`` elements, in local accumulators."""
    acc = tirx.decl_buffer((len(rows) * lanes,), block.buffer.dtype, "acc")

    def each(row: int, body: Callable[[dict[Any, Expr], Expr], Any]) -> Any:
        where = {**at, **rows[row]}
        if lanes == 1:
            return body(where, b.const(row))
        start = where[last]
        return b.loop(
            "l",
            lanes,
            lambda lane: body({**where, last: start + lane}, lane + row * lanes),
            ForKind.VECTORIZED,
        )

    def step(inner: dict[Any, Expr], row: int) -> Any:
        return each(
            row,
            lambda where, slot: tirx.BufferStore(
                acc,
                block.combine(
                    tirx.BufferLoad(acc, [slot]), substitute(block.value, {**where, **inner})
                ),
                [slot],
            ),
        )

    every = range(len(rows))
    axes = list(zip(block.reduced, block.reduced_extents, strict=True))
    # rows that share loads make a matrix product, which is summed in longer chains everywhere
    steps = cpu_sums.steps_for(block) * (1 if len(rows) == 1 else 4)
    points = cpu_sums.steps_of(axes)
    totals: cpu_sums.Totals | None = None
    if cpu_sums.is_float_sum(block) and (points is None or points > 2 * steps):
        totals = cpu_sums.Totals(acc, len(rows), lanes)

    def point(inner: dict[Any, Expr]) -> Any:
        return b.seq(*(step(inner, r) for r in every))

    loops = (
        nest(axes, {}, point)
        if totals is None
        else cpu_sums.nest_in_blocks(axes, steps, point, totals.flush())
    )
    result = acc if totals is None else totals.total
    return b.seq(
        tirx.AllocBuffer(acc),
        totals and totals.start(),
        *(
            each(
                r, lambda where, slot: tirx.BufferStore(acc, substitute(block.init, where), [slot])
            )
            for r in every
        ),
        loops,
        *(
            each(r, lambda where, slot: store(where, tirx.BufferLoad(result, [slot])))
            for r in every
        ),
    )

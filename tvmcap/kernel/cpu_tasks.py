"""Loops over tasks, in parallel where there is enough to do, and what a task is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmcap.kernel import cpu_blocks as cb
from tvmcap.schedules import cpu_build as b

Expr = Any
Place = Callable[[Any, list[Any]], tuple[Any, list[Any]]]
"""Where an element of the old function is in the new one: buffer and index to both anew."""

Task = Callable[[list[Expr]], Any]
"""Given an index into the extents, returns the statement."""

#: Elements (costly ones count eight times) below which a loop stays on the calling thread.
SERIAL_BELOW = 1 << 15


def parallel(extents: list[Expr], work: Expr, body: Task) -> Any:
    """Return one loop over all of ``extents``, in parallel where there is enough to do.

    Nothing where an extent is 0.
    """

    def task(t: Expr) -> Any:
        index: list[Expr] = []
        for extent in reversed(extents[1:]):
            index.append(tirx.truncmod(t, extent))
            t = tirx.truncdiv(t, extent)
        return _bind_all([t, *reversed(index)] if extents else [], body)

    total = b.product(extents)
    if isinstance(total, tirx.IntImm) and total.value == 0:  # an extent that cannot divide
        return tirx.Evaluate(0)
    if not extents:
        return b.loop("t", total, task)
    return b.parallel("t", total, task, work, SERIAL_BELOW)


def _bind_all(values: list[Expr], body: Task, done: tuple[Expr, ...] = ()) -> Any:
    if not values:
        return body(list(done))
    return b.bound("x", values[0], lambda var: _bind_all(values[1:], body, (*done, var)))


def work_of(block: cb.Block) -> Expr:
    """Return the elements that a block computes, costly ones eightfold."""
    weight = 8 if cb.calls(block.value) & set(cb.COSTLY) else 1
    return b.product([*block.extents, *block.reduced_extents, b.const(weight)])


def flatten(index: list[Expr], extents: tuple[Expr, ...]) -> Expr:
    """Return the position of ``index`` in row-major memory."""
    at: Expr = b.const(0)
    for i, extent in zip(index, extents, strict=True):
        at = at * extent + i
    return at

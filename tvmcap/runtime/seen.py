"""Seen: the look of a call's tensors, to know the next such call at a glance."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.runtime.binding import Plan
from tvmcap.runtime.checker import check_overlap
from tvmcap.runtime.frameworks import MISALIGNED
from tvmcap.runtime.torch_tensors import guard

#: Looks of calls that a thread remembers.
_KEPT = 1024


class Seen:
    """A call with ``out=`` that was checked.

    Attributes
    ----------
    check: (inputs and output) -> whether they look the same, addresses apart.
    plan: what follows from the shapes.
    places: addresses of the last such call, known to be aligned and apart.
    """

    __slots__ = ("check", "places", "plan")

    def __init__(self, check: Callable[..., bool], plan: Plan, places: tuple[int, ...]) -> None:
        self.check = check
        self.plan = plan
        self.places = places


def remember(
    context: Any,
    args: Sequence[Any],
    out: Any,
    telling: int,
    plan: Plan,
    places: tuple[int, ...],
) -> None:
    """Let ``find`` know the next call like this one, by the shape of argument ``telling``."""
    if len(context.seen) >= _KEPT:
        context.seen.clear()
    check = guard(sys.modules["torch"], (*args, out))
    context.seen[args[telling].shape] = Seen(check, plan, places)


def find(context: Any, args: Sequence[Any], out: Any, telling: int) -> Seen | None:
    """Return the call that this one looks like, with this one's addresses.

    None where it has to be checked first. Raises InputError where the output overlaps an input.
    """
    try:
        seen: Seen | None = context.last
        if seen is None or not seen.check(*args, out):
            seen = context.seen.get(args[telling].shape)
            if seen is None or not seen.check(*args, out):
                return None
            context.last = seen
        places = (*[x.data_ptr() for x in args], out.data_ptr())
    # no tensor, or one without memory, or another number of arguments
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None
    if places != seen.places:
        if functools.reduce(operator.or_, places) & MISALIGNED:
            return None
        check_overlap(places, seen.plan)
        seen.places = places
    return seen

"""Seen: the look of a call's tensors, to know the next such call at a glance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.runtime.binding import Plan


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


def guard(torch: Any, tensors: Sequence[Any]) -> Callable[..., bool]:
    """Return (tensors) -> whether they are as these, apart from their addresses and contents.

    torch.compile's guards compare type, dtype, device, sizes, strides and what autograd and lazy
    negation add, all at once.
    """
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check

"""What tracing assumed of symbolic sizes, held against the bounds that the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmcap.base.errors import CaptureError
from tvmcap.capture.shapes import Free

_TRIED = 64
"""Sizes from the least on at which a condition is tried, beside the largest."""


def check(env: Any, free: Free, inputs: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError where the code does not hold for every size of a dynamic dimension."""
    names: dict[Any, str] = {}
    for (leaf, axis), name in free.where.items():
        size = inputs[leaf].shape[axis]
        if not isinstance(size, torch.SymInt) or not size.node.expr.is_symbol:
            raise CaptureError(
                f"dimension {name!r} came out as {size}: the code fixes it. Make it static, or "
                "remove what depends on its value"
            )
        names[size.node.expr] = name
    for guard in env.guards:
        condition = guard.expr.xreplace(dict(env.replacements))
        _check(condition, names, free)


def _check(condition: Any, names: dict[Any, str], free: Free) -> None:
    known = [symbol for symbol in condition.free_symbols if symbol in names]
    for symbol in known:
        dim = free.dims[names[symbol]]
        least = max(dim.min, 2)
        most = dim.max if dim.max is not None else 1 << 30
        others = {other: max(free.dims[names[other]].min, 2) for other in known if other != symbol}
        for size in [*range(least, min(least + _TRIED, most + 1)), most]:
            holds = condition.subs({**others, symbol: size})
            if holds == False:  # noqa: E712  (sympy's)
                shown = str(condition)
                for known_symbol, name in names.items():
                    shown = shown.replace(str(known_symbol), name)
                raise CaptureError(
                    f"the code does not hold for every size of the dynamic dimensions: {shown} is "
                    f"needed, and {dim.name} = {size} breaks it. Give {dim.name!r} bounds that "
                    "admit no such size (tvmcap.Dim), or make it static"
                )

"""Eager once more, rounded otherwise: how far its own error is luck.

The largest of a few errors is one sample of what rounding does. Where sums cancel, or where a
probability rounds to 1, eager may be a hundred times nearer to the exact result than the same code
with its features in another order. So where a comparison fails, eager runs again several times,
each operator with operands and results rounded at random to numbers next to them (Monte Carlo
arithmetic: Parker, "Monte Carlo Arithmetic", 1997), and the largest error of all runs counts as
eager's. What an operator computes exactly stays: there is nothing to round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tvmcap.verify.reference import HighPrecision

log = logging.getLogger("tvmcap")
RUNS = 8
_BITS = {2: torch.int16, 4: torch.int32}


def rounded(run: Callable[[], Any], runs: int) -> list[Any]:
    """Return what ``run`` gives ``runs`` times, each rounded otherwise.

    Fewer where it cannot run so, as for lack of memory: then less counts as luck.
    """
    found: list[Any] = []
    try:
        for seed in range(runs):
            with Rounding(seed):
                found.append(run())
    except Exception as e:
        log.info("eager cannot run again with other rounding: %s", e)
    return found


class Rounding(TorchDispatchMode):  # type: ignore[misc]
    """Rounds what operators read and compute at random, where their results are not exact.

    Half of the numbers move to one next to them; zeros, infinities and NaN stay. So do those of
    float64, as nothing here is more exact, and of 8 bits.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and again with other rounding where it is not exact."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _computes(func, (args, kwargs)):
            return result
        moved_args, moved_kwargs = tree_map(self._move, (args, kwargs))
        moved = tree_map(self._move, func(*moved_args, **moved_kwargs))
        wide = HighPrecision(torch.float64)
        wide_args, wide_kwargs = tree_map(wide.widen, (args, kwargs))
        with wide:
            exact = func(*wide_args, **wide_kwargs)
        return tree_map(_unless_exact, result, moved, exact)

    def _move(self, value: Any) -> Any:
        if not _is_float(value):
            return value
        generator = self._generators.get(value.device)
        if generator is None:
            generator = torch.Generator(value.device).manual_seed(self._seed)
            self._generators[value.device] = generator
        ways = torch.randint(0, 4, value.shape, generator=generator, device=value.device)
        bits = value.contiguous().view(_BITS[value.element_size()])
        steps = (ways == 0).to(bits.dtype) - (ways == 1).to(bits.dtype)
        moved = (bits + steps).view(value.dtype)
        stays = (value == 0) | ~torch.isfinite(value) | ~torch.isfinite(moved)
        return torch.where(stays, value, moved)


def _is_float(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.element_size() in _BITS


def _unless_exact(result: Any, moved: Any, exact: Any) -> Any:
    if not _is_float(result):
        return result
    out = torch.empty_like(result)  # with the strides of the operator's own result
    return out.copy_(torch.where(result == exact, result, moved))


def _computes(func: Any, values: Any) -> bool:
    """Whether an operator makes new numbers of the tensors that it takes, and draws none."""
    schema = func._schema
    if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return any(map(_is_float, tree_leaves(values)))

"""A comparison that fails is made again: with eager rounded otherwise, then on other inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tvmcap.base.numerics import Comparison
from tvmcap.verify.accuracy import Held
from tvmcap.verify.inputs import InputSet
from tvmcap.verify.result import Check
from tvmcap.verify.rounding import RUNS

_REDRAWS = 3
#: A failure by more than this is no luck: it is not drawn again.
_HOPELESS = 16.0


class NoReference(Exception):
    """PyTorch cannot run these inputs, or not in higher precision: nothing to compare with."""


def check_redrawn(
    once: Callable[[InputSet, int], tuple[Comparison, ...]], chosen: InputSet
) -> Check:
    """Compare with ``once`` on a set of inputs, and on others like it where a failure may be luck.

    ``once`` takes how often eager runs again, rounded otherwise, and raises NoReference where there
    is nothing to compare with.
    """
    start = time.monotonic()
    kind, sizes = chosen.kind, chosen.sizes
    draws = 1
    try:
        outputs = once(chosen, 0)
        if any(not o.ok and not o.misplaced for o in outputs):
            outputs = once(chosen, RUNS)
        while draws <= _REDRAWS and _may_be_luck(outputs):
            again = once(replace(chosen, seed=chosen.seed + 7919 * draws), RUNS)
            outputs = tuple(pool(a, b) for a, b in zip(outputs, again, strict=True))
            draws += 1
    except NoReference as e:
        return Check(kind, sizes, skipped=str(e), seconds=time.monotonic() - start)
    return Check(kind, sizes, outputs, draws=draws, seconds=time.monotonic() - start)


def _may_be_luck(outputs: Sequence[Comparison]) -> bool:
    failed = [o for o in outputs if not o.ok]
    lucky = all(o.misplaced == 0 and o.max_abs <= _HOPELESS * o.budget for o in failed)
    return bool(failed) and lucky


def pool(a: Comparison, b: Comparison) -> Comparison:
    """Combine two draws: the largest error of ours against the largest of eager's, or all noise."""
    if isinstance(a, Held) and isinstance(b, Held):
        return a.pooled(b)
    worse = a if a.max_abs - a.budget >= b.max_abs - b.budget else b
    budget = worse.budget + 2 * (max(a.eager_abs, b.eager_abs) - worse.eager_abs)
    ok = a.misplaced == b.misplaced == 0 and abs(worse.got - worse.want) <= budget
    return replace(
        worse,
        max_abs=max(a.max_abs, b.max_abs),
        max_rel=max(a.max_rel, b.max_rel),
        max_ulps=max(a.max_ulps, b.max_ulps),
        eager_abs=max(a.eager_abs, b.eager_abs),
        budget=budget,
        bad=0 if ok else max(a.bad, b.bad, 1),
        misplaced=max(a.misplaced, b.misplaced),
    )

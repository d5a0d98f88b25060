"""How good an order of candidates is: by pairs, and by the best of its first few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmcap.kernel.choice import trusted
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.ranking import CLOSE as CLOSE
from tvmcap.kernel.ranking import hits, pairs
from tvmcap.kernel.records import Record

Order = RankModel | Callable[[Group], Any]
"""A model, or a function that scores the candidates of a group; larger is better."""
NAMES = ("pairwise", "best_of_1", "best_of_5", "top8_regret")
EXHAUSTIVE = 100
"""Candidates of a group from which on the best of them counts as that of an exhaustive search."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of the candidates of a group, larger is better, and their times."""

    scores: Any
    times_us: Any


def measured(group: Group) -> tuple[Any, Any]:
    """Return which candidates ran, and their times."""
    ran = np.array([t is not None for t in group.times_us], dtype=bool)
    return ran, np.array([t for t in group.times_us if t is not None], dtype=np.float64)


def evaluated(order: Order, groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of an order of the candidates of groups, with ``zero_trial``.

    That is the best time over that of what a build would pick by this order, the geometric mean
    over the groups of at least ``EXHAUSTIVE`` candidates, ``zero_trial_shapes`` of them. A build
    picks among those that the template's estimate does not rule out.
    """
    scored, picks = [], []
    for group in groups:
        ran, times = measured(group)
        values = order.margins(group.rows) if isinstance(order, RankModel) else order(group)
        scores = np.asarray(values, np.float64)[ran]
        scored.append(Scored(scores, times))
        if len(times) >= EXHAUSTIVE:
            estimates = group.estimates_us
            kept = None if estimates is None else trusted(np.array(estimates)[ran])
            admitted = scores if kept is None else np.where(kept, scores, -np.inf)
            picks.append(times.min() / times[int(np.argmax(admitted))])
    result = metrics(scored)
    if picks:
        result["zero_trial"] = float(np.exp(np.mean(np.log(picks))))
        result["zero_trial_shapes"] = float(len(picks))
    return result


def metrics(found: Sequence[Scored]) -> dict[str, float]:
    """Return the mean over groups of what ``NAMES`` lists.

    pairwise: share of pairs in the right order. best_of_N: the best time over the best of the first
    N. top8_regret: by how much the best of the first eight is slower than the best.
    """
    right, ones, fives, eights = [], [], [], []
    for group in found:
        hit, counted = hits(group.scores, group.times_us)
        if counted:
            right.append((hit, counted))
        ranked = group.times_us[np.argsort(-group.scores, kind="stable")]
        best = ranked.min()
        ones.append(best / ranked[0])
        fives.append(best / ranked[:5].min())
        eights.append(ranked[:8].min() / best - 1)
    hit, counted = (sum(part) for part in zip(*right, strict=True))
    values = (hit / counted, np.mean(ones), np.mean(fives), np.mean(eights))
    return {name: float(value) for name, value in zip(NAMES, values, strict=True)}


def dropped(groups: Iterable[Any]) -> float:
    """Return the share of pairs that are too close to count."""
    far = [pairs(times)[2] for times in groups]
    total = sum(map(len, far))
    return 1.0 - sum(int(f.sum()) for f in far) / total if total else 0.0


def ceiling(twice: Iterable[Sequence[tuple[float, float]]]) -> tuple[float | None, int]:
    """Return what measuring again gets right of the pairs that count, and how many those are.

    ``twice`` holds, a group, the first and the last time of candidates measured twice.
    """
    right = total = 0
    for group in twice:
        if len(group) < 2:
            continue
        first, last = (np.array(t) for t in zip(*group, strict=True))
        i, j, far = pairs(first)
        same = (first[i] < first[j]) == (last[i] < last[j])
        right, total = right + int(same[far].sum()), total + int(far.sum())
    return (right / total if total else None), total


def measured_once(session: Any, count: int, seed: int) -> list[Record]:
    """Draw ``count`` records of a session's candidates that ran and were measured once."""
    history = session.stores.history(session.task.key, session.target, session.record_sizes)
    times = Counter(record.candidate for record in history)
    once = [r for r in history if r.median_us is not None and times[r.candidate] == 1]
    return [once[i] for i in np.random.default_rng(seed).permutation(len(once))[:count]]

"""Few kernels for any number of rows: which setting serves which range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvmcap.kernel.tasks import Task, evaluate

MAX_VARIANTS = 16
"""Kernels of one task that share the range of a dynamic dimension; more do not pay."""
_PRICE = 0.05
"""What one more kernel must save: the sum over rows of the share of time lost."""
_LEAST = {"measured": 0.2, "chosen": 0.1, "expected": 0.01}
"""What a setting that was not timed at a size is taken to lose there at least, where another was
measured to be the best, was chosen by a model, or is the estimate's first."""
_MEASURED = 4.0
"""How much more a loss counts at a size that was measured."""
_WORST = 3.0

Ranges = list[tuple[int | None, Any]]
"""Knobs by the largest number of rows that they serve, None for the last."""


def can_estimate(task: Task) -> bool:
    """Whether the template estimates the task's time at any number of rows."""
    template = task.template
    if template.estimate is None or template.recall is None or isinstance(task.problem.rows, int):
        return False
    return problem(task, 1) is not None


def problem(task: Task, rows: int) -> Any:
    """Return the task's problem at a number of rows as its template recalls it, or None."""
    return task.template.recall(task.workload, {"rows": rows})


def grid(task: Task) -> list[int]:
    """List numbers of rows up to the largest that is expected, half an octave apart."""
    most = task.record_sizes(task.sizes()[-1])["rows"]
    largest = {v.name: v.max for v in task.vars if v.max is not None}
    if len(largest) == len(task.vars):
        most = evaluate(task.problem.rows, task.vars, largest)
    steps = (round(2 ** (i / 2)) for i in itertools.count())
    return sorted({*itertools.takewhile(lambda n: n < most, steps), most})


def by_estimate(task: Task, rows: Sequence[int], target: Any) -> dict[int, Any]:
    """Return what the template expects to be fastest at each number of rows."""
    points = task.template.space(task.problem, target)
    return {n: points[int(np.argmin(_times(task, n, points, target)))] for n in rows}


def assign(
    task: Task,
    timed: Mapping[int, Mapping[Any, float]],
    chosen: Mapping[int, Any],
    target: Any,
) -> Ranges:
    """Divide the rows among at most ``MAX_VARIANTS`` settings, so that little is lost.

    ``timed`` has the microseconds of settings at sizes that were measured, ``chosen`` a model's
    setting for others; between them the template's estimate picks, of what was timed on both sides
    where they are close. A range ends where its setting is expected to be no faster than the next
    range's.
    """
    known = {n: dict(times) for n, times in timed.items()}
    for n in grid(task):
        if n not in timed and n not in chosen:
            known[n] = _between(task, n, timed, target)
    best = {n: min(times, key=times.__getitem__) for n, times in known.items() if times}
    missing = [n for n, times in known.items() if not times]
    wanted = by_estimate(task, missing, target) | dict(chosen) | best
    rows = sorted(wanted)
    points = list(dict.fromkeys(wanted[n] for n in rows))
    losses = np.empty((len(rows), len(points)))
    for i, n in enumerate(rows):
        kind = "measured" if n in timed else "chosen" if n in chosen else "expected"
        us = _times(task, n, points, target)
        losses[i] = _losses(wanted[n], points, us, known.get(n, {}), kind)
    parts = _divide(losses)
    ranges: Ranges = []
    for (_, last, at), (after, _, other) in itertools.pairwise(parts):
        pair = (points[at], points[other])
        ranges.append((_bound(task, rows[last], rows[after], pair, target), points[at]))
    return [*ranges, (None, points[parts[-1][2]])]


def _losses(own: Any, points: Sequence[Any], us: Any, known: Mapping[Any, float], kind: str) -> Any:
    """Return the share of time that each setting loses against ``own``, weighted.

    By the estimates ``us`` and no less than the kind's least, or by what is ``known`` of both.
    """
    factor = _MEASURED if kind == "measured" else 1.0
    at = points.index(own)
    losses = np.maximum(factor * np.minimum(us / us[at] - 1.0, _WORST), _LEAST[kind])
    for i, knobs in enumerate(points):
        if knobs in known and own in known:
            losses[i] = factor * (known[knobs] / known[own] - 1.0)
    losses[at] = 0.0
    return losses


def _between(
    task: Task, rows: int, timed: Mapping[int, Mapping[Any, float]], target: Any
) -> dict[Any, float]:
    """Return microseconds of what was timed at both neighbours, an octave apart at most.

    They are the estimate's, times what it was wrong by there, interpolated.
    """
    low = max((n for n in timed if n < rows), default=0)
    high = min((n for n in timed if n > rows), default=0)
    both = [knobs for knobs in timed.get(low, {}) if knobs in timed.get(high, {})]
    if not both or high > 2 * low:
        return {}
    at, a, b = (np.log(_times(task, n, both, target)) for n in (rows, low, high))
    wrong = (np.log([timed[n][knobs] for knobs in both]) - us for n, us in ((low, a), (high, b)))
    share = math.log(rows / low) / math.log(high / low)
    below, above = wrong
    found = np.exp(at + (1 - share) * below + share * above)
    return dict(zip(both, found.tolist(), strict=True))


def halfway(first: Mapping[int, Any]) -> Ranges:
    """Let each setting serve up to the geometric mean with the next size; equal neighbours merge.

    Where there are too many, the two neighbours whose sizes are closest become one, the larger
    size's.
    """
    merged: list[tuple[int, int, Any]] = []  # (smallest rows, largest rows, knobs)
    for rows, knobs in sorted(first.items()):
        if merged and merged[-1][2] == knobs:
            merged[-1] = (merged[-1][0], rows, knobs)
        else:
            merged.append((rows, rows, knobs))
    while len(merged) > MAX_VARIANTS:
        i = min(range(len(merged) - 1), key=lambda j: merged[j + 1][0] / max(merged[j][1], 1))
        merged[i : i + 2] = [(merged[i][0], merged[i + 1][1], merged[i + 1][2])]
    bounds = [int(math.sqrt(a[1] * b[0])) for a, b in itertools.pairwise(merged)]
    return [*zip(bounds, [m[2] for m in merged], strict=False), (None, merged[-1][2])]


def _times(task: Task, rows: int, points: Sequence[Any], target: Any) -> Any:
    found = task.template.estimate(problem(task, rows), points, target)
    return np.asarray(found, dtype=np.float64)


def _divide(losses: Any) -> list[tuple[int, int, int]]:
    """Cut the rows of a matrix into parts of one column each, with the least sum and few parts.

    Returns (first row, last row, column) of each part.
    """
    count = len(losses)
    sums = np.vstack([np.zeros(losses.shape[1]), np.cumsum(losses, axis=0)])
    best: list[list[tuple[float, int, int]]] = [[(0.0, 0, 0)] + [(math.inf, 0, 0)] * count]
    for _ in range(MAX_VARIANTS):  # best[k][j]: of the first j rows in k parts
        row = [(math.inf, 0, 0)]
        for j in range(1, count + 1):
            parts = sums[j] - sums[:j]
            columns = np.argmin(parts, axis=1)
            costs = [best[-1][i][0] + parts[i, columns[i]] for i in range(j)]
            i = int(np.argmin(costs))
            row.append((costs[i], i, int(columns[i])))
        best.append(row)
    number = min(range(1, len(best)), key=lambda k: best[k][count][0] + _PRICE * k)
    found, end = [], count
    for k in range(number, 0, -1):
        _, start, column = best[k][end]
        found.append((start, end - 1, column))
        end = start
    return found[::-1]


def _bound(task: Task, last: int, after: int, pair: tuple[Any, Any], target: Any) -> int:
    """Return how many rows the first of two settings serves at most, ``last`` at least."""
    step = 64 if after > 128 else 8
    between = [*range(-(-(last + 1) // step) * step, after, step)]
    times = np.array([np.log(_times(task, n, pair, target)) for n in between]).reshape(-1, 2)
    saved = np.concatenate([[0.0], np.cumsum(times[:, 1] - times[:, 0])])
    found: int = [last, *between][int(np.argmax(saved))]
    return found

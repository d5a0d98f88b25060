"""How tuning went, read off the records of a store: the best of each task against what it cost.

A record says when its measurement ended, to the second. The clock of a store runs through those
times, record by record, and stands still in pauses: what took longer than ``PAUSE_S`` without a
record was no tuning. The first record of a run starts it, so that what the run did before its first
measurement ended does not count.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmcap.kernel.records import Record, TaskKey, canonical

PAUSE_S = 120.0
"""Seconds without a record from which on a store was not being tuned: far more than a batch takes
to build and to measure."""


@dataclass(frozen=True)
class Step:
    """A measurement.

    Attributes
    ----------
    trial: its number among all of the store, from 1.
    seconds: of tuning until it ended; None where its record has no date.
    median_us: its time, None where it failed.
    best_us: the best of its task from then on, None before the first that ran.
    """

    trial: int
    seconds: float | None
    median_us: float | None
    best_us: float | None


@dataclass(frozen=True)
class History:
    """How tuning went for one task at one size.

    Attributes
    ----------
    workload, sizes: of its records.
    steps: the measurements in order.
    best: the record of the fastest candidate, of two timings of it the later; None if all failed.
    failures: of the measurements by cause.
    """

    key: TaskKey
    workload: Mapping[str, Any]
    sizes: Mapping[str, int]
    steps: tuple[Step, ...]
    best: Record | None
    failures: Mapping[str, int]

    @property
    def first_us(self) -> float | None:
        """Time of the first candidate that ran; tuning begins with the default."""
        return next((s.best_us for s in self.steps if s.best_us is not None), None)

    @property
    def best_us(self) -> float | None:
        """Time of the best candidate, None if all failed."""
        return None if self.best is None else self.best.median_us


def in_order(records: Sequence[Record]) -> list[Record]:
    """Return records as they were measured: by date, as they stand where dates are equal."""
    return sorted(records, key=lambda r: _moment(r) or -math.inf)


def clock(records: Sequence[Record]) -> list[float | None]:
    """Return the seconds of tuning until each record, which are in order; None without a date."""
    seconds: list[float | None] = []
    total, last = 0.0, None
    for now in map(_moment, records):
        if now is None:
            seconds.append(None)
            continue
        if last is not None and now - last <= PAUSE_S:
            total += now - last
        last = now
        seconds.append(total)
    return seconds


def _moment(record: Record) -> float | None:
    try:
        found = datetime.datetime.fromisoformat(record.date)
    except (ValueError, TypeError):
        return None
    utc = found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)
    return utc.timestamp()


def histories(records: Sequence[Record]) -> list[History]:
    """Return one history a task and size, in the order of their first measurements."""
    ordered = in_order(records)
    groups: dict[Any, list[tuple[int, float | None, Record]]] = {}
    for i, (record, seconds) in enumerate(zip(ordered, clock(ordered), strict=True), 1):
        groups.setdefault((record.key, canonical(record.sizes)), []).append((i, seconds, record))
    return [_history(found) for found in groups.values()]


def _history(found: Sequence[tuple[int, float | None, Record]]) -> History:
    latest: dict[str, Record] = {}
    failures = Counter[str]()
    steps, best = [], None
    for trial, seconds, record in found:
        latest[record.candidate] = record
        if record.error is not None:
            failures[record.error.get("cause", "unknown")] += 1
        ran = (r for r in latest.values() if r.error is None and r.median_us is not None)
        best = min(ran, key=lambda r: r.median_us or 0.0, default=None)
        best_us = None if best is None else best.median_us
        steps.append(Step(trial, seconds, record.median_us, best_us))
    first = found[0][2]
    return History(first.key, first.workload, first.sizes, tuple(steps), best, dict(failures))


def speed(found: Sequence[History]) -> list[tuple[int, float | None, float]]:
    """Return (trial, seconds, speed) after each measurement of any task.

    The speed is 1 where every task is as fast as in the end: the geometric mean over the tasks of
    their last best time over their best by then, before a task's first measurement its first time.
    """
    tasks = [h for h in found if h.best_us and h.first_us]
    steps = sorted(
        ((s, i) for i, h in enumerate(tasks) for s in h.steps), key=lambda pair: pair[0].trial
    )
    parts = [math.log((h.best_us or 1.0) / (h.first_us or 1.0)) for h in tasks]
    total, curve = sum(parts), []
    for step, i in steps:
        if step.best_us is not None:
            part = math.log((tasks[i].best_us or 1.0) / step.best_us)
            total, parts[i] = total + part - parts[i], part
        curve.append((step.trial, step.seconds, math.exp(total / len(tasks))))
    return curve

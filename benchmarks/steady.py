"""The core to time host code on: the steadiest right now, by a loop that calls nothing measured.

The guests of a machine share its physical cores: one virtual core can be twice as slow as its
neighbour, or far less steady, and some seconds later it is another one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]

#: What the row of ``add_up`` is called beside those that are measured.
REFERENCE = "adding up numbers in Python"

#: What Python adds up in about the time of a replay: how far calls spread that launch nothing.
_NUMBERS = range(200)
_WARM = 1_000


def add_up(i: int) -> object:
    """Do the work of the reference, whatever the number of the call."""
    return sum(_NUMBERS)


def spread(nanoseconds: Sequence[int]) -> Row:
    """Return percentiles in microseconds, and every sample as {nanoseconds: how often}."""
    ordered = sorted(nanoseconds)
    at = {q: ordered[round(q * (len(ordered) - 1))] / 1e3 for q in (0.1, 0.5, 0.9, 0.99)}
    return {
        "median": at[0.5],
        "p10": at[0.1],
        "p90": at[0.9],
        "p99": at[0.99],
        "p99_over_p50": round(at[0.99] / at[0.5], 3),
        "samples_ns": {str(ns): n for ns, n in sorted(Counter(nanoseconds).items())},
    }


def steadiest(cpus: Iterable[int], count: int = 20_000) -> int:
    """Return the CPU where the 99th percentile of ``count`` calls of the reference is smallest.

    The calling thread visits them in turn and is put back. OSError where it may not run on one.
    """
    with _affinity_kept():
        slowest = {cpu: _p99_on(cpu, count) for cpu in cpus}
    return min(slowest, key=slowest.__getitem__)


@contextlib.contextmanager
def on_steadiest_core(count: int = 20_000) -> Iterator[int | None]:
    """Keep the calling thread on the steadiest CPU of those that it may use; yields that CPU.

    Yields None, and changes nothing, on a platform that cannot pin threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    with _affinity_kept() as allowed:
        cpu = steadiest(sorted(allowed), count)
        os.sched_setaffinity(0, {cpu})
        yield cpu


def steadiest_set(sets: Sequence[list[Row]], reference: str) -> list[Row]:
    """Return the rows of the set whose ``reference`` row has the smallest ``p99_over_p50``.

    Each set has the same figures in the same order. The rows get the ratios of all sets, in order,
    as ``p99_over_p50_of_sets``.
    """
    at = [row["figure"] for row in sets[0]].index(reference)
    shown = min(sets, key=lambda rows: float(rows[at]["p99_over_p50"]))
    ratios = [[row["p99_over_p50"] for row in of_row] for of_row in zip(*sets, strict=True)]
    return [
        {**row, "p99_over_p50_of_sets": all_of_row}
        for row, all_of_row in zip(shown, ratios, strict=True)
    ]


def _p99_on(cpu: int, count: int) -> float:
    os.sched_setaffinity(0, {cpu})
    for i in range(_WARM):
        add_up(i)
    clock, samples = time.perf_counter_ns, []
    for i in range(count):
        start = clock()
        add_up(i)
        samples.append(clock() - start)
    return float(spread(samples)["p99"])


@contextlib.contextmanager
def _affinity_kept() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    try:
        yield before
    finally:
        os.sched_setaffinity(0, before)

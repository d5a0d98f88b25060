"""The core to time host code on: the steadiest right now, by a loop that calls nothing measured.

The guests of a machine share its physical cores: one virtual core can be twice as slow as its
neighbour, or far less steady, and some seconds later it is another one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]

Call = Callable[[int], object]
"""(number of the call) -> anything."""

#: Calls of one kind in a row: far fewer than a device's queue holds.
GROUP = 200
_SHORT = 200  # numbers to add up, which takes about a microsecond
_WARM = 300


def adding_up(count: int) -> Call:
    """Return the reference: add up ``count`` numbers in Python, which launches nothing."""
    numbers = [1] * count
    return lambda i: sum(numbers)


def as_long_as(call: Call) -> Call:
    """Return a reference that takes about the time of ``call``."""
    per_number = statistics.median(timed(adding_up(_SHORT), _WARM)) / _SHORT
    return adding_up(max(1, round(statistics.median(timed(call, _WARM)) / per_number)))


def timed(call: Call, count: int) -> list[int]:
    """Return what each of ``count`` calls took, in nanoseconds, the clock's own time included."""
    clock, samples = time.perf_counter_ns, []
    for i in range(count):
        start = clock()
        call(i)
        samples.append(clock() - start)
    return samples


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


def steadiest(cpus: Iterable[int], count: int = 3_000) -> int:
    """Return the CPU where the 99th percentile of ``count`` calls of the reference is smallest.

    The calling thread visits them in turn and is put back. OSError where it may not run on one.
    """
    with _affinity_kept():
        slowest = {cpu: _p99_on(cpu, count) for cpu in cpus}
    return min(slowest, key=slowest.__getitem__)


@contextlib.contextmanager
def on_steadiest_core(count: int = 3_000) -> Iterator[int | None]:
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


def window(call: Call, reference: Call, count: int, ready: Callable[[], object]) -> Row:
    """Time ``count`` calls and as many of the reference, in turns of a group, on one core.

    ``ready`` is called before each group. Returns ``spread`` of the calls, that of the reference
    as ``reference``, and ``pinned``: whether the thread stayed on the core.
    """
    taken: tuple[list[int], list[int]] = ([], [])
    with on_steadiest_core() as core:
        for group in range(count // GROUP):
            turns = list(zip((call, reference), taken, strict=True))
            for one, samples in turns if group % 2 == 0 else reversed(turns):
                ready()
                for i in range(10):  # code and data of this call back into the caches
                    one(i)
                samples += timed(one, GROUP)
        pinned = core is not None and os.sched_getaffinity(0) == {core}
    return {**spread(taken[0]), "reference": spread(taken[1]), "pinned": pinned}


def steadiest_window(windows: Sequence[Row]) -> Row:
    """Return the window whose reference has the smallest 99th percentile, whatever the calls took.

    It gets the ratios of all windows, in order, as ``p99_over_p50_of_windows``.
    """
    shown = min(windows, key=lambda row: float(row["reference"]["p99"]))
    return {**shown, "p99_over_p50_of_windows": [row["p99_over_p50"] for row in windows]}


def _p99_on(cpu: int, count: int) -> float:
    os.sched_setaffinity(0, {cpu})
    reference = adding_up(_SHORT)
    timed(reference, _WARM)
    return float(spread(timed(reference, count))["p99"])


@contextlib.contextmanager
def _affinity_kept() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    try:
        yield before
    finally:
        os.sched_setaffinity(0, before)

"""Timing host code where other guests share the cores: on a steady core, beside plain Python.

A virtual core can be twice as slow as its neighbour, or far less steady, and some milliseconds
later it is another one. What is measured takes turns with a reference, plain Python that takes as
long: how far that spreads is the machine's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

Call = Callable[[int], object]
"""(number of the call) -> anything."""

#: Calls of one kind in a row, far fewer than a device's queue holds.
GROUP = 50
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
    clock, samples = time.perf_counter_ns, [0] * count  # a list that grows disturbs the next call
    for i in range(count):
        start = clock()
        call(i)
        samples[i] = clock() - start
    return samples


def percentiles(nanoseconds: Sequence[int]) -> Row:
    """Return percentiles in microseconds."""
    ordered = sorted(nanoseconds)
    at = {q: ordered[round(q * (len(ordered) - 1))] / 1e3 for q in (0.1, 0.5, 0.9, 0.99)}
    return {
        "median": at[0.5],
        "p10": at[0.1],
        "p90": at[0.9],
        "p99": at[0.99],
        "p99_over_p50": round(at[0.99] / at[0.5], 3),
    }


def spread(nanoseconds: Sequence[int]) -> Row:
    """Return ``percentiles``, and the samples to three digits as {nanoseconds: how often}."""
    counted = Counter(int(float(f"{ns:.3g}")) for ns in nanoseconds)
    samples = {str(ns): n for ns, n in sorted(counted.items())}
    return {**percentiles(nanoseconds), "samples_ns": samples}


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


@dataclass(frozen=True)
class Window:
    """What calls took on one core and the reference in turns with them, in nanoseconds.

    ``pinned`` tells whether the thread stayed on the core.
    """

    calls: list[int]
    references: list[int]
    pinned: bool


def window(call: Call, reference: Call, count: int, ready: Callable[[], object]) -> Window:
    """Time ``count`` calls in groups on the steadiest core; ``ready`` is called before each."""
    calls: list[int] = []
    references: list[int] = []
    with on_steadiest_core() as core:
        for _ in range(count // GROUP):
            references += _group(reference)
            ready()
            calls += _group(call)
        pinned = core is not None and os.sched_getaffinity(0) == {core}
    return Window(calls, references, pinned)


def row(windows: Sequence[Window]) -> Row:
    """Return the spread of the calls of all windows, and how far each window spreads.

    ``p99_over_p50_of_windows`` and ``reference_of_windows`` list the 99th percentile over the
    median, of the calls and of the reference; ``reference`` is the latter's spread in all windows.
    """
    return {
        **spread([ns for w in windows for ns in w.calls]),
        "reference": percentiles([ns for w in windows for ns in w.references]),
        "p99_over_p50_of_windows": [percentiles(w.calls)["p99_over_p50"] for w in windows],
        "reference_of_windows": [percentiles(w.references)["p99_over_p50"] for w in windows],
        "pinned": all(w.pinned for w in windows),
    }


def _group(call: Call) -> list[int]:
    for i in range(10):  # code and data of this call back into the caches
        call(i)
    return timed(call, GROUP)


def _p99_on(cpu: int, count: int) -> float:
    os.sched_setaffinity(0, {cpu})
    reference = adding_up(_SHORT)
    timed(reference, _WARM)
    return float(percentiles(timed(reference, count))["p99"])


@contextlib.contextmanager
def _affinity_kept() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    try:
        yield before
    finally:
        os.sched_setaffinity(0, before)

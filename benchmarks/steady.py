"""Timing host code where other guests share the cores: on a steady core, at quiet moments.

A virtual core can be twice as slow as its neighbour, or far less steady, and some milliseconds
later it is another one. What is measured stands between calls of a reference, plain Python that
takes as long: they tell how quiet it was, and nothing of what is measured decides that.
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

#: Calls of one kind in a row: short enough for what disturbs them to be seen beside them, and far
#: fewer than a device's queue holds.
GROUP = 50
#: At a quiet moment all calls of a group of the reference but one take less than this, in its best
#: medians.
_QUIET = 1.2
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


@dataclass(frozen=True)
class Window:
    """Groups of calls on one core, in nanoseconds, the i-th between references i and i + 1.

    ``pinned`` tells whether the thread stayed on the core.
    """

    calls: list[list[int]]
    references: list[list[int]]
    pinned: bool


def window(call: Call, reference: Call, count: int, ready: Callable[[], object]) -> Window:
    """Time ``count`` calls in groups on the steadiest core; ``ready`` is called before each."""
    calls, references = [], []
    with on_steadiest_core() as core:
        references.append(_group(reference))
        for _ in range(count // GROUP):
            ready()
            calls.append(_group(call))
            references.append(_group(reference))
        pinned = core is not None and os.sched_getaffinity(0) == {core}
    return Window(calls, references, pinned)


def quiet_calls(windows: Sequence[Window]) -> list[int]:
    """Return what calls took in the groups between two references that nothing disturbed."""
    best = min(statistics.median(group) for w in windows for group in w.references)

    def is_quiet(group: list[int]) -> bool:
        return sum(ns > _QUIET * best for ns in group) <= 1

    return [
        nanoseconds
        for w in windows
        for group, before, after in zip(w.calls, w.references, w.references[1:], strict=False)
        if is_quiet(before) and is_quiet(after)
        for nanoseconds in group
    ]


def row(windows: Sequence[Window]) -> Row:
    """Return the spread of the quiet calls, of all calls where none was quiet.

    ``quiet`` is their share, ``all`` and ``reference`` are the spreads of all calls and of the
    reference; ``p99_over_p50_of_windows`` and ``reference_of_windows`` list those of each window.
    """
    quiet = quiet_calls(windows)
    calls = [[ns for group in w.calls for ns in group] for w in windows]
    references = [[ns for group in w.references for ns in group] for w in windows]
    everything = [ns for of_window in calls for ns in of_window]
    return {
        **spread(quiet or everything),
        "quiet": round(len(quiet) / len(everything), 3),
        "all": spread(everything),
        "reference": spread([ns for of_window in references for ns in of_window]),
        "p99_over_p50_of_windows": [spread(ns)["p99_over_p50"] for ns in calls],
        "reference_of_windows": [spread(ns)["p99_over_p50"] for ns in references],
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
    return float(spread(timed(reference, count))["p99"])


@contextlib.contextmanager
def _affinity_kept() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    try:
        yield before
    finally:
        os.sched_setaffinity(0, before)

"""Which settings serve which numbers of rows."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernel.model_cases import record
from tests.schedules.products import TARGET, product
from tvmcap.kernel import apply, spaces, tasks, variants
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import Sizes

#: A setting is the tile's height; its tiles run in waves of four.
HEIGHTS = (8, 16, 32, 64, 128, 256)


def estimate(rows: int, heights: Any, target: Any) -> list[float]:
    return [(1 + h / 8) * math.ceil(rows / h / 4) for h in heights]


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task whose times are ``estimate``, of up to 2048 rows."""
    monkeypatch.setattr(variants, "grid", lambda task: GRID)
    template = SimpleNamespace(
        estimate=estimate, recall=lambda _, sizes: sizes["rows"], space=lambda *_: HEIGHTS
    )
    return SimpleNamespace(template=template, workload={}, problem=None)


def serving(ranges: variants.Ranges, rows: int) -> Any:
    return next(knobs for bound, knobs in ranges if bound is None or rows <= bound)


def timed(tuned: dict[int, int]) -> dict[int, dict[int, float]]:
    """Only the best setting of a size was timed."""
    return {n: {height: 1.0} for n, height in tuned.items()}


def worst(ranges: variants.Ranges, rows: range) -> float:
    best = [min(estimate(n, HEIGHTS, None)) for n in rows]
    used = [estimate(n, [serving(ranges, n)], None)[0] for n in rows]
    return max(u / b for u, b in zip(used, best, strict=True))


GRID = [round(2 ** (i / 2)) for i in range(23)]


def test_sizes_between_those_that_were_tuned_are_served_well(task: Any) -> None:
    tuned = {16: 8, 1024: 256}
    ranges = variants.assign(task, timed(tuned), {}, TARGET)
    assert serving(ranges, 16) == 8 and serving(ranges, 1024) == 256
    assert worst(ranges, range(1, 2049)) < 1.35
    assert worst(variants.halfway(tuned), range(1, 2049)) > 2
    bounds = [bound for bound, _ in ranges]
    assert bounds[:-1] == sorted(set(bounds[:-1])) and bounds[-1] is None


def test_what_was_measured_or_chosen_keeps_its_setting(task: Any) -> None:
    """The estimate prefers others there."""
    tuned, chosen = {256: 8, 1024: 32}, {64: 256}
    ranges = variants.assign(task, timed(tuned), chosen, TARGET)
    assert {n: serving(ranges, n) for n in tuned} == tuned
    assert {n: serving(ranges, n) for n in chosen} == chosen
    first = variants.by_estimate(task, GRID, TARGET)
    assert first[256] != 8 and first[64] != 256 and serving(ranges, 512) == first[512]


def test_there_are_never_too_many(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {4**i: HEIGHTS[i % 2] for i in range(6)}
    assert len(variants.assign(task, timed(tuned), {}, TARGET)) > 3
    monkeypatch.setattr(variants, "MAX_VARIANTS", 3)
    assert len(variants.assign(task, timed(tuned), {}, TARGET)) == 3


def test_settings_that_lose_little_share_a_kernel(task: Any, monkeypatch: Any) -> None:
    few = len(variants.assign(task, {}, {}, TARGET))
    changes = [
        a != b for a, b in itertools.pairwise(variants.by_estimate(task, GRID, TARGET).values())
    ]
    assert few < sum(changes) + 1
    monkeypatch.setattr(variants, "_PRICE", 1.0)
    assert len(variants.assign(task, {}, {}, TARGET)) < few
    everywhere = dict.fromkeys(GRID, HEIGHTS[0])
    assert variants.assign(task, timed(everywhere), {}, TARGET) == [(None, HEIGHTS[0])]


def test_what_was_timed_at_a_size_counts_there(task: Any, monkeypatch: Any) -> None:
    """The estimate expects far more of each setting at its own size than was measured."""
    monkeypatch.setattr(variants, "MAX_VARIANTS", 2)
    monkeypatch.setattr(variants, "grid", lambda task: [])
    times = {
        8: {8: 1.0, 64: 1.3, 256: 5.0},
        256: {64: 1.0, 256: 1.01, 8: 3.0},
        2048: {256: 1.0, 64: 1.2, 8: 9.0},
    }
    found = variants.assign(task, times, {}, TARGET)
    assert [serving(found, n) for n in times] == [8, 256, 256]
    times[256] |= {8: 1.01, 256: 3.0}
    found = variants.assign(task, times, {}, TARGET)
    assert [serving(found, n) for n in times] == [8, 8, 256]


def test_between_close_sizes_what_was_timed_at_both_serves(task: Any, monkeypatch: Any) -> None:
    close = {64: {8: 1.0, 16: 1.1, 32: 0.9}, 128: {8: 1.2, 16: 1.1, 256: 0.5}}
    times = variants._between(task, 90, close, TARGET)
    assert set(times) == {8, 16}
    expected = dict(zip(times, estimate(90, list(times), TARGET), strict=True))
    wrong = {h: [close[n][h] / estimate(n, [h], TARGET)[0] for n in (64, 128)] for h in times}
    assert all(min(wrong[h]) <= times[h] / expected[h] <= max(wrong[h]) for h in times)
    assert variants._between(task, 90, {44: close[64], 128: close[128]}, TARGET) == {}
    assert variants._between(task, 2000, close, TARGET) == {}
    monkeypatch.setattr(variants, "_PRICE", 0.0)
    assert 91 in GRID
    times = variants._between(task, 91, close, TARGET)
    found = variants.assign(task, close, {}, TARGET)
    assert serving(found, 91) == min(times, key=times.__getitem__)


@pytest.mark.parametrize("losses", [[[0.0, 9.0], [0.0, 9.0], [9.0, 0.0]], [[0.0]]])
def test_parts_cover_all_rows_once(losses: list[list[float]]) -> None:
    parts = variants._divide(np.array(losses))
    assert parts[0][0] == 0 and parts[-1][1] == len(losses) - 1
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(parts))
    assert all(losses[i][column] == 0 for a, b, column in parts for i in range(a, b + 1))


def test_the_hopper_template_serves_what_was_never_tuned() -> None:
    """500 rows are far from 64 and from 2048, and neither's setting is near the best there."""
    task = tasks.make_task(product(n=4096, k=4096), TARGET, spaces.find, {"B": (1, 8192)})
    assert variants.can_estimate(task)
    tuned = {
        64: hopper.Knobs(64, 64, 128, 6, "tiles", split=2),
        2048: hopper.Knobs(128, 256, 64, 4, "rows"),
    }
    records = [record(Sizes(n, 4096, 4096), knobs, 9.0) for n, knobs in tuned.items()]
    ranges = apply._choose(task, records, TARGET, None)
    assert {n: serving(ranges, n) for n in tuned} == tuned
    assert 2 < len(ranges) <= variants.MAX_VARIANTS
    points = hopper.space(task.problem, TARGET)
    for rows in (3, 77, 500, 3000, 8192):
        us = hopper.estimate(variants.problem(task, rows), [*points, serving(ranges, rows)], TARGET)
        assert us[-1] <= 1.15 * min(us)


def test_what_has_no_estimate_goes_halfway() -> None:
    task = tasks.make_task(product(n=4096, k=4096, rows=64), TARGET, spaces.find)
    assert not variants.can_estimate(task)
    assert variants.halfway({1: "a", 100: "a", 400: "b"}) == [(200, "a"), (None, "b")]

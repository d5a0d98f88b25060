"""The estimate of a Hopper GEMM's time, by which defaults and short lists are drawn; features."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.schedules.hopper_cases import SWAPPED
from tests.schedules.products import TARGET, product
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_gemm import Knobs

BIG = Knobs(128, 256, 64, 4, "rows")
SKINNY = Knobs(64, 16, 128, 8, **SWAPPED)
TF32 = {"dtype": "float32", "out": "float32", "layout": "nk", "tf32": True}


def problem(rows: Any = 4096, n: Any = 4096, k: Any = 4096, **shape: Any) -> Any:
    return hopper.match(product(rows=rows, n=n, k=k, **shape), TARGET)


def times(gemm: Any, *knobs: Knobs) -> list[float]:
    return [float(us) for us in hopper.estimate(gemm, knobs, TARGET)]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"rows": 1},
        {"rows": "B", "n": 8, "k": 8},
        {"n": "8*T", "k": "8*T"},
        {"rows": "8*T", "a_layout": "km", "batch": ("H", 2)},
        {"rows": 5, "n": 257, "layout": "nk", "out": "float32"},
        TF32,
    ],
    ids=str,
)
def test_is_finite_and_positive_for_every_setting(shape) -> None:
    gemm = problem(**shape)
    points = hopper.space(gemm, TARGET)
    us = times(gemm, *points)
    assert len(us) == len(points) and all(math.isfinite(t) and t > 0 for t in us)
    default = times(gemm, hopper.default(gemm, TARGET))[0]
    if isinstance(gemm.rows, int):
        assert default <= 1.05 * min(us)
    assert times(gemm) == []


@pytest.mark.parametrize(
    ("rows", "n", "k", "good", "bad"),
    [
        (8192, 4096, 4096, BIG, Knobs(64, 64, 64, 2, "tiles")),
        (8192, 4096, 4096, BIG, replace(BIG, stages=2)),
        (8192, 4096, 4096, BIG, Knobs(128, 64, 64, 8, "rows", split=4, tma_store=False)),
        (8192, 4096, 4096, BIG, SKINNY),
        (16, 4096, 4096, SKINNY, BIG),
        (16, 4096, 4096, SKINNY, replace(SKINNY, bn=8)),  # w would be read twice
        (16, 8192, 8192, SKINNY, replace(SKINNY, bk=64, stages=2)),  # too little under way
        (128, 1024, 16384, Knobs(128, 128, split=4, tma_store=False), Knobs(128, 128)),
        (300, 4096, 4096, Knobs(64, 64, 64, 8, "tiles"), Knobs(256, 128, 64, 3, "rows")),
    ],
    ids=str,
)
def test_puts_bad_settings_behind(rows, n, k, good, bad) -> None:
    first, second = times(problem(rows, n, k, layout="nk"), good, bad)
    assert first < second


@pytest.mark.parametrize("knobs", [BIG, Knobs(), SKINNY], ids=["rows", "tiles", "swapped"])
def test_more_work_takes_no_less(knobs) -> None:
    sizes = (64, 256, 1024, 4096)
    for grown in ("rows", "n", "k"):
        us = [times(problem(**{grown: size}), knobs)[0] for size in sizes]
        assert us == sorted(us) and us[0] < us[-1]
    batched = [times(problem(64, 512, 512, batch=(b,)), Knobs())[0] for b in (2, 512)]
    assert batched[0] < batched[1]


def test_is_no_faster_than_memory() -> None:
    gemm = problem(1, 16384, 16384)
    us = times(gemm, *hopper.space(gemm, TARGET))
    assert min(us) > 0.5 * gemm.bytes({}) / 4.8e6  # an H200 reads 4.8 TB/s


def test_deeper_rings_are_no_slower() -> None:
    gemm = problem(layout="nk")
    for knobs in (Knobs(128, 128, 64, 2), Knobs(128, 192, 64, 2, "rows")):
        us = times(gemm, *(replace(knobs, stages=stages) for stages in (2, 3, 4, 5)))
        assert us == sorted(us, reverse=True)


@pytest.mark.parametrize("shape", [{"rows": "B"}, {"rows": "B", "n": "8*T", "k": "8*T"}, TF32])
def test_features_tell_settings_apart(shape) -> None:
    gemm = problem(**shape)
    points = hopper.space(gemm, TARGET)
    table = hopper.features(gemm, points, TARGET)
    assert table.shape == (len(points), len(hopper.FEATURES)) and table.dtype == np.float32
    assert np.isfinite(table).all() and len(np.unique(table, axis=0)) == len(points)
    assert hopper.features(gemm, [], TARGET).shape == (0, len(hopper.FEATURES))
    for name in ("bm", "bn", "stages", "split", "tma_store"):
        column = table[:, hopper.FEATURES.index(name)]
        assert [float(getattr(k, name)) for k in points] == column.tolist()


def test_features_tell_problems_apart() -> None:
    rows = [
        hopper.features(problem(rows, n, k), [Knobs()], TARGET)[0]
        for rows, n, k in itertools.product((64, 4096), repeat=3)
    ]
    assert len(np.unique(rows, axis=0)) == 8

"""Predictions for what a model was not taught."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.kernel.model_cases import SHAPES, records
from tests.schedules.products import TARGET
from tvmcap.kernel import held_out
from tvmcap.kernel.dataset import of_template
from tvmcap.kernel.ranking import hits, pairs
from tvmcap.schedules import hopper_gemm as hopper


def test_what_can_be_learnt_is_predicted_for_workloads_never_seen() -> None:
    made = records()
    failed = dataclasses.replace(made[0], median_us=None, error={"cause": "hang", "message": ""})
    (found,) = held_out.judge([failed, *made[1:]], TARGET)
    assert (found.template, found.measurements, found.held_out) == ("hopper_gemm", 200, "workloads")
    assert sum(len(p.measured_us) for p in found.predictions) == 199
    assert found.pairwise > 0.9 and 0.9 < found.best_of_1 <= 1.0
    for p in found.predictions:
        spread = np.log(p.predicted_us / p.measured_us)
        assert abs(spread.mean()) < 1e-6 and spread.std() < np.log(p.measured_us).std()
    names = [name for name, _ in found.importance]
    assert "group" in names[:3] and set(names) <= set(hopper.FEATURES)
    assert sum(share for _, share in found.importance) == pytest.approx(1.0)


def test_no_prediction_knows_what_it_predicts() -> None:
    """Times that are chance cannot be ranked better than by chance."""
    rng = np.random.default_rng()
    noise = [dataclasses.replace(r, median_us=float(rng.uniform(1, 2))) for r in records()]
    (found,) = held_out.judge(noise, TARGET)
    assert 0.35 < found.pairwise < 0.65


def test_one_workload_is_split_by_candidates() -> None:
    (found,) = held_out.judge(records(SHAPES[:1], (512, 2048), 30), TARGET)
    assert found.held_out == "candidates" and found.pairwise > 0.6
    groups = of_template(records(SHAPES[:1]), hopper.TEMPLATE, TARGET)
    asked = [(g.name, int(i)) for _, part in held_out._by_candidate(groups, 0) for g, r in part
             for i in r]  # fmt: skip
    assert sorted(asked) == [(g.name, i) for g in groups for i in range(len(g.rows))]
    for taught, part in held_out._by_candidate(groups, 0):
        known = {tuple(row) for g in taught for row in g.rows.tolist()}
        assert not any(tuple(row) in known for g, r in part for row in g.rows[r].tolist())


def test_too_few_or_stale_records_teach_nothing() -> None:
    assert held_out.judge(records(SHAPES[:1], (512,)), TARGET) == []
    assert (
        held_out.judge([dataclasses.replace(r, template_hash="x") for r in records()], TARGET) == []
    )


def test_hits_count_pairs_that_are_apart_and_ties_half() -> None:
    times = np.array([1.0, 1.01, 2.0, 3.0])
    assert pairs(times)[2].tolist() == [False, True, True, True, True, True]
    assert hits(-times, times) == (5.0, 5) and hits(times, times) == (0.0, 5)
    assert hits(np.zeros(4), times) == (2.5, 5)
    assert hits(np.array([3.0, 3.0, 1.0, 2.0]), times) == (4.0, 5)

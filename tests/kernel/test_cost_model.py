"""The cost model ranks, learns from records, and gives the same ranks for the same seed."""

from __future__ import annotations

from pathlib import Path

import fake_template as fake
import numpy as np

from tvmcap.kernel import features
from tvmcap.kernel.cost_model import RankModel


def time_of(rows: np.ndarray, scale: float) -> np.ndarray:
    return scale * (1 + (rows[:, 0] - 3) ** 2 + 0.5 * np.abs(rows[:, 1]))


def learnt(seed: int = 0, groups: int = 3) -> RankModel:
    model, rng = RankModel(seed), np.random.default_rng(7)
    for g in range(groups):
        rows = rng.uniform(0, 8, (30, 4))
        times: list[float | None] = list(time_of(rows, 10.0 ** (2 * g)))
        model.add(f"group{g}", rows, times)
    model.fit()
    return model


def test_ranks_unseen_candidates_of_unseen_groups() -> None:
    rows = np.random.default_rng(11).uniform(0, 8, (60, 4))
    scores, times = learnt().scores(rows), time_of(rows, 1e-3)
    i, j = np.triu_indices(len(rows), 1)
    right = (scores[i] > scores[j]) == (times[i] < times[j])
    assert right.mean() > 0.8
    assert np.all((scores > 0) & (scores <= 1))


def test_deterministic_for_a_seed() -> None:
    rows = np.random.default_rng(1).uniform(0, 8, (20, 4))
    assert np.array_equal(learnt(5).scores(rows), learnt(5).scores(rows))


def test_failures_rank_last() -> None:
    model, rng = RankModel(), np.random.default_rng(2)
    rows = rng.uniform(0, 8, (60, 4))
    model.add("g", rows, [None if row[2] > 4 else 5.0 + row[0] for row in rows])
    model.fit()
    fresh = rng.uniform(0, 8, (60, 4))
    scores = model.scores(fresh)
    assert scores[fresh[:, 2] > 4.5].max() < scores[fresh[:, 2] < 3.5].min()


def test_equal_scores_before_there_is_anything_to_learn() -> None:
    model = RankModel()
    model.fit()
    assert len(set(model.scores(np.ones((3, 4))))) == 1
    assert len(model.scores(np.ones((0, 4)))) == 0


def test_save_and_load(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).uniform(0, 8, (20, 4))
    model, other = learnt(), RankModel()
    model.save(str(tmp_path / "m.json"))
    other.load(str(tmp_path / "m.json"))
    assert np.allclose(model.scores(rows), other.scores(rows))


def test_knobs_travel_as_one_annotation() -> None:
    mod = fake.module(rows=16)
    func = next(f for g, f in mod.functions.items() if g.name_hint == "matmul")
    text = fake.FAKE.knobs_to_json(fake.Knobs(8))
    sch = features.annotate(func, text)
    assert features.read_knobs(sch) == text
    assert features.read_knobs(features.new_schedule(func)) is None
    assert len([i for i in sch.trace.insts if i.kind.name == "Annotate"]) == 1

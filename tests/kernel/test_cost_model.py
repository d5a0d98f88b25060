"""The cost model ranks, learns from records, and gives the same ranks for the same seed."""

from __future__ import annotations

import itertools
from pathlib import Path

import fake_template as fake
import numpy as np
import pytest

from tvmcap.kernel import cost_model, features
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group


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


@pytest.mark.parametrize("objective", cost_model.OBJECTIVES)
def test_every_objective_learns(objective: str) -> None:
    rng = np.random.default_rng(4)
    groups = []
    for g in range(6):
        rows = rng.uniform(0, 8, (40, 4)).astype(np.float32)
        groups.append(Group(str(g), rows, tuple(time_of(rows, 10.0**g)), {}, {}))
    model = RankModel(0, objective=objective)
    model.pretrain(groups)
    rows = rng.uniform(0, 8, (60, 4))
    i, j = np.triu_indices(60, 1)
    scores, times = model.scores(rows), time_of(rows, 1.0)
    assert ((scores[i] > scores[j]) == (times[i] < times[j])).mean() > 0.8
    assert len(model) == model.pretrained == 240 and model.learnt


def test_the_estimate_ranks_where_nothing_was_learnt() -> None:
    rows = np.random.default_rng(5).uniform(0, 8, (20, 3))
    model = RankModel(features=("a", cost_model.PRIOR, "b"))
    assert np.array_equal(np.argsort(-model.margins(rows)), np.argsort(rows[:, 1]))
    assert np.array_equal(np.argsort(-model.scores(rows)), np.argsort(rows[:, 1]))


def test_the_estimate_is_where_trees_start() -> None:
    """A handful of measurements does not overturn what the estimate says of the rest."""
    rng = np.random.default_rng(6)
    rows = rng.uniform(0, 4, (200, 2))
    model = RankModel(features=(cost_model.PRIOR, "noise"))
    model.add("g", rows[:8], np.exp(rows[:8, 0]))
    model.fit()
    scores, times = model.scores(rows[8:]), rows[8:, 0]
    i, j = np.triu_indices(len(times), 1)
    assert ((scores[i] > scores[j]) == (times[i] < times[j])).mean() > 0.95


def test_learns_again_only_after_a_tenth_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, train = [], RankModel._train

    def count(self, data, base, rounds):
        fits.append(sum(len(times) for _, times in data))
        return train(self, data, base, rounds)

    monkeypatch.setattr(RankModel, "_train", count)
    model, rng = RankModel(), np.random.default_rng(8)
    for _ in range(100):
        rows = rng.uniform(0, 8, (4, 4))
        model.add("g", rows, time_of(rows, 1.0))
        model.fit()
    assert fits[:3] == [8, 12, 16] and len(fits) < 40
    assert all(b >= 1.1 * a for a, b in itertools.pairwise(fits))


def test_a_run_leaves_what_was_learnt_before_alone() -> None:
    """Trees on top of those kept: only the run's own measurements are gone through again."""
    model, rng = learnt(), np.random.default_rng(9)
    rows = rng.uniform(0, 8, (40, 4)).astype(np.float32)
    model.pretrain([Group("g", rows, tuple(time_of(rows, 1.0)), {}, {})])
    kept = model.base.save_raw("json")
    model.add("h", rows, -rows[:, 2] + 20)
    model.fit()
    assert model.base.save_raw("json") == kept
    turned = RankModel()
    turned.base = model.base
    i, j = np.triu_indices(40, 1)
    faster = rows[i, 2] > rows[j, 2]

    def share(m):
        return ((m.scores(rows)[i] > m.scores(rows)[j]) == faster).mean()

    assert share(model) > share(turned) + 0.1


def test_knobs_travel_as_one_annotation() -> None:
    mod = fake.module(rows=16)
    func = next(f for g, f in mod.functions.items() if g.name_hint == "matmul")
    text = fake.FAKE.knobs_to_json(fake.Knobs(8))
    sch = features.annotate(func, text)
    assert features.read_knobs(sch) == text
    plain = features.new_schedule(func)
    assert features.read_knobs(plain) is None
    copies = [features.annotated(plain, knobs) for knobs in (text, "other")]
    assert [features.read_knobs(c) for c in copies] == [text, "other"]
    assert features.read_knobs(plain) is None
    assert len([i for i in sch.trace.insts if i.kind.name == "Annotate"]) == 1

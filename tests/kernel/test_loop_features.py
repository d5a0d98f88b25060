"""Features of loop nests, of each store and of the nest; their model in MetaSchedule's search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fake_template as fake
import numpy as np
import pytest
import tvm

from tvmcap.base.config import Config
from tvmcap.kernel import loop_features as lf
from tvmcap.kernel import loop_search, models, tasks
from tvmcap.kernel.cost_model import PRIOR, RankModel
from tvmcap.kernel.loop_recall import recall
from tvmcap.kernel.loop_search import LoopNestSession, unlike
from tvmcap.kernel.measure import Measurement
from tvmcap.kernel.stores import open_stores

TARGET = fake.target()


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    return open_stores(Config(log_dir=str(tmp_path / "log")), TARGET)


def session(stores, model=None, k: int = 64, seed: int = 1) -> LoopNestSession:
    (task,) = tasks.extract(fake.module(k=k, n=96), TARGET, lambda f, t: None)
    return LoopNestSession(task, {"B": 32}, TARGET, stores, seed, None, model)


def made_up_us(row) -> float:
    """Times that only the nest tells: more vector loops are faster, more loops slower."""
    named = dict(zip(lf.FEATURES, row, strict=True))
    return 50.0 + named["loops"] - 3 * named["vector_loops"] + 5 * named["log_band_0"]


def play(own: LoopNestSession, stores, count: int) -> list:
    proposals = own.propose(count)
    times = [made_up_us(p.features) for p in proposals]
    results = [Measurement(us, us, us, 5) for us in times]
    stores.append([own.record(p, r) for p, r in zip(proposals, results, strict=True)])
    own.notify(proposals, results)
    return proposals


def scheduled(change):
    """Return the nest's features of a matmul that ``change`` schedules."""
    (task,) = tasks.extract(fake.module(k=64, n=96), TARGET, lambda f, t: None)
    sch = tvm.s_tir.Schedule(
        tvm.IRModule({"main": tasks.bind(task, {"B": 32}).with_attr("global_symbol", "main")})
    )
    block = sch.get_child_blocks(sch.get_sblock("root"))[0]
    change(sch, sch.get_loops(block))
    return lf._nest(sch.mod["main"], 2, 8)


def test_the_nest_tells_loops_vectors_and_tails_apart() -> None:
    plain = scheduled(lambda sch, loops: None)
    assert (plain["loops"], plain["parallel_loops"], plain["vector_loops"]) == (3, 0, 0)
    assert plain["log_step"] == np.log2(65) and plain["predicates"] == 0

    def even(sch, loops):
        i, j, k = loops
        j0, j1 = sch.split(j, [None, 16])
        sch.reorder(i, j0, k, j1)
        sch.parallel(i)
        sch.vectorize(j1)

    found = scheduled(even)
    assert (found["loops"], found["parallel_loops"], found["vector_loops"]) == (4, 1, 1)
    assert found["fill"] == 1.0 and found["vector_share"] == 2.0 and found["vector_tail"] == 0

    def uneven(sch, loops):
        i, j, _ = loops
        i0, _ = sch.split(i, [3, None])
        _, j1 = sch.split(j, [None, 10])
        sch.parallel(i0)
        sch.unroll(j1)

    found = scheduled(uneven)
    assert found["fill"] == 0.75 and found["predicates"] == 1
    assert found["unrolled_loops"] == 1 and found["log_unrolled"] == np.log2(11)


def test_a_row_for_each_candidate_and_in_its_record(stores) -> None:
    own = session(stores)
    proposals = play(own, stores, 6)
    rows = lf.loop_features(own._context, [p.measured for p in proposals])
    assert rows.shape == (len(proposals), len(lf.FEATURES)) and np.isfinite(rows).all()
    assert len(np.unique(rows, axis=0)) > len(rows) // 2
    np.testing.assert_allclose(rows, [p.features for p in proposals], rtol=1e-4, atol=1e-6)
    assert [r.features for r in stores.stores[0].records] == [p.features for p in proposals]
    assert lf.loop_features(own._context, []).shape == (0, len(lf.FEATURES))


def test_a_schedule_is_looked_at_once(stores, monkeypatch: pytest.MonkeyPatch) -> None:
    own = session(stores)
    candidates = [p.measured for p in own.propose(4)]
    seen: list = []
    look = lf.nest_features
    monkeypatch.setattr(lf, "nest_features", lambda *a: seen.append(a) or look(*a))
    model = lf.LoopCostModel(RankModel(3, lf.FEATURES))
    first = model.features(own._context, candidates[:3])
    again = model.features(own._context, [*candidates[::-1], candidates[0]])
    assert len(seen) == 4
    np.testing.assert_array_equal(again[[4, 2, 1]], first)
    np.testing.assert_array_equal(again[:4][::-1], lf.loop_features(own._context, candidates))
    model.forget()
    model.features(own._context, candidates[:1])
    assert len(seen) == 4 + 4 + 1


def test_candidates_are_made_for_what_is_asked(stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evolution starts when asked, once a batch, and what is less than a population is owed."""
    grown: list[tuple[int, int]] = []
    grow = LoopNestSession._grow

    def noted(own: LoopNestSession, evolution, times: int = 1) -> None:
        grown.append((evolution.population, times))
        grow(own, evolution, times)

    monkeypatch.setattr(LoopNestSession, "_grow", noted)
    own, wide, narrow = session(stores), loop_search._WIDE, loop_search._NARROW
    assert own._growing is None and not own._pool
    own.ahead(8)
    own.ahead(8)
    assert grown == [(wide, loop_search._FIRST * 8 // wide)]
    assert len(own.propose(8)) == 8 and len(grown) == 1
    worth = narrow // loop_search._LATER  # so many of a later batch take one population
    for asked in (worth // 2, worth - worth // 2, 1):
        own.ahead(asked)
        assert len(own.propose(asked)) == asked
    assert grown[1:] == [(narrow, 1)]


def test_same_seed_and_measurements_same_proposals(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    runs = []
    for name in ("a", "b"):
        own = open_stores(Config(log_dir=str(tmp_path / name)), TARGET)
        search = session(own)
        runs.append([p.candidate.name for _ in range(3) for p in play(search, own, 4)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 12


def test_records_of_one_task_teach_the_search_of_another(stores) -> None:
    """What was learnt on one product leads the first batch on another, not measured before."""
    teacher = session(stores)
    for _ in range(3):
        play(teacher, stores, 16)
    model = models.ready(stores, lf.LOOP_NESTS, TARGET, 0)
    assert model.pretrained >= 40 and model.features == lf.FEATURES
    means = []
    for known in (None, model):
        own = session(stores, known, k=80)
        means.append(np.mean([made_up_us(p.features) for p in own.propose(8)]))
    assert means[1] < means[0]


def test_rows_of_another_version_teach_nothing(stores) -> None:
    play(session(stores), stores, 6)
    records = stores.stores[0].records
    assert sum(len(g.rows) for g in lf.LOOP_NESTS.groups(records)) == len(records)
    for record in records:
        record.features[0] += 1
    assert lf.LOOP_NESTS.groups(records) == []


def test_the_estimate_ranks_before_anything_was_learnt(stores) -> None:
    own = session(stores)
    candidates = [p.measured for p in own.propose(6)]
    rows = lf.loop_features(own._context, candidates)
    cold = lf.LoopCostModel(RankModel(3, lf.FEATURES))
    scores = cold.predict(own._context, candidates)
    assert (0 < scores).all() and (scores < 1).all() and len(set(scores.tolist())) > 3
    estimates = rows[:, lf.FEATURES.index(PRIOR)]
    np.testing.assert_array_equal(np.argsort(-scores), np.argsort(estimates))


def test_a_batch_is_ranked_by_what_was_measured_last(stores) -> None:
    """What is proposed next comes from the pool, ranked anew, and is not much alike."""
    own = session(stores)
    for _ in range(3):
        play(own, stores, 8)
    own.settle()
    known = [made_up_us(k.row) for t, k in own._pool.items() if t not in own.done]
    chosen = [made_up_us(p.features) for p in own.propose(8)]
    assert np.mean(chosen) < np.mean(known)


def test_rows_that_differ_come_first() -> None:
    rows = np.array([[0.0], [0.01], [10.0], [20.0], [0.02]])
    assert unlike(rows * [1, 1], range(5), 3, apart=0.1) == [0, 2, 3]
    assert unlike(rows, range(5), 5, apart=0.1) == [0, 2, 3, 1, 4]


def test_records_of_earlier_features_are_recalled(stores) -> None:
    own = session(stores)
    play(own, stores, 6)
    records = stores.stores[0].records
    old = [replace(r, features=[1.0, 2.0]) for r in records]
    assert lf.LOOP_NESTS.groups(old) == []
    found = recall(old, [own.task])
    assert [r.features for r in found] == [r.features for r in records]
    assert recall(old, []) == old
    (broken, *_) = old
    wrong = replace(broken, trace=[[["GetSBlock", [], ["nothing", "main"], ["b0"]]], []])
    assert recall([wrong], [own.task]) == [wrong]
    store = replace(stores.stores[0], records=old)
    again = models.ready(replace(stores, stores=(store,)), lf.LOOP_NESTS, TARGET, 0, [own.task])
    assert again.pretrained == len(records)

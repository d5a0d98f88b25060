"""Search: the defaults first, each candidate once, as learnt; traces fit symbolic sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fake_template as fake
import numpy as np
import pytest

from tvmcap.base.config import Config
from tvmcap.kernel import measure, models, prim_func, search, tasks, template_search
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.loop_search import LoopNestSession
from tvmcap.kernel.measure import Measurement
from tvmcap.kernel.records import digest
from tvmcap.kernel.stores import open_stores

TARGET = fake.target()
MANY = tuple(fake.Knobs(tile) for tile in range(1, 41))


def many(problem, target):
    return list(MANY)


WIDE = dataclasses.replace(fake.FAKE, name="wide", space=many)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    return open_stores(Config(log_dir=str(tmp_path / "log")), TARGET)


def wide_session(stores, seed: int = 0, template=WIDE, model=None):
    def find(func, target):
        return template, fake.match(func, target)

    (task,) = tasks.extract(fake.module(), TARGET, find)
    return template_search.TemplateSession(
        task, {"B": 16}, TARGET, stores, seed, model or RankModel(seed)
    )


def play(session: search.Session, stores, count: int) -> list[int]:
    """One batch with made-up times: the closer to a tile of 30, the faster."""
    proposals = session.propose(count)
    results = [
        Measurement(u := 10.0 + abs(p.knobs["tile"] - 30), u, u, 5)  # type: ignore[index]
        for p in proposals
    ]
    for p, r in zip(proposals, results, strict=True):
        stores.append([session.record(p, r)])
    session.notify(proposals, results)
    return [p.knobs["tile"] for p in proposals]  # type: ignore[index]


def test_default_first_then_every_candidate_once(stores) -> None:
    session = wide_session(stores)
    tried: list[int] = []
    while batch := play(session, stores, 8):
        assert len(batch) <= 8
        tried += batch
    assert tried[0] == fake.default(None, TARGET).tile
    assert sorted(tried) == [k.tile for k in MANY]


def test_the_model_leads_to_the_fast_ones(stores) -> None:
    session = wide_session(stores)
    first, second, _ = (play(session, stores, 8) for _ in range(3))
    assert np.mean([abs(t - 30) for t in second]) < np.mean([abs(t - 30) for t in first])
    assert session.best() is not None and abs(session.best().knobs["tile"] - 30) <= 2


def test_same_seed_same_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    runs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        own = open_stores(Config(log_dir=str(tmp_path / name)), TARGET)
        session = wide_session(own, seed)
        runs.append([play(session, own, 8) for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]


def loop_batches(folder: Path, seed: int, count: int = 3) -> list[list[str]]:
    """Candidates of batches of evolution, whose made-up times follow from the candidates."""
    own = open_stores(Config(log_dir=str(folder)), TARGET)
    (task,) = tasks.extract(fake.module(), TARGET, lambda f, t: None)
    session = LoopNestSession(task, {"B": 16}, TARGET, own, seed)
    batches = []
    for _ in range(count):
        proposals = session.propose(12)
        names = [p.candidate.name for p in proposals]
        times = [10.0 + int(digest(name)[:4], 16) / 6553.6 for name in names]
        results = [Measurement(us, us, us, 5) for us in times]
        own.append([session.record(p, r) for p, r in zip(proposals, results, strict=True)])
        session.notify(proposals, results)
        batches.append(names)
    return batches


def test_same_seed_and_same_times_same_loop_nests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    first = loop_batches(tmp_path / "a", 3)
    np.random.random(7)  # what others draw makes no difference
    assert first == loop_batches(tmp_path / "b", 3)
    assert first[:1] != loop_batches(tmp_path / "c", 4, count=1)


def test_resume_skips_what_is_recorded(stores) -> None:
    first = play(wide_session(stores), stores, 8)
    again = wide_session(stores)
    rest = [t for _ in range(5) for t in play(again, stores, 8)]
    assert sorted(first + rest) == [k.tile for k in MANY]


def test_repeat_measures_recorded_candidates(stores) -> None:
    session = wide_session(stores)
    play(session, stores, 4)
    record = session.best()
    (again,) = session.repeat([record])
    assert again.knobs == record.knobs and again.candidate.template is WIDE


def estimated(asked: list[int]):
    """Return the template with an estimate: the closer to a tile of 20, the faster."""

    def estimate(problem, knobs, target):
        asked.append(problem.rows)
        return [1.0 + abs(k.tile - 20) for k in knobs]

    return dataclasses.replace(WIDE, estimate=estimate)


def test_a_batch_comes_from_what_the_estimate_puts_first(stores) -> None:
    asked: list[int] = []
    session = wide_session(stores, template=estimated(asked))
    assert set(asked) == {16}  # at the size that is tuned, not the symbolic one
    default = play(session, stores, 1)
    assert default == [fake.default(None, TARGET).tile]
    left = sorted((k.tile for k in MANY if k.tile not in default), key=lambda t: abs(t - 20))
    for count in (1, 2, 3):  # without a model, and with one
        batch = play(session, stores, count)
        nearest = abs(left[template_search._SHORT_LIST * count - 1] - 20)
        assert len(batch) == count and all(abs(t - 20) <= nearest for t in batch)
        left = [t for t in left if t not in batch]


def test_an_estimate_keeps_no_candidate_from_being_tried(stores) -> None:
    session = wide_session(stores, template=estimated([]))
    tried: list[int] = []
    while batch := play(session, stores, 8):
        tried += batch
    assert sorted(tried) == [k.tile for k in MANY]


def test_the_model_chooses_within_the_short_list(stores) -> None:
    """Times fall towards 30 where the estimate says 20: the model leads out of its middle."""
    session = wide_session(stores, template=estimated([]))
    first, _, third = (play(session, stores, 6) for _ in range(3))
    assert np.mean([abs(t - 30) for t in third]) < np.mean([abs(t - 30) for t in first[1:]])


def timed(session, stores, count: int, spread: float) -> int:
    """Measure a batch whose times follow the tile, with a spread; return how many there were."""
    proposals = session.propose(count)
    results = []
    for p in proposals:
        us = 10.0 + abs(p.knobs["tile"] - 30)
        results.append(Measurement(us, us * (1 - spread), us * (1 + spread), 5))
    for p, r in zip(proposals, results, strict=True):
        stores.append([session.record(p, r)])
    session.notify(proposals, results)
    return len(proposals)


def test_stops_where_the_rest_should_gain_less_than_the_noise(stores) -> None:
    session = wide_session(stores)
    counts = [timed(session, stores, 8, 0.2) for _ in range(5)]
    assert counts[:2] == [8, 8] and counts[-1] == 0 and session.converged
    assert session.best().median_us <= 11.0
    again = wide_session(stores, model=models.ready(stores, WIDE, TARGET))
    assert again.propose(8) == [] and again.converged  # records tell as much


def test_without_noise_everything_is_tried(stores) -> None:
    session = wide_session(stores)
    assert [timed(session, stores, 8, 0.0) for _ in range(6)] == [8, 8, 8, 8, 8, 0]
    assert not session.converged


def test_a_pretrained_model_ranks_all_that_fits(stores) -> None:
    """What the estimate puts last comes first where records of another size say so."""
    template = estimated([])
    task = wide_session(stores, template=template).task
    rows = template.features(task.problem.__class__(32, 32, 48), MANY, TARGET)
    model = RankModel(0, template.feature_names)
    model.pretrain([Group("g", rows, tuple(10.0 + abs(k.tile - 40) for k in MANY), {}, {})])
    own = template_search.TemplateSession(task, {"B": 16}, TARGET, stores, 0, model)
    first = [p.knobs["tile"] for p in own.propose(6)][1:]
    assert sum(t > 34 for t in first) >= 3


@pytest.fixture(scope="module")
def loop_run(tmp_path_factory: pytest.TempPathFactory):
    """Real batches of MetaSchedule's search at 16 rows, with their records."""
    folder = tmp_path_factory.mktemp("loop")
    own = open_stores(Config(log_dir=str(folder)), TARGET)
    (task,) = tasks.extract(fake.module(), TARGET, lambda f, t: None)
    session = LoopNestSession(task, {"B": 16}, TARGET, own, 1, lambda func, target: func)
    with measure.Measurer(TARGET, workers=2, time_s=0.02) as measurer:
        for _ in range(2):
            proposals = session.propose(4)
            candidates = [p.candidate for p in proposals]
            results = list(measurer.measure(session.workload, candidates))
            own.append([session.record(p, r) for p, r in zip(proposals, results, strict=True)])
            session.notify(proposals, results)
        yield task, session, own, measurer


def test_loop_nests_start_with_the_fallback_and_never_repeat(loop_run) -> None:
    task, _, own, _ = loop_run
    history = own.history(task.key, TARGET)
    assert len(history) == 8 and history[0].trace == []
    assert len({r.candidate for r in history}) == 8
    assert all(r.error is None for r in history)
    again = LoopNestSession(task, {"B": 16}, TARGET, own, 1, lambda func, target: func)
    fresh = {p.candidate.name for p in again.propose(4)}
    assert len(fresh) == 4 and not any(p.trace == [] for p in again.propose(4))


def test_a_trace_of_one_size_is_right_at_every_size(loop_run) -> None:
    task, _, own, measurer = loop_run
    traces = [r.trace for r in own.history(task.key, TARGET) if r.trace][:2]
    for i, trace in enumerate(traces):
        func = search.apply_trace(task.func, trace, TARGET)
        assert func is not None and prim_func.size_vars(func)
        for rows in (1, 7, 16, 61):
            work = measure.Workload(task, {"B": rows}, seed=rows)
            (result,) = measurer.measure(work, [measure.Candidate(f"symbolic{i}", func)])
            assert result.cause is None, result.message


def test_a_trace_that_does_not_apply_is_none(loop_run) -> None:
    task, _, own, _ = loop_run
    trace = next(r.trace for r in own.history(task.key, TARGET) if r.trace)
    assert search.apply_trace(task.func, [], TARGET) is None
    renamed = [
        [[n, i, ["nowhere" if a == "matmul" else a for a in at], o] for n, i, at, o in trace[0]],
        trace[1],
    ]
    assert search.apply_trace(task.func, renamed, TARGET) is None

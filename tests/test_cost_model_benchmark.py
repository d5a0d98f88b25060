"""The benchmark of the cost model: its split, its metrics, its table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import cost_model as benchmark
import cost_model_data as data
import cost_model_metrics as cm
import cost_model_replay as replaying
import cost_model_split as splitting
import cost_model_tables as tables
import cost_model_transfer as transferring

from tests.kernel.model_cases import KNOBS, SHAPES, made_up_us, record, records
from tests.schedules.products import TARGET
from tvmcap.kernel import candidates, dataset, tuner
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.records import RecordStore
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import Sizes


@pytest.fixture(scope="module")
def groups():
    return dataset.of_template(records(), hopper.TEMPLATE, TARGET)


def test_whole_pairs_of_k_and_n_are_held_out(groups) -> None:
    seen = set()
    for seed in range(5):
        train, test = splitting.split(groups, {}, seed)
        learnt, held = ({splitting.pair_of(g) for g in part} for part in (train, test))
        assert not learnt & held and len(held) == 2 and len(train) + len(test) == len(groups)
        assert all(len([g for g in test if splitting.pair_of(g) == pair]) == 2 for pair in held)
        seen.add(frozenset(held))
    assert len(seen) > 1


def test_one_epilogue_is_held_out(groups) -> None:
    names = {g.workload["digest"]: "gelu" if g.workload["n"] > 1024 else "none" for g in groups}
    for seed in range(5):
        train, test = splitting.split(groups, names, seed)
        kept = {splitting.epilogue_of(g, names) for g in train}
        assert len(kept) == 1 and len(train) + len(test) == len(groups)


def test_what_is_tested_on_is_in_random_order(groups) -> None:
    """Stores have the fastest first: a tie must not find it."""
    best = []
    for seed in range(8):
        for group in splitting.split(groups, {}, seed)[1]:
            (whole,) = (g for g in groups if g.name == group.name)
            order = [whole.knobs.index(k) for k in group.knobs]
            assert sorted(order) == list(range(len(order)))
            assert group.times_us == tuple(whole.times_us[i] for i in order)
            assert group.estimates_us == tuple(whole.estimates_us[i] for i in order)
            np.testing.assert_array_equal(group.rows, whole.rows[order])
            best.append(int(np.argmin(group.times_us)))
    assert len(set(best)) > 8


def test_metrics_of_a_known_order() -> None:
    times = np.array([10.0, 10.1, 20.0, 40.0])
    right = cm.metrics([cm.Scored(-times, times)])
    assert right == {"pairwise": 1.0, "best_of_1": 1.0, "best_of_5": 1.0, "top8_regret": 0.0}
    wrong = cm.metrics([cm.Scored(times, times)])
    assert wrong["pairwise"] == 0.0 and wrong["best_of_1"] == 0.25
    assert cm.metrics([cm.Scored(np.zeros(4), times)])["pairwise"] == 0.5
    late = np.arange(1.0, 11.0)
    assert cm.metrics([cm.Scored(late, late)])["top8_regret"] == pytest.approx(2.0)
    assert cm.dropped([times]) == pytest.approx(1 / 6)


def test_the_ceiling_is_what_measuring_again_confirms() -> None:
    assert cm.ceiling([[(1.0, 1.0), (2.0, 0.5), (3.0, 3.0)]]) == (pytest.approx(2 / 3), 3)
    assert cm.ceiling([[(1.0, 1.0)]]) == (None, 0)


def test_the_whole_of_it_on_made_up_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RecordStore(tmp_path / "logs").append(records())
    out, folder = tmp_path / "out.json", tmp_path / "models"
    arguments = f"--logs {tmp_path / 'logs'} --json {out} --write {folder} --seeds 2"
    monkeypatch.setattr(sys, "argv", ["cost_model.py", *arguments.split()])
    benchmark.main()
    found = json.loads(out.read_text())
    assert set(found["cuda"]) == {"ours", "ndcg", "regression", "prior", "random"}
    for row in found["cuda"].values():
        assert set(cm.NAMES) <= set(row)
        assert all(row["spread"][n][0] <= row[n] <= row["spread"][n][1] for n in cm.NAMES)
    ours, prior = found["cuda"]["ours"], found["cuda"]["prior"]
    assert ours["pairwise"] > prior["pairwise"] > 0.6 > found["cuda"]["random"]["pairwise"]
    assert found["data"]["cuda"]["candidates"] == 200 and not found["transfer"]["cuda"]
    assert found["meta"] == found["metas"]["cuda"]
    assert (folder / "hopper_gemm.model.json").is_file()
    assert "pairwise" in capsys.readouterr().out


def test_what_is_written_of_another_target_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for target in ("cuda", "llvm"):
        benchmark.write(path, target, {"ours": target}, {"metas": {"of": target}})
    found = json.loads(path.read_text())
    assert found["cuda"] == {"ours": "cuda"} and found["llvm"] == {"ours": "llvm"}
    assert found["metas"]["cuda"] == {"of": "cuda"} and found["meta"] == {"of": "llvm"}


def test_the_pick_of_a_build_is_among_what_the_estimate_admits(groups, monkeypatch) -> None:
    monkeypatch.setattr(cm, "EXHAUSTIVE", 10)
    group = groups[0]
    times = np.array(group.times_us)
    slowest = int(np.argmax(group.estimates_us))
    scores = np.where(np.arange(len(times)) == slowest, 9.0, -times)
    assert group.estimates_us[slowest] > 2 * min(group.estimates_us)
    found = cm.evaluated(lambda _: scores, [group])
    assert found["zero_trial"] == 1.0 and found["best_of_1"] < 1.0


@pytest.fixture(scope="module")
def searched():
    """Return a group of all settings, and a model of other shapes' records."""
    sizes = Sizes(1024, 3072, 1536)
    times = made_up_us(sizes, KNOBS)
    found = [record(sizes, k, float(us)) for k, us in zip(KNOBS, times, strict=True)]
    (group,) = dataset.of_template(found, hopper.TEMPLATE, TARGET)
    model = RankModel(0, hopper.TEMPLATE.feature_names)
    model.pretrain(dataset.of_template(records(SHAPES), hopper.TEMPLATE, TARGET))
    return group, model


def test_a_search_is_replayed_on_records(searched, monkeypatch) -> None:
    group, model = searched
    monkeypatch.setattr(replaying, "EXHAUSTIVE", len(group.knobs))
    assert replaying.replayed([group], hopper.TEMPLATE, 0) == [group]
    run = replaying.replay(group, hopper.TEMPLATE, model, TARGET, 0)
    assert run == replaying.replay(group, hopper.TEMPLATE, model, TARGET, 0)
    best = min(group.times_us)
    times = sorted(best / us for us in group.times_us)
    assert len(run) <= max(replaying.TRIALS) and set(run) <= set(times) and max(run) > 0.99
    assert model._top is None and not model._groups
    drawn = replaying.drawn(group, 0)
    assert len(drawn) == 32 and np.mean(run[:8]) > np.mean(drawn)
    found = replaying.search_metrics([[0.5, 0.8, 1.0], [1.0]])
    assert found["search_8"] == 1.0 and found["search_trials"] == 2.0
    monkeypatch.setattr(replaying, "EXHAUSTIVE", len(group.knobs) + 1)
    assert replaying.replayed([group], hopper.TEMPLATE, 0) == []


def test_transfer_learns_nothing_of_what_it_is_tested_on() -> None:
    own = [(2048, 1024), (1024, 1024), (768, 4096), (4096, 512)]
    halves = [
        replace(r, workload={**r.workload, "dtypes": ["float16"] * 3}, workload_hash=f"h{r.sizes}"
                + str(r.workload["n"]) + str(r.workload["k"]))
        for r in records(own)
    ]  # fmt: skip
    groups = dataset.of_template([*records(), *halves], hopper.TEMPLATE, TARGET)
    found = transferring.transfer(*transferring.by_dtype(groups), hopper.TEMPLATE.feature_names, 0)
    assert found is not None and set(found) == {"none", "few", "all", "few_alone", "all_alone"}
    assert found["few"]["records"] == round(0.085 * len(halves))
    assert found["all"]["pairwise"] > found["few_alone"]["pairwise"]
    alone = [g for g in groups if g.workload["dtypes"][0] == "float16"]
    assert transferring.transfer([], alone, hopper.TEMPLATE.feature_names, 0) is None
    few = transferring.draw(alone, 11, np.random.default_rng(0))
    assert sum(len(g.rows) for g in few) == 11
    for part in few:
        (whole,) = (g for g in alone if g.name == part.name)
        known = {(tuple(r), t) for r, t in zip(whole.rows, whole.times_us, strict=True)}
        assert {(tuple(r), t) for r, t in zip(part.rows, part.times_us, strict=True)} <= known


def test_a_sample_of_what_was_measured_once_is_measured_again() -> None:
    sizes = Sizes(512, 1024, 2048)
    history = [record(sizes, k, 9.0) for k in KNOBS[:9]]
    history += [record(sizes, KNOBS[0], 8.0), record(sizes, KNOBS[20], None)]
    session = SimpleNamespace(
        stores=SimpleNamespace(history=lambda key, target, rows: history),
        task=SimpleNamespace(key=None),
        target=TARGET,
        record_sizes={"rows": 512},
        repeat=lambda found: [r.candidate for r in found],
    )
    texts = {hopper.TEMPLATE.knobs_to_json(k) for k in KNOBS[1:9]}
    drawn = data.again(session, 5, 0)
    assert len(set(drawn)) == 5 and set(drawn) <= texts and drawn != data.again(session, 5, 1)
    assert set(data.again(session, 100, 0)) == texts


class NoGpu:
    """What a measurer does, with times made up."""

    device, workers = "cuda", 2

    def __init__(self, target, **_) -> None:
        self.runners = [SimpleNamespace(machine=lambda: {"name": "made up"})]

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def build(self, proposed, workloads=()) -> None:
        self.built = len(proposed)

    def reference(self, workload, runner=None) -> str:
        return "computed"

    def spread(self, work, items) -> None:
        for item in items:
            work(self.runners[0], item)

    def measure(self, workload, proposed, limit_us=None, runner=None):
        for i, _ in enumerate(proposed):
            yield candidates.Measurement(10.0 + i, 10.0 + i, 10.0 + i, 3)


def test_data_are_measured_and_then_again(tmp_path: Path, monkeypatch) -> None:
    problem = data.PROBLEMS[0]._replace(rows=(16, 4096))
    monkeypatch.setattr(data, "PROBLEMS", (problem,))
    monkeypatch.setattr(tuner, "Measurer", NoGpu)
    data.capture(problem, tmp_path)
    options = SimpleNamespace(
        logs=tmp_path / "logs", seed=0, workers=2, budget=60.0, again=0, tiled=4, few=2
    )
    for again, expected in ((0, 4 + 2 + 2), (0, 0), (2, 4)):
        options.again = again
        before = len(RecordStore(options.logs).records)
        data.measure(tmp_path, [str(problem)], options)
        assert len(RecordStore(options.logs).records) - before == expected


def test_epilogues_of_the_records_that_ship_are_named() -> None:
    names = json.loads(splitting.EPILOGUES.read_text())
    shipped = RecordStore(Path(__file__).parents[1] / "tuning_logs" / "cuda").records
    digests = {r.workload["digest"] for r in shipped if r.template == "hopper_gemm"}
    assert digests <= set(names) and len({names[d] for d in digests}) >= 3


def test_the_tables_show_what_was_measured() -> None:
    metrics = dict.fromkeys((*cm.NAMES, "zero_trial", "search_32"), 0.5)
    row = {**metrics, "spread": {name: [0.25, 0.75] for name in metrics}, "records": 7.0}
    meta = {"source": "s", "folders": ["kernel"]}
    result = {"cuda": {"ours": row}, "metas": {"cuda": meta}, "transfer": {"cuda": {"few": row}}}
    found, rows = tables.part("cuda")(result)
    assert found == meta and rows == [{"row": "ours", **row}]
    head, body = tables.orders(rows)
    assert len(head) == len(body[0]) and "0.500 (0.250 to 0.750)" in body[0]
    head, body = tables.transfer("a", "b")(tables.part("cuda", "transfer")(result)[1])
    assert len(head) == len(body[0]) and "7" in body[0]

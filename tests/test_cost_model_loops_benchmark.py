"""The benchmark of loop nests: what is measured, where, and trials to another's latency."""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
from tvm.s_tir import meta_schedule as ms

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import common
import core_sets
import cost_model_llvm as collecting
import cost_model_load as loading
import cost_model_tables as tables
import cost_model_trials as trials
import loop_tasks
import search_overhead

from tvmcap import versions
from tvmcap.kernel import tasks
from tvmcap.kernel.loop_features import FEATURES, LOOP_NESTS
from tvmcap.kernel.records import RecordStore

SMALL = "matmul-48x32x64-relu"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Let builders and runners have one thread each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loop_tasks.TASKS, SMALL, ("matmul", 48, 32, 64, "relu"))
        yield
    loop_tasks.task.cache_clear()


@pytest.fixture(scope="module")
def seat():
    seat = core_sets.Seat([min(os.sched_getaffinity(0))], time.time() + 300)
    yield seat
    seat.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, seat: core_sets.Seat) -> Path:
    """Return a store of six drawn and six evolved candidates, two of them measured twice."""
    folder = tmp_path_factory.mktemp("logs")
    for kind, count in (("drawn", 6), ("evolved", 6), ("again", 2)):
        collecting.work(collecting.Job(str(folder), None, 1, SMALL, kind, count, count), seat)
    return folder


def options(folder: Path, **more: int) -> argparse.Namespace:
    known = {"count": 100, "portable": 40, "again": 12, "cores_per_worker": 1}
    return argparse.Namespace(logs=folder, **{**known, **more})


def test_tasks_are_many_different_and_large() -> None:
    target = loop_tasks.target(2)
    names = [name for name in loop_tasks.TASKS if name != SMALL]
    found = [loop_tasks.task(name, target) for name in names]
    assert len({task.workload_hash for task in found}) == len(names) >= 15
    assert {name.split("-")[0] for name in names} == {"matmul", "batched", "conv2d"}
    assert all(tasks.work(task, {})[0] >= 1e8 for task in found)
    assert set(trials.SEARCHED) < set(names)


def test_what_is_drawn_comes_before_what_evolves(tmp_path: Path) -> None:
    names = loop_tasks.named([])[:3]
    jobs = collecting.jobs(options(tmp_path), names)
    kinds = [job.kind for job in jobs]
    assert kinds == sorted(kinds, key=("drawn", "evolved", "again").index)
    assert [job.task for job in jobs[:3]] == names
    counts = {
        (arch, kind): sum(j.count for j in jobs if (j.arch, j.kind) == (arch, kind))
        for arch in (None, loop_tasks.PORTABLE)
        for kind in ("drawn", "evolved", "again")
    }
    assert list(counts.values()) == [150, 150, 36, 60, 60, 0]
    assert max(job.count for job in jobs) <= collecting.CHUNK


def test_candidates_are_checked_and_a_run_goes_on(logs: Path) -> None:
    records = RecordStore(logs).records
    assert len(records) == 14 and len({r.candidate for r in records}) == 12
    assert all(r.median_us and len(r.features) == len(FEATURES) for r in records)
    (left,) = collecting.jobs(options(logs, count=15, portable=0, again=2), [SMALL])
    assert (left.kind, left.count) == ("evolved", 3)
    assert "12 of 1 tasks, 2 again" in collecting.counted(logs)
    (group,) = LOOP_NESTS.groups(records)
    assert group.rows.shape == (12, len(FEATURES))


def test_packed_records_are_read_as_they_are(logs: Path, tmp_path: Path) -> None:
    plain = (logs / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(plain))
    packed, here = loading.stored(tmp_path), loading.stored(logs)
    assert packed.records == here.records and len(here.records) == 14
    assert not (tmp_path / "records.jsonl").exists()


def test_searches_start_alike_and_go_on(
    logs: Path, tmp_path: Path, seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"population_size": 16, "init_min_unmeasured": 8, "genetic_num_iters": 1}
    evolution = functools.partial(ms.search_strategy.EvolutionarySearch, **small)
    monkeypatch.setattr(ms.search_strategy, "EvolutionarySearch", lambda **_: evolution())
    for method in ("ours", "eager"):
        for asked in (2, 4):
            search = trials.Search(str(logs), str(tmp_path), 1, SMALL, method, 0, asked)
            trials.work(search, seat)
            assert len(RecordStore(search.folder).records) == asked
    (tmp_path / "notes.txt").touch()
    first = RecordStore(search.folder).records
    assert len({r.candidate for r in first}) == 4 and all(r.trace for r in first)
    assert (
        trials.shown(tmp_path) == "ours 4 trials, stock 0 trials, eager 4 trials, product 0 trials"
    )


class Told:
    """A session, its measurer and its stores that note what they are told, in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.session = types.SimpleNamespace(
            target="t",
            workload="w",
            stores=types.SimpleNamespace(append=self.append),
            propose=lambda count: [types.SimpleNamespace(candidate=i) for i in range(count)],
            ahead=lambda count: self.heard.append(f"ahead {count}"),
            settle=lambda: self.heard.append("settle"),
            best=lambda: None,
            record=lambda proposal, result: (proposal.candidate, result),
            notify=lambda proposals, results: self.heard.append(f"notify {results}"),
        )
        self.measurer = types.SimpleNamespace(build=self.build, measure=self.measure)

    def append(self, records: list[tuple[int, int]]) -> None:
        self.heard.append(f"append {records}")

    def build(self, candidates: list[int], workloads: list[str]) -> None:
        self.heard.append(f"build {candidates}")

    def measure(self, workload: str, candidates: list[int], limit_us: float | None) -> list[int]:
        self.heard.append("measure")
        return [10 * c for c in candidates]


def test_a_batch_is_on_disk_before_the_next_and_settled_before_it_is_timed() -> None:
    told = Told()
    seat = core_sets.Seat([0], time.time() + 60, {"t": told.measurer})
    seat.search(told.session, 3, 2)
    assert told.heard == [
        *("ahead 1", "build [0, 1]", "settle", "measure", "append [(0, 0), (1, 10)]"),
        "notify [0, 10]",
        *("build [0]", "settle", "measure", "append [(0, 0)]", "notify [0]"),
    ]
    told.heard.clear()
    seat.search(told.session, 4, 2, lambda count: told.session.propose(1), learns=False)
    assert told.heard == ["build [0]", "settle", "measure", "append [(0, 0)]"] * 4
    told.heard.clear()
    seat.search(told.session, 4, 2, lambda count: [])
    core_sets.Seat([0], 0.0, {"t": told.measurer}).search(told.session, 4, 2)
    assert told.heard == []


def test_results_say_what_measured_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    common.write(tmp_path / "rows.json", [{"a": 1}], folders=("kernel",))
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["rows"] == [{"a": 1}] and found["meta"]["versions"]["torch"] is None
    assert found["meta"]["source"] == versions.source_hash(("kernel",))


def test_the_model_of_a_search_knows_nothing_of_its_task(logs: Path) -> None:
    target = loop_tasks.target(1)
    other = next(iter(loop_tasks.TASKS))
    assert trials.taught(logs, other, target, 0).pretrained == 12
    assert trials.taught(logs, SMALL, target, 0).pretrained == 0


def test_trials_to_the_latency_of_another(logs: Path, tmp_path: Path) -> None:
    (one, *_) = RecordStore(logs).records
    made_up = {"ours": [9.0, 4.0, 5.0, 3.0], "stock": [8.0, 7.0, None, 4.0], "eager": [9.0] * 4}
    for method, times in made_up.items():
        RecordStore(tmp_path / f"{method}-{SMALL}-0").append(
            replace(one, median_us=us, seed=i) for i, us in enumerate(times)
        )
    row = trials.row(tmp_path, SMALL, 4, 2)
    assert row is not None and row["seeds"] == [0] and row["goal_us"] == [4.0]
    assert row["reached"] == {"ours": [2], "stock": [4], "eager": [None], "product": [None]}
    assert tables.ratios(row) == [2.0] and tables.ratios(row, "eager") == [4 / 5]
    assert trials.row(tmp_path, SMALL, 5, 2) is None
    head, (line, last) = tables.trials([row])
    each = [SMALL, row["machine"], "4 to 4", "4", ">4", "2", "2.0x (2.0x to 2.0x)", "-"]
    assert line == [*each, "4", "2", "2.0x"] and last[6] == last[-1] == "2.0x"
    assert len(head) == len(line) == len(last) and row["machine"].endswith(", 1 cores")


def test_trials_by_the_mean_over_seeds() -> None:
    """Geometric means: stock's 6, 4, 4, 2 has its last at the fourth, ours 3, 2 at the second."""
    stock, ours = [[9.0, 4.0, 4.0, 1.0], [4.0] * 4], [[9.0, 1.0, 1.0, 1.0], [1.0, 4.0, 4.0, 4.0]]
    row = {"trials": 4, "curves_us": {"stock": stock, "ours": ours}}
    assert tables.of_means(row) == (4, 2)
    row["curves_us"] = {"stock": ours, "ours": stock}
    assert tables.of_means(row) == (2, 4)
    row["curves_us"] = {"stock": ours, "ours": [[3.0] * 4] * 2}
    assert tables.of_means(row) == (2, 5)


def test_the_search_of_a_run_has_its_time_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    row = search_overhead.measure(SMALL, 4, 1)
    assert row["trials"] == 4 and row["best_us"] > 0 and not row["failures"]
    assert 0 < row["overhead_s"] < row["seconds"] and row["search_cpu_s"] > 0
    assert row["share"] == pytest.approx(row["overhead_s"] / row["seconds"], abs=0.01)
    head, (cells,) = tables.overhead([row])
    assert len(head) == len(cells) and cells[:3] == [SMALL, "4", "1"] and cells[5].endswith("%")


def test_records_of_one_processor_are_compared(logs: Path, tmp_path: Path) -> None:
    found = RecordStore(logs).records
    portable = [replace(r, target={**r.target, "arch": loop_tasks.PORTABLE}) for r in found]
    RecordStore(tmp_path).append([*found, *portable])
    data = loading.load("llvm", [tmp_path], None, False)
    assert len(data.groups) == len(data.source) == 1 and data.groups == data.own
    assert data.target.attrs["mcpu"] == found[0].target["arch"] and "1 cores" in data.machine
    context, candidates = data.stock.schedules(data.groups[0])
    assert len(candidates) == 12 and context.target.attrs["mcpu"] == found[0].target["arch"]
    scores = data.stock.train(data.groups, 0)(data.groups[0])
    assert scores.shape == (12,) and len(set(scores.tolist())) > 1
    assert data.stock.with_stores(data.groups[0]).shape == (12, len(FEATURES) + 2 * 164)
    odd = [replace(r, target={**r.target, "cores": 7}) for r in found]
    RecordStore(tmp_path).append(odd)
    with pytest.raises(SystemExit, match="one processor"):
        loading.load("llvm", [tmp_path], None, False)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 9, 11}, raising=False)
    assert core_sets.split_cores(2, 2) == [[3, 5], [7, 9]]
    with pytest.raises(SystemExit, match="5 cores"):
        core_sets.split_cores(3, 2)
    with pytest.raises(SystemExit, match="no task nothing"):
        loop_tasks.named(["nothing"])

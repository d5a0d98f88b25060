"""Upkeep of stores: counted, merged and pruned without losing what nobody said would go."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from test_records import record

from tests.kernel import model_cases
from tvmcap.base.codegen import make_target
from tvmcap.base.errors import ConfigError, RecordError
from tvmcap.kernel import upkeep
from tvmcap.kernel.fingerprint import fingerprint
from tvmcap.kernel.records import FILE_NAME, RecordStore

GARBAGE = b"no record\n\xff\xfe{}\n"


def store_of(folder: Path, *records, garbage: bytes = b"") -> RecordStore:
    store = RecordStore(folder)
    store.append(records)
    if garbage:
        with store.path.open("ab") as file:
            file.write(garbage)
    return RecordStore(folder)


def some(count: int, **changes: object) -> list:
    rng = np.random.default_rng()
    return [record(i, float(us), **changes) for i, us in enumerate(rng.permutation(count) + 1.0)]


def lines(folder: Path) -> list[bytes]:
    return (folder / FILE_NAME).read_bytes().splitlines(keepends=True)


def test_status_counts_by_target_template_and_state(tmp_path: Path) -> None:
    mine = fingerprint(make_target("llvm"))
    made = model_cases.records(count=2)[:3]
    store_of(
        tmp_path,
        record(1, target=mine),
        record(2, None, target=mine),
        record(3, target=mine, sizes={"rows": 1}),
        record(4, target=mine, tvm="0.1"),
        record(5, target={**mine, "arch": "other"}),
        made[0],
        dataclasses.replace(made[1], template_hash="old"),
        garbage=GARBAGE,
    )
    (tmp_path / "hopper_gemm.model.json").write_text("{}")
    found = upkeep.status(tmp_path)
    assert (found.records, found.bad_lines, found.models) == (7, 2, ("hopper_gemm.model.json",))
    counts = {(h.template, h.state): (h.records, h.tasks) for h in found.held}
    assert counts == {
        ("fake", "ok"): (2, 2),
        ("fake", "failed"): (1, 1),
        ("fake", "other_tvm"): (1, 1),
        ("fake", "other_target"): (1, 1),
        ("hopper_gemm", "ok"): (1, 1),
        ("hopper_gemm", "stale_template"): (1, 1),
    }
    assert {h.target for h in found.held if h.template == "hopper_gemm"} == {"cuda sm_90a"}
    assert found.to_json()["held"][0].keys() == {"target", "template", "state", "records", "tasks"}


def test_merge_loses_and_doubles_nothing(tmp_path: Path) -> None:
    a, b, c = (record(tile, 1.0 + tile) for tile in (1, 2, 3))
    again = dataclasses.replace(a, median_us=9.0)
    store_of(tmp_path / "one", a, b, garbage=GARBAGE)
    store_of(tmp_path / "two", b, c, again)
    store_of(tmp_path / "into", c, garbage=b"torn")
    before = (tmp_path / "one" / FILE_NAME).read_bytes()
    done = upkeep.merge([tmp_path / "one", tmp_path / "two"], tmp_path / "into")
    assert (done.added, done.present) == (3, 2)
    assert done.bad_lines == {str(tmp_path / "one"): 2}
    merged = RecordStore(tmp_path / "into")
    assert merged.records == [c, a, b, again] and merged.bad_lines == 1
    assert (tmp_path / "one" / FILE_NAME).read_bytes() == before
    assert upkeep.merge([tmp_path / "one", tmp_path / "two"], tmp_path / "into").added == 0
    assert upkeep.merge([tmp_path / "one"], tmp_path / "new" / "store").added == 2


def _merge_into(folder: str, source: str) -> None:
    upkeep.merge([source], folder)


def _append_to(folder: str, first: int) -> None:
    store = RecordStore(Path(folder))
    for i in range(20):
        store.append([record(first + i, features=[0.5] * 200)])


def _prune_often(folder: str) -> None:
    for _ in range(5):
        upkeep.prune(folder, best=200)


def test_merging_pruning_and_tuning_at_once(tmp_path: Path) -> None:
    """Two merges of overlapping sources, two tuners and a pruner; nobody's record is lost."""
    into = str(tmp_path / "into")
    store_of(tmp_path / "into", record(0, tvm="0.1"))
    store_of(tmp_path / "one", *(record(i) for i in range(100, 140)))
    store_of(tmp_path / "two", *(record(i) for i in range(120, 160)))
    context = multiprocessing.get_context("fork")
    work = [
        (_merge_into, into, str(tmp_path / "one")),
        (_merge_into, into, str(tmp_path / "two")),
        (_append_to, into, 200),
        (_append_to, into, 300),
        (_prune_often, into),
    ]
    workers = [context.Process(target=f, args=args) for f, *args in work]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    store = RecordStore(Path(into))
    assert store.bad_lines == 0
    tiles = sorted(r.knobs["tile"] for r in store.records)
    assert tiles == [*range(100, 160), *range(200, 220), *range(300, 320)]


def test_prune_keeps_the_best_a_sample_and_garbage(tmp_path: Path) -> None:
    measured = some(40)
    slow, failed = some(12, sizes={"rows": 1}), record(99, None)
    old = [record(1, 0.5, tvm="0.1"), record(1, 0.5, tvm="0.1", sizes={"rows": 9})]
    known = model_cases.records(count=1)[0]
    stale = dataclasses.replace(known, template_hash="old")
    first = dataclasses.replace(measured[0], median_us=0.01)  # measured again, slower
    store_of(tmp_path, *old, first, *measured, *slow, failed, stale, known, garbage=GARBAGE)
    plan = upkeep.prune(tmp_path, best=3, sample=5, dry_run=True)
    assert len(lines(tmp_path)) == 60 and plan.dry_run
    done = upkeep.prune(tmp_path, best=3, sample=5)
    assert dataclasses.replace(done, dry_run=True) == plan
    counts = {"other_tvm": 2, "stale_template": 1, "superseded": 1, "surplus": 33 + 4}
    assert done.dropped == counts and done.kept == 8 + 8 + 1 and done.bad_lines == 2
    assert done.last_copies == 41
    after = RecordStore(tmp_path)
    assert len(after.records) == 17 and after.bad_lines == 2
    assert lines(tmp_path)[-2:] == GARBAGE.splitlines(keepends=True)
    times = sorted(r.median_us for r in after.records if r.median_us and r.sizes == {"rows": 16})
    assert times[:3] == [1.0, 2.0, 3.0]
    assert sum(r.sizes == {"rows": 1} for r in after.records) == 8
    assert known in after.records and first not in after.records
    assert upkeep.prune(tmp_path, best=3, sample=5).dropped == {}
    assert not list(tmp_path.glob("*.part"))


def test_prune_keeps_records_of_other_targets_and_unknown_templates(tmp_path: Path) -> None:
    other = {**record().target, "arch": "other"}
    kept = [record(1, 1.0), record(2, 2.0, target=other), record(3, 3.0, template="users")]
    store_of(tmp_path, *kept)
    assert upkeep.prune(tmp_path, best=1, sample=0).dropped == {}


def test_last_copies_are_those_that_no_other_store_has(tmp_path: Path) -> None:
    gone, safe, twice = record(1, tvm="0.1"), record(2, tvm="0.1"), record(3)
    store_of(tmp_path / "own", gone, safe, twice, twice)
    store_of(tmp_path / "other", safe)
    others = [tmp_path / "own", tmp_path / "other", tmp_path / "none"]
    done = upkeep.prune(tmp_path / "own", others=others)
    assert done.dropped == {"other_tvm": 2, "superseded": 1} and done.last_copies == 1
    assert RecordStore(tmp_path / "own").records == [twice]


def test_a_prune_that_cannot_write_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    store = store_of(tmp_path, record(1, tvm="0.1"), record(2))
    before = store.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tvmcap.kernel.records.os.fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        upkeep.prune(tmp_path)
    assert store.path.read_bytes() == before and not list(tmp_path.glob("*.part"))


def test_a_prune_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, *(record(i, tvm="0.1") for i in range(2000)), record(5000))
    before = store.path.read_bytes()
    context = multiprocessing.get_context("fork")
    after = before.splitlines(keepends=True)[-1]
    for i in range(8):
        pruner = context.Process(target=upkeep.prune, args=(tmp_path,))
        pruner.start()
        pruner.join(0.05 * i)
        pruner.kill()
        pruner.join()
        assert store.path.read_bytes() in (before, after)
    assert upkeep.prune(tmp_path).kept == 1 and store.path.read_bytes() == after
    assert not list(tmp_path.glob("*.part"))


def test_a_tuner_goes_on_after_its_store_was_pruned(tmp_path: Path) -> None:
    tuner = store_of(tmp_path, *(record(i, tvm="0.1") for i in range(30)), record(50))
    upkeep.prune(tmp_path)
    tuner.append([record(60)])
    assert [r.knobs["tile"] for r in tuner.records] == [50, 60] and tuner.bad_lines == 0


@pytest.mark.parametrize("work", ["status", "merge", "prune"])
def test_what_is_no_store_is_refused(tmp_path: Path, work: str) -> None:
    inner = store_of(tmp_path / "folder" / "llvm", record())
    (tmp_path / "file").write_text("")
    call = {
        "status": upkeep.status,
        "merge": lambda folder: upkeep.merge([folder], tmp_path / "into"),
        "prune": upkeep.prune,
    }[work]
    for name, said in (("none", "no such folder"), ("file", "no such folder"), ("folder", "llvm")):
        with pytest.raises(ConfigError, match=said):
            call(tmp_path / name)
    assert not (tmp_path / "into").exists() and len(RecordStore(inner.folder).records) == 1


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    store_of(tmp_path, record())
    with pytest.raises(ConfigError, match="leave out one"):
        upkeep.merge([tmp_path], tmp_path / ".." / tmp_path.name)
    with pytest.raises(ConfigError, match="at least 1"):
        upkeep.prune(tmp_path, best=0)


def test_an_empty_store_is_a_store(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"")
    assert upkeep.status(tmp_path).held == () and upkeep.prune(tmp_path).kept == 0
    assert upkeep.merge([tmp_path], tmp_path / "into").added == 0

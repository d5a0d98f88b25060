"""Records: safe on disk, and used only where they hold."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import fake_template as fake
import pytest

from tvmcap.base.config import Config
from tvmcap.base.errors import RecordError
from tvmcap.kernel import database, tasks
from tvmcap.kernel.fingerprint import fingerprint, same_target, tvm_version
from tvmcap.kernel.records import Record, RecordStore, TaskKey
from tvmcap.kernel.stores import open_stores

KEY = TaskKey("template", "w0", "fake", "h0")


def record(tile: int = 4, us: float | None = 5.0, **changes: object) -> Record:
    base = Record(
        kind="template",
        workload={"k": 8, "template": "fake"},
        workload_hash="w0",
        sizes={"rows": 16},
        template="fake",
        template_hash="h0",
        knobs={"mode": 0, "tile": tile},
        trace=None,
        target=fingerprint(fake.target()),
        tvm=tvm_version(),
        median_us=us,
        p10_us=us,
        p90_us=us,
        samples=7,
        error=None if us is not None else {"cause": "compile", "message": "no"},
        seed=0,
        date="2026-11-29T00:00:00+00:00",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    return open_stores(Config(log_dir=str(tmp_path / "log")), fake.target())


def test_round_trip(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.append([record(), record(8, None)])
    assert RecordStore(tmp_path).records == [record(), record(8, None)]
    lines = store.path.read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line)["sum"] for line in lines)


def test_bad_lines_are_counted_kept_and_never_rewritten(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.append([record(4)])
    good = store.path.read_bytes()
    altered = good.replace(b'"median_us":5.0', b'"median_us":1.0')
    junk = b"\xff\xfe garbage\n\n   \n{}\n[1]\nnull\n" + altered + b"[" * 100_000 + b"\n"
    store.path.write_bytes(junk + good)
    again = RecordStore(tmp_path)
    assert [r.median_us for r in again.records] == [5.0]
    assert again.bad_lines == 6
    again.append([record(8)])
    assert store.path.read_bytes().startswith(junk + good)
    assert len(RecordStore(tmp_path).records) == 2


def test_a_torn_last_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.append([record(4), record(8)])
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[:-20])
    torn = RecordStore(tmp_path)
    assert [r.knobs["tile"] for r in torn.records] == [4]
    torn.append([record(16)])
    assert [r.knobs["tile"] for r in torn.records] == [4, 16]
    assert torn.bad_lines == 1


def _append_many(folder: str, first: int) -> None:
    store = RecordStore(Path(folder))
    for i in range(25):
        store.append([record(first + i, features=[0.5] * 200)])


def test_two_writers_on_one_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(str(tmp_path), n)) for n in (0, 1000)]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    store = RecordStore(tmp_path)
    assert store.bad_lines == 0
    assert sorted(r.knobs["tile"] for r in store.records) == [*range(25), *range(1000, 1025)]


@pytest.mark.parametrize("kind", ["file in the way", "no rights"])
def test_unwritable_folder(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "log"
    if kind == "file in the way":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o500)
        if os.access(folder, os.W_OK):
            folder = Path("/proc/tvmcap")
    with pytest.raises(RecordError, match="log_dir="):
        RecordStore(folder).check_writable()


def test_best_is_the_fastest_right_one_and_the_later_time_counts(stores) -> None:
    target = fake.target()
    assert stores.best(KEY, {"rows": 16}, target) is None
    stores.append(
        [record(4, 5.0), record(8, 3.0), record(16, None), record(2, 1.0, sizes={"rows": 1})]
    )
    assert stores.best(KEY, {"rows": 16}, target).knobs["tile"] == 8
    stores.append([record(8, 9.0)])
    assert stores.best(KEY, {"rows": 16}, target).knobs["tile"] == 4
    assert [r.sizes["rows"] for r in stores.best_by_size(KEY, target)] == [1, 16]


def test_foreign_records_are_kept_counted_and_not_used(stores) -> None:
    target = fake.target()
    other_arch = {**fingerprint(target), "arch": "other"}
    other_cores = {**fingerprint(target), "cores": 64}
    stores.append(
        [
            record(4, 5.0),
            record(8, 1.0, target=other_arch),
            record(8, 1.0, target=other_cores),
            record(8, 1.0, tvm="0.1"),
            record(8, 1.0, template_hash="old"),
            record(2, None),
        ]
    )
    assert stores.best(KEY, {"rows": 16}, target).knobs["tile"] == 4
    stats = stores.stats(target, {"fake": "h0"})
    assert stats["status"] == {
        "ok": 1, "failed": 1, "other_target": 2, "other_tvm": 1, "stale_template": 1, "bad_lines": 0
    }  # fmt: skip
    assert stats["causes"] == {"compile": 1}


def test_unknown_parts_of_a_fingerprint_are_not_compared() -> None:
    card = {
        "kind": "cuda",
        "arch": "sm_90a",
        "features": [],
        "cores": None,
        "name": "H200",
        "units": 132,
    }
    assert same_target(card, {**card, "name": None, "units": None})
    assert same_target({**card, "name": None, "units": None}, card)
    assert not same_target(card, {**card, "units": 114})
    assert not same_target(card, {**card, "arch": "sm_100"})


def test_look_up_reads_all_stores_and_writes_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    target = fake.target()
    user = open_stores(Config(), target)
    assert user.writer.folder.is_relative_to(tmp_path / "user")
    assert not user.writer.folder.exists()
    user.append([record(4, 2.0)])
    mine = open_stores(Config(log_dir=str(tmp_path / "log")), target)
    mine.append([record(8, 3.0)])
    assert mine.writer.folder == tmp_path / "log"
    assert mine.best(KEY, {"rows": 16}, target).knobs["tile"] == 4
    mine.append([record(4, 7.0)])  # measured again, in the store that is read first
    assert mine.best(KEY, {"rows": 16}, target).knobs["tile"] == 8


@pytest.mark.parametrize("kind", ["memory", "json"])
def test_to_and_from_metaschedule(tmp_path: Path, kind: str) -> None:
    from tvm.s_tir import meta_schedule as ms

    (task,) = tasks.extract(fake.module(), fake.target(), fake.find)
    key = task.key
    made = [
        record(
            tile,
            us,
            workload=task.workload,
            workload_hash=key.workload_hash,
            template_hash=key.template_hash,
        )
        for tile, us in ((4, 5.0), (8, 3.0), (16, None))
    ]
    target = fake.target()
    folder = str(tmp_path)
    db = ms.database.MemoryDatabase()
    if kind == "json":
        db = ms.database.JSONDatabase(work_dir=folder)
    db = database.to_database(made, [task], target, db)
    if kind == "json":
        db = ms.database.JSONDatabase(work_dir=folder)
    back = database.from_database(db, [task], target)
    times = {r.candidate: r.median_us for r in back}
    assert times == pytest.approx({r.candidate: r.median_us for r in made if r.error is None})
    assert all(r.key == key and r.sizes == {"rows": 16} for r in back)

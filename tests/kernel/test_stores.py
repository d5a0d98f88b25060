"""Stores: records are used only where they hold, and looked up in the order of the folders."""

from __future__ import annotations

from pathlib import Path

import fake_template as fake
import pytest
from test_records import record

from tvmcap.base.config import Config
from tvmcap.kernel.fingerprint import fingerprint, same_target
from tvmcap.kernel.records import TaskKey
from tvmcap.kernel.stores import best_by_size, open_stores

KEY = TaskKey("template", "w0", "fake", "h0")


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    return open_stores(Config(log_dir=str(tmp_path / "log")), fake.target())


def test_best_is_the_fastest_right_one_and_the_later_time_counts(stores) -> None:
    target = fake.target()
    assert stores.best(KEY, {"rows": 16}, target) is None
    stores.append(
        [record(4, 5.0), record(8, 3.0), record(16, None), record(2, 1.0, sizes={"rows": 1})]
    )
    assert stores.best(KEY, {"rows": 16}, target).knobs["tile"] == 8
    stores.append([record(8, 9.0)])
    assert stores.best(KEY, {"rows": 16}, target).knobs["tile"] == 4
    timed = stores.timed(KEY, target)
    assert [(r.sizes["rows"], r.median_us) for r in timed] == [(1, 1.0), (16, 5.0), (16, 9.0)]
    assert best_by_size(timed) == timed[:2]


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

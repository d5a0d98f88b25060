"""Records: safe on disk, whatever happens to the process, the disk or other writers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import resource
import time
from collections import Counter
from pathlib import Path

import fake_template as fake
import pytest
from filelock import FileLock

from tvmcap.base.errors import RecordError
from tvmcap.kernel.fingerprint import fingerprint, tvm_version
from tvmcap.kernel.records import Record, RecordStore, canonical, digest


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


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": 5},
        {"target": ["llvm"]},
        {"median_us": "5"},
        {"median_us": float("nan")},
        {"p90_us": float("inf")},
        {"median_us": -1.0},
        {"knobs": None},
        {"kind": "trace", "trace": None},
        {"kind": "other"},
        {"error": "compile"},
        {"moon": 1},
    ],
)
def test_a_line_with_values_that_no_measurement_has_is_no_record(change: dict) -> None:
    data = {**dataclasses.asdict(record()), **change}
    with pytest.raises(ValueError):
        Record.from_line(canonical({**data, "sum": digest(data)}))


def _append_until_killed(folder: str, told: object) -> None:
    store = RecordStore(Path(folder))
    for i in range(100_000):
        store.append([record(i + 1, features=[0.5] * 400)])
        told.send(i + 1)  # type: ignore[attr-defined]


def test_kill_at_any_moment_loses_no_written_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    written: list[int] = []
    for _ in range(8):
        told, tell = context.Pipe(duplex=False)
        writer = context.Process(target=_append_until_killed, args=(str(tmp_path), tell))
        writer.start()
        tell.close()
        assert told.poll(20)
        time.sleep(random.random() * 0.05)
        writer.kill()
        writer.join()
        with contextlib.suppress(EOFError, OSError):
            while True:
                written.append(told.recv())
        store = RecordStore(tmp_path)
        kept = [r.knobs["tile"] for r in store.records]
        # at most one more of each writer than it told of, and each torn line counted
        assert Counter(written) <= Counter(kept)
        assert len(kept) - len(written) + store.bad_lines <= 8
    RecordStore(tmp_path).append([record(7)])
    assert RecordStore(tmp_path).records[-1] == record(7)


def test_a_record_is_on_disk_once_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def watch(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))
        sync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    store = RecordStore(tmp_path / "log")
    for tile in (4, 8):
        store.append([record(tile)])
        file = store.path.stat()
        assert [size for inode, size in synced if inode == file.st_ino][-1] == file.st_size
    assert store.folder.stat().st_ino in dict(synced)  # the new file's name as well


def _limit_file_size(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def _append_beyond(folder: str, nbytes: int, told: object) -> None:
    store = RecordStore(Path(folder))
    _limit_file_size(nbytes)
    try:
        store.append([record(8, features=[0.5] * 4000)])
    except RecordError as e:
        told.send(str(e))  # type: ignore[attr-defined]


def test_what_does_not_fit_on_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The system takes a part of the line and refuses the rest, as a full disk does."""
    store = RecordStore(tmp_path)
    store.append([record(4)])
    before = store.path.read_bytes()
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    args = (str(tmp_path), len(before) + 1000, tell)
    writer = context.Process(target=_append_beyond, args=args)
    writer.start()
    assert told.poll(20) and "log_dir=" in told.recv()
    writer.join()
    assert store.path.read_bytes() == before
    store.append([record(16)])
    again = RecordStore(tmp_path)
    assert again.bad_lines == 0 and [r.knobs["tile"] for r in again.records] == [4, 16]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    store = RecordStore(tmp_path / "none")
    store.folder = tmp_path  # not read: /dev/full has no end
    with pytest.raises(RecordError, match=r"No space left on device.*log_dir="):
        store.append([record()])


def test_a_store_that_another_holds_for_long_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmcap.kernel.records._LOCK_TIMEOUT_S", 0.1)
    with (
        FileLock(tmp_path / "records.jsonl.lock"),
        pytest.raises(RecordError, match="locked by another tuner"),
    ):
        RecordStore(tmp_path).append([record()])
    RecordStore(tmp_path).append([record()])


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

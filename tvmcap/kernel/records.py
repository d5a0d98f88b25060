"""Tuning records: one checksummed JSON line a measurement, appended safely, read line by line.

A line stands alone: it holds what was measured, on what, with which software, and how it went, so
that files can be merged by concatenation and read by anything. A line that cannot be read is
counted and left where it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tvmcap.base.errors import RecordError

log = logging.getLogger("tvmcap")

FILE_NAME = "records.jsonl"
_LOCK_TIMEOUT_S = 30.0
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "workload_hash", "tvm", "date"), (str,)),
    **dict.fromkeys(("workload", "sizes", "target"), (dict,)),
    **dict.fromkeys(("template", "template_hash"), (str, type(None))),
    **dict.fromkeys(("knobs", "error"), (dict, type(None))),
    **dict.fromkeys(("trace", "features"), (list, type(None))),
    **dict.fromkeys(("median_us", "p10_us", "p90_us"), (float, int, type(None))),
    **dict.fromkeys(("samples", "seed"), (int,)),
}


def canonical(data: Any) -> str:
    """Return the one JSON text of ``data``: keys sorted, no spaces."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """Return 16 hexadecimal digits of the sha256 of ``canonical(data)``."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TaskKey:
    """What records of one task have in common: a workload, and the template of its kernels."""

    kind: str
    workload_hash: str
    template: str | None = None
    template_hash: str | None = None


@dataclass(frozen=True)
class Record:
    """One measurement of one candidate.

    Attributes
    ----------
    kind: ``"template"`` (``knobs`` holds the candidate) or ``"trace"`` (``trace`` does, as
        MetaSchedule writes it).
    workload: what identifies the computation, as JSON data; ``workload_hash`` is its digest.
    sizes: values of the free extents: ``{"rows": 16}`` for a template, ``{"s0": 16}`` in order for
        a loop nest.
    target: the fingerprint of the target and machine that measured.
    median_us, p10_us, p90_us: microseconds a call; None where it failed.
    samples: how many timings the median is of.
    features: what the cost model saw of a template's candidate, so that any later run can learn
        from the line alone.
    error: ``{"cause": ..., "message": ...}`` of a failure, else None.
    """

    kind: str
    workload: dict[str, Any]
    workload_hash: str
    sizes: dict[str, int]
    template: str | None
    template_hash: str | None
    knobs: dict[str, Any] | None
    trace: list[Any] | None
    target: dict[str, Any]
    tvm: str
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    samples: int
    error: dict[str, str] | None
    seed: int
    date: str
    features: list[float] | None = None

    @property
    def key(self) -> TaskKey:
        """The task this record belongs to."""
        return TaskKey(self.kind, self.workload_hash, self.template, self.template_hash)

    def is_of(self, key: TaskKey) -> bool:
        """Whether the record is one of a task; quick, for a run asks it of thousands."""
        return self.workload_hash == key.workload_hash and self.key == key

    @property
    def candidate(self) -> str:
        """Canonical text of the knobs or the trace: equal for equal candidates."""
        return canonical(self.knobs if self.kind == "template" else self.trace)

    def to_line(self) -> str:
        """Return the line that a store holds, checksum included, without the newline."""
        data = vars(self)
        return canonical({**data, "sum": digest(data)})

    @staticmethod
    def from_line(line: str) -> Record:
        """Read what ``to_line`` wrote; raises ValueError for anything else."""
        try:
            data = json.loads(line)
            checksum = data.pop("sum")
            if digest(data) != checksum:
                raise ValueError("checksum differs")
            _check(data)
            return Record(**data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, RecursionError) as e:
            raise ValueError(f"not a record: {e!r}") from e


def _check(data: dict[str, Any]) -> None:
    """Raise ValueError for values that no measurement has, whoever wrote them down."""
    wrong = [n for n, types in _TYPES.items() if n in data and not isinstance(data[n], types)]
    if wrong:
        raise ValueError(f"{wrong[0]} is {data[wrong[0]]!r}")
    if data["kind"] not in ("template", "trace"):
        raise ValueError(f"unknown kind {data['kind']!r}")
    if data["knobs" if data["kind"] == "template" else "trace"] is None:
        raise ValueError("no candidate")
    if not all(type(size) is int and size > 0 for size in data["sizes"].values()):
        raise ValueError(f"sizes {data['sizes']!r}")
    texts = data["error"] and [data["error"].get(name) for name in ("cause", "message")]
    if texts is not None and not all(isinstance(text, str) for text in texts or [None]):
        raise ValueError(f"error {data['error']!r}")
    times = [data[n] for n in ("median_us", "p10_us", "p90_us") if data[n] is not None]
    if not all(math.isfinite(us) and us > 0 for us in times):
        raise ValueError(f"times {times}")


@dataclass
class RecordStore:
    """The records of one folder. Reading needs no lock; an append takes one and is synced.

    Attributes
    ----------
    folder: where ``records.jsonl`` and its lock are.
    records: what was read so far, in file order; ``refresh`` reads what was appended since.
    bad_lines: lines that are no records.
    """

    folder: Path
    records: list[Record] = field(default_factory=list)
    bad_lines: int = 0
    _offset: int = 0
    _inode: int | None = None

    def __post_init__(self) -> None:
        """Read what is there; a folder that does not exist is an empty store."""
        self.folder = Path(self.folder)
        self.refresh()

    @property
    def path(self) -> Path:
        """The file of records."""
        return self.folder / FILE_NAME

    def refresh(self) -> None:
        """Read the complete lines appended since the last call; all where the file is another."""
        try:
            with self.path.open("rb") as f:
                found = os.fstat(f.fileno())
                if self._inode not in (None, found.st_ino) or found.st_size < self._offset:
                    self.records, self.bad_lines, self._offset = [], 0, 0
                self._inode = found.st_ino
                f.seek(self._offset)
                data = f.read()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as e:
            raise RecordError(
                f"cannot read tuning records from {self.path}: {e}; check its rights"
            ) from e
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for raw in data[:complete].split(b"\n"):
            if not raw.strip():
                continue
            try:
                self.records.append(Record.from_line(raw.decode("utf-8")))
            except (ValueError, UnicodeDecodeError):
                self.bad_lines += 1

    def check_writable(self) -> None:
        """Create the folder and append nothing to the file; raises RecordError where that fails."""
        self.append([])

    def append(self, records: Iterable[Record]) -> None:
        """Write records at the end as whole lines, and sync them to disk.

        Raises RecordError where that fails; what was in the file is then all that is in it.
        """
        with self.locked():
            self._add(records)
        self.refresh()

    def append_missing(self, records: Iterable[Record]) -> int:
        """Append the records that are not here yet, each once; return how many those are."""
        with self.locked():
            self.refresh()
            known = {record.to_line() for record in self.records}
            lines = {record.to_line(): record for record in records}
            missing = [record for line, record in lines.items() if line not in known]
            self._add(missing)
        self.refresh()
        return len(missing)

    def replace(self, data: bytes) -> None:
        """Put ``data`` in place of all lines, whole or not at all; the caller holds the lock."""
        path = self.path.resolve()
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            shutil.copymode(path, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self.refresh()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out; raises RecordError where the folder cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / (FILE_NAME + ".lock"), timeout=_LOCK_TIMEOUT_S):
                yield
        except Timeout as e:
            raise RecordError(
                f"{self.folder} has been locked by another tuner for {_LOCK_TIMEOUT_S:.0f} s; "
                "wait for it, or give log_dir= another folder"
            ) from e
        except OSError as e:
            raise RecordError(
                f"cannot write tuning records to {self.folder}: {e.strerror or e}; "
                "give log_dir= a folder that you may write to, on a disk with room"
            ) from e

    def _add(self, records: Iterable[Record]) -> None:
        data = "".join(record.to_line() + "\n" for record in records).encode()
        new = not self.path.exists()
        _append(self.path, data)
        if new:
            _sync_folder(self.folder)


def _append(path: Path, data: bytes) -> None:
    """Write at the end of a file and sync it; whole or not at all, as far as this can be undone."""
    with path.open("ab+", buffering=0) as f:
        end = f.seek(0, os.SEEK_END)
        if end and data:
            f.seek(-1, os.SEEK_END)
            data = data if f.read(1) == b"\n" else b"\n" + data
        try:
            while data:
                data = data[f.write(data) :]
            os.fsync(f.fileno())
        except OSError:
            with suppress(OSError):
                f.truncate(end)
            raise


def _sync_folder(folder: Path) -> None:
    """Sync the name of a new file, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

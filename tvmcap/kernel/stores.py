"""The folders of tuning records: which are read and written, and which records count here.

A record of another target, TVM version or template source is kept, counted and not used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmcap.base.config import Config
from tvmcap.base.errors import ConfigError
from tvmcap.kernel.fingerprint import fingerprint, same_target, tvm_version
from tvmcap.kernel.records import FILE_NAME, Record, RecordStore, TaskKey, canonical

log = logging.getLogger("tvmcap")

SHIPPED = Path(__file__).parent.parent / "tuning_logs"
"""The records that ship with tvmcap, one folder a kind of target."""


@dataclass(frozen=True)
class Stores:
    """Stores to read from, best first, and the one to write to.

    ``machine`` is what measures where this machine does not: the name, units and memory_gib of a
    fingerprint.
    """

    stores: tuple[RecordStore, ...]
    writer: RecordStore
    machine: Mapping[str, Any] | None = None

    def fingerprint(self, target: Any) -> dict[str, Any]:
        """Return the fingerprint of a target on the machine that measures."""
        return {**fingerprint(target), **(self.machine or {})}

    def append(self, records: Iterable[Record]) -> None:
        """Append to the store that is written to."""
        self.writer.append(records)

    def usable(self, target: Any, key: TaskKey | None = None) -> list[Record]:
        """List records made for this target by this TVM (of one task), failures too."""
        mine = self.fingerprint(target)
        return [
            record
            for store in self.stores
            for record in store.records
            if (key is None or record.is_of(key))
            and record.tvm == tvm_version()
            and same_target(record.target, mine)
        ]

    def history(
        self, key: TaskKey, target: Any, sizes: Mapping[str, int] | None = None
    ) -> list[Record]:
        """List the usable records of a task, at given sizes or at all, as they were written."""
        return [r for r in self.usable(target, key) if sizes is None or r.sizes == dict(sizes)]

    def best(
        self,
        key: TaskKey,
        sizes: Mapping[str, int],
        target: Any,
        admits: Callable[[Record], bool] | None = None,
    ) -> Record | None:
        """Return the fastest candidate at these sizes; of two timings the later counts.

        ``admits`` says of a record whether its candidate can serve the task; all can where None.
        """
        return next(iter(self.timed(key, target, admits, sizes)), None)

    def timed(
        self,
        key: TaskKey,
        target: Any,
        admits: Callable[[Record], bool] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> list[Record]:
        """List the latest timing of each candidate that ran, at given sizes or at each of all.

        Smallest sizes first, at each the fastest first; ``admits`` as of ``best``.
        """
        latest: dict[tuple[str, str], Record] = {}
        for store in reversed(self.stores):
            for record in store.records:
                if record.is_of(key) and (sizes is None or record.sizes == dict(sizes)):
                    latest[canonical(record.sizes), record.candidate] = record
        usable = set(map(id, self.history(key, target, sizes)))
        ran = [
            r
            for r in latest.values()
            if id(r) in usable and r.error is None and r.median_us is not None
            if admits is None or admits(r)
        ]
        return sorted(ran, key=lambda r: (sorted(r.sizes.items()), r.median_us))

    def stats(
        self, target: Any, template_hashes: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Count records by status and failures by cause.

        Statuses: ok, failed, other_target, other_tvm, stale_template (source hash differs from
            ``template_hashes``), bad_lines.
        """
        mine, status, causes = self.fingerprint(target), Counter[str](), Counter[str]()
        for record in (r for store in self.stores for r in store.records):
            name = state(record, mine, template_hashes or {})
            status[name] += 1
            if name == "failed" and record.error is not None:
                causes[record.error["cause"]] += 1
        status["bad_lines"] = sum(store.bad_lines for store in self.stores)
        return {"status": dict(status), "causes": dict(causes)}


def best_by_size(timed: Iterable[Record]) -> list[Record]:
    """Return the first record at each of the sizes of ``Stores.timed``.

    Sizes at which the rule's own kernel (recorded with an empty trace) is the best have none.
    """
    first: dict[str, Record] = {}
    for record in timed:
        first.setdefault(canonical(record.sizes), record)
    return [record for record in first.values() if record.trace != []]


def state(record: Record, mine: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """Say whether a record counts: a status of ``Stores.stats``."""
    if not same_target(record.target, mine):
        return "other_target"
    if record.tvm != tvm_version():
        return "other_tvm"
    if (
        record.template is not None
        and hashes.get(record.template, record.template_hash) != record.template_hash
    ):
        return "stale_template"
    return "ok" if record.error is None else "failed"


def folders(config: Config, kind: str) -> tuple[Sequence[Path], Path]:
    """Return the folders to read, in order, and the one to write, for targets of one kind."""
    from platformdirs import user_data_path

    user = user_data_path("tvmcap") / "tuning_logs" / kind
    mine = [Path(config.log_dir).expanduser()] if config.log_dir else []
    return [*mine, user, SHIPPED / kind], (mine or [user])[0]


def template_hashes() -> dict[str, str]:
    """Return the source hash of each template that ships or is registered, as the code is now."""
    from tvmcap.kernel.registry import registered
    from tvmcap.kernel.template import source_hash
    from tvmcap.schedules import TEMPLATES

    return {template.name: source_hash(template) for template in (*TEMPLATES, *registered())}


def stale_shipped() -> tuple[int, int]:
    """Count the records that ship for templates, and those of other source than today's."""
    hashes = template_hashes()
    found = [r for path in SHIPPED.glob("*") for r in RecordStore(path).records if r.template]
    return len(found), sum(r.template_hash != hashes.get(str(r.template)) for r in found)


def known_folders(config: Config) -> list[Path]:
    """Return every folder that builds read records from, of whatever target, where it exists."""
    from platformdirs import user_data_path

    mine = [Path(config.log_dir).expanduser()] if config.log_dir else []
    user = sorted((user_data_path("tvmcap") / "tuning_logs").glob("*"))
    shipped = sorted(SHIPPED.glob("*"))
    return [f for f in [*mine, *user, *shipped] if (f / FILE_NAME).is_file()]


def open_store(folder: Path) -> RecordStore:
    """Open the store of a folder that must be one; raises ConfigError where it is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder of records")
    if not (folder / FILE_NAME).is_file():
        found = sorted(path.parent.name for path in folder.glob(f"*/{FILE_NAME}"))
        hint = f"its folders {', '.join(found)} are stores" if found else "tvmcap tune writes it"
        raise ConfigError(f"{folder} is no store of records: it has no {FILE_NAME} ({hint})")
    return RecordStore(folder)


def open_stores(config: Config, target: Any) -> Stores:
    """Open ``log_dir``, the user's folder and the shipped logs; write to the first there is.

    Records of other targets in these folders are kept and skipped. Nothing is created until the
    first append.
    """
    read, write = folders(config, target.kind.name)
    stores = {folder: RecordStore(folder) for folder in dict.fromkeys([*read, write])}
    for folder, store in stores.items():
        if store.bad_lines:
            log.warning(
                "%s: %d lines are no records; kept and not used",
                folder / FILE_NAME,
                store.bad_lines,
            )
    return Stores(tuple(stores.values()), stores[write])

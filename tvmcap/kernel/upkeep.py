"""Upkeep of record stores: what one holds, several made one, and what no longer serves dropped.

Stores stay usable meanwhile: whoever writes holds the lock that tuners take, and a file is replaced
whole or not at all. Lines that are no records are counted and left where they are.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvmcap.base.codegen import make_target
from tvmcap.base.errors import ConfigError
from tvmcap.kernel import models
from tvmcap.kernel.fingerprint import fingerprint, tvm_version
from tvmcap.kernel.gain import LEAST
from tvmcap.kernel.records import Record, RecordStore, canonical
from tvmcap.kernel.stores import open_store, state, template_hashes

BEST = 3
SAMPLE = LEAST
"""Candidates beside the best that ``prune`` keeps for a cost model, by default."""
OTHER_TVM, STALE, SUPERSEDED, SURPLUS = "other_tvm", "stale_template", "superseded", "surplus"


@dataclass(frozen=True)
class Held:
    """Records of a store that share target, template and state.

    ``state`` is a status of ``Stores.stats``, as seen from this machine and this source.
    """

    target: str
    template: str
    state: str
    records: int
    tasks: int


@dataclass(frozen=True)
class StoreStatus:
    """What a store holds: records, lines that are none, cost models beside them, bytes in all."""

    folder: Path
    records: int
    bad_lines: int
    bytes: int
    held: tuple[Held, ...]
    models: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "folder": str(self.folder)}


@dataclass(frozen=True)
class Merged:
    """What merging did: records added, records that were there, and the sources' bad lines."""

    into: Path
    added: int
    present: int
    bad_lines: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "into": str(self.into)}


@dataclass(frozen=True)
class Pruned:
    """What pruning dropped, or with ``dry_run`` would drop.

    Attributes
    ----------
    dropped: records by reason: ``"other_tvm"``, ``"stale_template"`` (other source of its
        template), ``"superseded"`` (measured again later) or ``"surplus"`` (neither among the best
        nor in the sample).
    last_copies: how many of them are in no other store that was looked at, and thus gone.
    bad_lines: lines that are no records; they stay.
    bytes: of the file before and after.
    """

    folder: Path
    kept: int
    dropped: Mapping[str, int]
    last_copies: int
    bad_lines: int
    bytes: tuple[int, int]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "folder": str(self.folder)}


def target_text(recorded: Mapping[str, Any]) -> str:
    """Write a fingerprint as ``cuda sm_90a NVIDIA H200``."""
    cores = recorded.get("cores")
    parts = [recorded.get("kind"), recorded.get("arch"), recorded.get("name")]
    parts += [f"{cores} threads"] if cores else []
    parts += recorded.get("features") or []
    return " ".join(str(part) for part in parts if part)


def status(folder: str | Path) -> StoreStatus:
    """Count what a store holds; raises ConfigError where the folder is none."""
    store = open_store(Path(folder))
    hashes, mine = template_hashes(), _Machines()
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for r in store.records:
        name = state(r, mine.of(str(r.target.get("kind"))), hashes)
        groups[target_text(r.target), r.template or "loop nest", name].append(r)
    held = [
        Held(*key, len(found), len({(r.key, canonical(r.sizes)) for r in found}))
        for key, found in sorted(groups.items())
    ]
    beside = models.files(store.folder)
    total = sum(path.stat().st_size for path in (store.path, *beside))
    return StoreStatus(
        store.folder,
        len(store.records),
        store.bad_lines,
        total,
        tuple(held),
        tuple(path.name for path in beside),
    )


class _Machines:
    """Fingerprints of this machine by kind of target; empty for kinds that tvmcap knows not."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}

    def of(self, kind: str) -> dict[str, Any]:
        if kind not in self._found:
            known = kind in ("llvm", "cuda")
            self._found[kind] = fingerprint(make_target(kind)) if known else {}
        return self._found[kind]


def merge(sources: Iterable[str | Path], into: str | Path) -> Merged:
    """Append what the stores ``sources`` hold and ``into`` does not; sources stay as they are.

    A record is the same as another where all it says is. Others may write to any of the stores
    meanwhile: what a source receives after it was read is not merged.

    Raises
    ------
    ConfigError: a source is no store, or is ``into`` itself.
    RecordError: ``into`` cannot be written.
    """
    folder = Path(into)
    stores = [open_store(Path(source)) for source in sources]
    for store in stores:
        if store.folder.resolve() == folder.resolve():
            raise ConfigError(f"{folder} is a source and where to merge into: leave out one")
    records = [record for store in stores for record in store.records]
    added = RecordStore(folder).append_missing(records)
    bad = {str(store.folder): store.bad_lines for store in stores if store.bad_lines}
    return Merged(folder, added, len(records) - added, bad)


def prune(
    folder: str | Path,
    *,
    best: int = BEST,
    sample: int = SAMPLE,
    dry_run: bool = False,
    others: Iterable[str | Path] = (),
) -> Pruned:
    """Drop the records of a store that serve neither builds nor a cost model.

    Kept are, of every target, task and size, the ``best`` fastest candidates and ``sample`` others,
    failures among them, drawn evenly and always the same. Dropped is what was made by another TVM
    or for another source of its template, too. Records of templates that this process does not know
    count as today's.

    Parameters
    ----------
    folder: the store.
    dry_run: change nothing, and say what would be dropped.
    others: further stores, in which copies of what is dropped count.

    Raises
    ------
    ConfigError: the folder is no store, or a number is below 0 (``best``: below 1).
    RecordError: it cannot be written; it is as it was.
    """
    if best < 1 or sample < 0:
        raise ConfigError(f"expected best of at least 1 and sample of at least 0: {best}, {sample}")
    store = open_store(Path(folder))
    elsewhere = {line for other in _others(store, others) for line in other}
    if dry_run:
        return _prune(store, best, sample, elsewhere, dry_run=True)
    with store.locked():
        return _prune(store, best, sample, elsewhere, dry_run=False)


def _others(store: RecordStore, others: Iterable[str | Path]) -> Iterable[set[str]]:
    for other in map(Path, others):
        if other.resolve() != store.folder.resolve():
            yield {record.to_line() for record in RecordStore(other).records}


def _prune(
    store: RecordStore, best: int, sample: int, elsewhere: set[str], dry_run: bool
) -> Pruned:
    data = store.path.read_bytes()
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    records = [_read(line) for line in lines]
    known = [record for record in records if record is not None]
    reasons = iter(why_dropped(known, best, sample))
    why = [None if record is None else next(reasons) for record in records]
    kept = b"".join(line for line, reason in zip(lines, why, strict=True) if reason is None)
    dropped = Counter(reason for reason in why if reason is not None)
    stay, gone = set(elsewhere), set[str]()
    for record, reason in zip(records, why, strict=True):
        if record is not None:
            (gone if reason else stay).add(record.to_line())
    if dropped and not dry_run:
        store.replace(kept)
    return Pruned(
        store.folder,
        len(known) - dropped.total(),
        dict(sorted(dropped.items())),
        len(gone - stay),
        sum(r is None and bool(line.strip()) for r, line in zip(records, lines, strict=True)),
        (len(data), len(kept)),
        dry_run,
    )


def _read(line: bytes) -> Record | None:
    try:
        return Record.from_line(line.decode("utf-8"))
    except ValueError:
        return None


def why_dropped(records: Sequence[Record], best: int, sample: int) -> list[str | None]:
    """Return for each record why it is not kept, None for one that is."""
    hashes = template_hashes()
    why: list[str | None] = [None] * len(records)
    groups: dict[Any, dict[str, int]] = defaultdict(dict)
    for i, record in enumerate(records):
        expected = hashes.get(str(record.template), record.template_hash)
        if record.tvm != tvm_version():
            why[i] = OTHER_TVM
        elif record.template_hash != expected:
            why[i] = STALE
        else:
            latest = groups[record.key, canonical([record.sizes, record.target])]
            if record.candidate in latest:
                why[latest[record.candidate]] = SUPERSEDED
            latest[record.candidate] = i
    for latest in groups.values():
        for i in _surplus([(i, records[i]) for i in latest.values()], best, sample):
            why[i] = SURPLUS
    return why


def _surplus(found: Sequence[tuple[int, Record]], best: int, sample: int) -> list[int]:
    """Return the places of the candidates that are neither among the best nor in the sample."""
    ran = [(r.median_us, i) for i, r in found if r.error is None and r.median_us is not None]
    first = {i for _, i in sorted(ran)[:best]}
    rest = [(hashlib.sha256(r.candidate.encode()).hexdigest(), i) for i, r in found]
    drawn = sorted(pair for pair in rest if pair[1] not in first)
    return [i for _, i in drawn[sample:]]

"""The records that the cost model is judged on: of a template, or of loop nests on a CPU."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model_stock import Stock
from cost_model_transfer import by_dtype
from loop_tasks import PORTABLE, TASKS, task

from tvmcap.base.codegen import make_target
from tvmcap.kernel import models
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.fingerprint import target_of
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.loop_recall import recall
from tvmcap.kernel.records import FILE_NAME, Record, RecordStore
from tvmcap.schedules import TEMPLATES


@dataclass(frozen=True, eq=False)
class Data:
    """What is learnt from and tested on.

    Attributes
    ----------
    records, groups: of one template for one target.
    source, own: groups for the section on transfer.
    stock: MetaSchedule's own model; None for a template.
    machine: what measured, as far as records tell.
    """

    template: Any
    target: Any
    records: list[Record]
    groups: list[Group]
    source: list[Group]
    own: list[Group]
    stock: Stock | None
    machine: str


def template_of(kind: str, name: str | None) -> Any:
    """Return the template of a name, by default hopper_gemm or loop nests."""
    kinds: dict[str, Any] = {t.name: t for t in (*TEMPLATES, LOOP_NESTS)}
    chosen = name or ("hopper_gemm" if kind == "cuda" else LOOP_NESTS.name)
    if chosen not in kinds:
        raise SystemExit(f"--template {chosen}: expected one of {', '.join(kinds)}")
    return kinds[chosen]


def stored(folder: Path) -> RecordStore:
    """Return what a folder holds; one with ``records.jsonl.gz`` is for reading alone."""
    packed = folder / f"{FILE_NAME}.gz"
    if not packed.is_file():
        return RecordStore(folder)
    with tempfile.TemporaryDirectory(prefix="tvmcap-records-") as unpacked:
        Path(unpacked, FILE_NAME).write_bytes(gzip.decompress(packed.read_bytes()))
        return RecordStore(Path(unpacked))


def load_records(kind: str, folders: Sequence[Path], name: str | None) -> list[Record]:
    """Return the records of a template in folders."""
    chosen = template_of(kind, name).name
    return [
        r
        for f in folders
        for r in stored(f).records
        if (r.template or LOOP_NESTS.name) == chosen and r.target["kind"] == kind
    ]


def load(kind: str, folders: Sequence[Path], name: str | None, any_source: bool) -> Data:
    """Return what the records of a template, by default hopper_gemm or loop nests, tell."""
    template, records = template_of(kind, name), load_records(kind, folders, name)
    if template is LOOP_NESTS:
        return _loops(records)
    target = make_target({"kind": "cuda", "arch": "sm_90a"} if kind == "cuda" else kind)
    groups = models.groups(records, template, target, any_source)
    return Data(template, target, records, groups, *by_dtype(groups), None, machine(records))


def _loops(records: Sequence[Record]) -> Data:
    """Return loop nests' records for the processor that measured, and those for any."""
    places = {tuple(map(str, (r.target["arch"], r.target["cores"]))): r.target for r in records}
    known = [task(name, target_of(place)) for place in places.values() for name in TASKS]
    records = recall(records, known)
    portable = [r for r in records if r.target["arch"] == PORTABLE]
    mine = [r for r in records if r.target["arch"] != PORTABLE]
    found = {(r.target["arch"], r.target["cores"], r.target["name"]): r.target for r in mine}
    if len(found) != 1:
        raise SystemExit(f"records of one processor are compared; these are of {[*found]}")
    target = target_of(next(iter(found.values())))
    stock = Stock(target)
    groups = [g for g in models.groups(mine, LOOP_NESTS, target) if stock.knows(g)]
    source = models.groups(portable, LOOP_NESTS, target)
    return Data(LOOP_NESTS, target, mine, groups, source, groups, stock, machine(mine))


def machine(records: Sequence[Record]) -> str:
    """Say what measured, as far as records tell."""
    found = {(r.target["name"], r.target["arch"], r.target["cores"]) for r in records}
    return "; ".join(
        f"{name or arch}" + (f" ({arch}), {cores} cores" if cores else "")
        for name, arch, cores in sorted(found, key=str)
    )

"""Tuning records as tables: how many of each status, and the best of each task and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tvmcap.kernel.fingerprint import fingerprint
from tvmcap.kernel.records import TaskKey
from tvmcap.kernel.results import by_numbers
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.upkeep import target_text
from tvmcap.view.report import dict_table


def record_rows(stores: Stores, target: Any) -> list[dict[str, Any]]:
    """One row a task and size: trials, failures, and the fastest candidate."""
    groups: dict[Any, list[Any]] = {}
    for record in stores.usable(target):
        groups.setdefault((record.key, tuple(sorted(record.sizes.items()))), []).append(record)
    rows = []
    for (key, sizes), records in groups.items():
        best = stores.best(key, dict(sizes), target)
        rows.append(
            {
                "task": key.workload_hash,
                "what": workload_text(key, records[0].workload),
                "space": key.template or "loop nest",
                "sizes": " ".join(f"{k}={v}" for k, v in sizes) or "static",
                "trials": len(records),
                "failed": sum(r.error is not None for r in records),
                "best us": None if best is None else best.median_us,
                "knobs": dict(best.knobs or {}) if best is not None else {},
            }
        )
    return sorted(rows, key=lambda r: (r["task"], by_numbers(r["sizes"])))


def workload_text(key: TaskKey, workload: Mapping[str, Any]) -> str:
    """Name what a template computes; a loop nest is known by its hash alone."""
    if key.kind != "template":
        return ""
    shown = (k for k in ("rows", "n", "k", "columns") if isinstance(workload.get(k), int))
    kinds = dict.fromkeys(map(str, workload.get("dtypes", ())))
    name = str(workload.get("op", key.template))
    return " ".join([name, *(f"{k}={workload[k]}" for k in shown), *kinds])


def records_view(
    stores: Stores, target: Any, stats: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> RenderableType:
    """Show where the records are, how many of each status, and the best of each task."""
    parts: list[RenderableType] = [Text(f"target: {target_text(fingerprint(target))}")]
    for store in stores.stores:
        parts.append(
            Text(f"{store.path}: {len(store.records)} records, {store.bad_lines} bad lines")
        )
    status = [{"status": k, "records": v} for k, v in stats["status"].items() if v]
    causes = [{"cause of failure": k, "records": v} for k, v in stats["causes"].items()]
    for title, table in (("Records", status), ("Failures", causes), ("Best", list(rows))):
        if table:
            parts.append(dict_table(title, table))
    return Group(*parts)

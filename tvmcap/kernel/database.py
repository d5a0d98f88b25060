"""Records to and from MetaSchedule's databases."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel import tasks
from tvmcap.kernel.features import KNOBS, annotate, new_schedule, read_knobs, replay
from tvmcap.kernel.fingerprint import fingerprint, tvm_version
from tvmcap.kernel.records import Record
from tvmcap.kernel.tasks import Task


def plain_json(value: Any) -> Any:
    """Turn a trace's JSON, which holds TVM numbers, into JSON data."""
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_json(v) for k, v in value.items()}
    if hasattr(value, "value"):
        return plain_json(value.value)
    return [plain_json(v) for v in value]


def schedule_of(record: Record, bound: Any) -> Any:
    """Return the record's candidate as a schedule of the PrimFunc at the record's sizes."""
    if record.kind == "template":
        return annotate(bound, json.dumps(record.knobs, sort_keys=True, separators=(",", ":")))
    return replay(bound, record.trace or [[], []])


def add_to_database(database: Any, record: Record, bound: Any, target: Any) -> bool:
    """Commit a successful record; returns whether it was one that a database can hold."""
    if record.median_us is None or record.error is not None or record.trace == []:
        return False
    workload = database.commit_workload(
        tvm.IRModule({"main": bound.with_attr("global_symbol", "main")})
    )
    trace = schedule_of(record, bound).trace
    args = ms.arg_info.ArgInfo.from_prim_func(bound)
    database.commit_tuning_record(
        ms.database.TuningRecord(trace, workload, [record.median_us * 1e-6], target, args)
    )
    return True


def to_database(
    records: Iterable[Record], found: Iterable[Task], target: Any, database: Any = None
) -> Any:
    """Put successful records into a MetaSchedule database (by default a new one in memory).

    A record holds a workload's hash and not its code, so records of other tasks than ``found`` are
    left out.
    """
    if database is None:  # an empty one is falsy
        database = ms.database.MemoryDatabase()
    by_key = {task.key: task for task in found}
    for record in records:
        task = by_key.get(record.key)
        sizes = None if task is None else sizes_of(task, record.sizes)
        if task is not None and sizes is not None:
            add_to_database(database, record, tasks.bind(task, sizes), target)
    return database


def sizes_of(task: Task, recorded: Mapping[str, int]) -> dict[str, int] | None:
    """Return values of the task's variables that give the recorded sizes, or None."""
    names = [v.name for v in task.vars]
    if task.template is None:
        return {name: recorded[f"s{i}"] for i, name in enumerate(names)}
    guesses = [
        *task.sizes(),
        {name: recorded.get(f"s{i}", recorded["rows"]) for i, name in enumerate(names)},
    ]
    return next((g for g in guesses if task.record_sizes(g) == dict(recorded)), None)


def from_database(database: Any, found: Iterable[Task], target: Any) -> list[Record]:
    """List a MetaSchedule database's records of the given tasks at their representative sizes."""
    records: list[Record] = []
    for task in found:
        for sizes in task.sizes():
            mod = tvm.IRModule({"main": tasks.bind(task, sizes).with_attr("global_symbol", "main")})
            if database.has_workload(mod):
                top = database.get_top_k(database.commit_workload(mod), 1 << 20)
                records += [_record(task, task.record_sizes(sizes), r, mod, target) for r in top]
    return [r for r in records if (r.knobs is None) != (r.kind == "template")]


def _record(task: Task, sizes: dict[str, int], found: Any, mod: Any, target: Any) -> Record:
    seconds = sorted(float(s) for s in found.run_secs)
    us = [s * 1e6 for s in seconds]
    trace = plain_json(found.trace.as_json())
    knobs = None
    if any(inst[0] == "Annotate" and inst[2] == [KNOBS] for inst in trace[0]):
        sch = new_schedule(mod["main"])
        found.trace.apply_to_schedule(sch, remove_postproc=False)
        knobs = json.loads(read_knobs(sch) or "null")
    return Record(
        kind=task.key.kind,
        workload=task.workload,
        workload_hash=task.workload_hash,
        sizes=sizes,
        template=task.key.template,
        template_hash=task.key.template_hash,
        knobs=knobs,
        trace=trace if task.key.kind == "trace" else None,
        target=fingerprint(target),
        tvm=tvm_version(),
        median_us=us[len(us) // 2],
        p10_us=us[len(us) // 10],
        p90_us=us[(9 * len(us)) // 10],
        samples=len(us),
        error=None,
        seed=0,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )

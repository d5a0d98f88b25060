"""Features of recorded loop nests as they are today, made again from the records' traces."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tvm.s_tir import ScheduleError

from tvmcap.base.errors import ConfigError
from tvmcap.kernel import tasks
from tvmcap.kernel.database import sizes_of
from tvmcap.kernel.features import replay
from tvmcap.kernel.fingerprint import target_of
from tvmcap.kernel.loop_features import current, nest_features, stored
from tvmcap.kernel.records import Record
from tvmcap.kernel.tasks import Task

log = logging.getLogger("tvmcap")


def recall(records: Iterable[Record], found: Iterable[Task]) -> list[Record]:
    """Return the records, those of loop nests with the features that today's model takes.

    A record holds a function's hash and not its code, so that only records of ``found`` can be
    brought up to date; others, and those whose trace does not apply, are returned as they are. A
    record is of the processor that it names, whichever this is.
    """
    known = {task.key: task for task in found}
    bound: dict[tuple[Any, ...], Any] = {}
    result = []
    for record in records:
        task = known.get(record.key)
        if task is not None and record.trace and not current(record):
            features = _features(record, task, bound)
            record = record if features is None else replace(record, features=features)
        result.append(record)
    return result


def _features(record: Record, task: Task, bound: dict[tuple[Any, ...], Any]) -> list[float] | None:
    """Return the features of a record's candidate; ``bound`` keeps functions and targets."""
    name = (record.key, *sorted(record.sizes.items()))
    where = ("target", *(str(record.target.get(k)) for k in ("kind", "arch", "features", "cores")))
    try:
        if name not in bound:
            bound[name] = tasks.bind(task, sizes_of(task, record.sizes) or {})
        if where not in bound:
            bound[where] = target_of(record.target)
        sch = replay(bound[name], record.trace or [])
    except (ScheduleError, ConfigError, KeyError, RuntimeError, ValueError, TypeError) as e:
        log.debug("no features of a record of %s: %s", task.name, e)
        return None
    return stored(nest_features(sch.mod["main"], bound[where]))

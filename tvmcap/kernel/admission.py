"""Which records of a task can serve it: those of its sizes whose candidate its space holds.

A checksum tells that a line is whole, not that what it says was ever measured. A setting that no
space holds may compile and compute something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tvmcap.base.errors import RecordError
from tvmcap.kernel.records import Record
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task

log = logging.getLogger("tvmcap")


def admits(task: Task, target: Any) -> Callable[[Record], bool]:
    """Return what says of a record of the task whether it can serve; it warns of others once."""
    names = set(task.record_sizes(task.sizes()[0]))
    known: set[Any] = set()
    verdicts: dict[tuple[str, bool], bool] = {}

    def in_space(candidate: str) -> bool:
        if task.template is None:
            return True
        if not known:
            known.update(settings(task, target))
        try:
            return task.template.knobs_from_json(candidate) in known
        except RecordError:
            return False

    def admit(record: Record) -> bool:
        of_sizes = set(record.sizes) == names
        case = (record.candidate, of_sizes)
        if case not in verdicts:
            verdicts[case] = of_sizes and in_space(record.candidate)
            if not verdicts[case]:
                log.warning(
                    "%s: a record is not used, for the task has no such candidate: %.200s at %s",
                    task.name,
                    record.candidate,
                    record.sizes,
                )
        return verdicts[case]

    return admit


def settings(task: Task, target: Any) -> set[Any]:
    """Return the settings of a template's task: its space and its defaults."""
    template, problem = task.template, task.problem
    ranged = [] if template.ranges is None else template.ranges(problem, target)
    default = template.default(problem, target)
    return {default, *(knobs for _, knobs in ranged), *template.space(problem, target)}


def admitted(stores: Stores, task: Task, target: Any) -> list[Record]:
    """Return the latest timing of each candidate that can serve a task (``Stores.timed``)."""
    return stores.timed(task.key, target, admits(task, target))

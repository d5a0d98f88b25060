"""The sessions of a tuning run: one for each task and size, and which of them goes next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmcap.kernel import fallback, tasks
from tvmcap.kernel import models as cost_models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.loop_search import LoopNestSession
from tvmcap.kernel.measure import Measurer
from tvmcap.kernel.results import TaskResult, by_numbers
from tvmcap.kernel.search import Session
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.template_search import TemplateSession

_LARGEST_BATCH = 8
_SMALLEST_BATCH = 4
_OPTIMISM = 0.3


@dataclass(eq=False)
class Entry:
    """A session with its share of the work; ``before`` is the candidate it is compared with."""

    session: Session
    weight: float
    batch: int
    before: str | None
    trials: int = 0
    batches: int = 0
    gain: float = 1.0
    exhausted: bool = False

    @property
    def priority(self) -> float:
        """Weight times what the last batch gained, with hope for what was tried little."""
        return self.weight * (self.gain + _OPTIMISM / math.sqrt(1 + self.batches))


def open_entries(
    found: Sequence[tasks.Task],
    sizes: Mapping[str, Sequence[int]] | None,
    sessions: Sessions,
    measurer: Measurer,
    trials: int,
) -> list[Entry]:
    """Return a session for each task and size, heavy ones first; ``trials`` are those of all."""
    entries: list[Entry] = []
    for task in found:
        chosen = task.sizes(sizes)
        flops, nbytes = tasks.work(task, chosen[-1])
        for at in chosen:
            session = sessions.open(task, at)
            best = session.best()
            weight = task.count * max(flops, 4 * nbytes) / len(chosen)
            entries.append(Entry(session, weight, 0, None if best is None else best.candidate))
    total = sum(e.weight for e in entries) or 1.0
    # on a GPU's host, candidates for every worker between two updates of the model
    workers = 0 if measurer.device == "cpu" else measurer.workers
    for e in entries:
        e.weight /= total
        largest = max(_LARGEST_BATCH, workers)
        e.batch = max(_SMALLEST_BATCH, min(largest, trials // (3 * len(entries))))
    return sorted(entries, key=lambda e: -e.weight)


class Sessions:
    """Opens sessions; those of one template, or of loop nests, share a cost model."""

    def __init__(
        self, target: Any, stores: Stores, seed: int, found: Sequence[tasks.Task] = ()
    ) -> None:
        self.target, self.stores, self.seed, self.found = target, stores, seed, found
        self._models: dict[str, RankModel] = {}

    def open(self, task: tasks.Task, at: dict[str, int]) -> Session:
        """Return the session of a task at given sizes."""
        how = (task, at, self.target, self.stores, self.seed)
        if task.template is None:
            return LoopNestSession(*how, rule, self._model(LOOP_NESTS))
        return TemplateSession(*how, self._model(task.template))

    def _model(self, template: Any) -> RankModel:
        if template.name not in self._models:
            how = (self.stores, template, self.target, self.seed, self.found)
            found = cost_models.ready(*how)
            self._models[template.name] = found
        return self._models[template.name]


def rule(func: Any, target: Any) -> Any:
    """Return the kernel that a build would take without records."""
    return fallback.schedule(func, target)[0]


def choose(entries: Sequence[Entry], measurer: Measurer) -> list[Entry]:
    """Pick the sessions of the next round among those with candidates left.

    Each goes once, then by priority. A round has work for every worker that builds and, where it
    can, every device.
    """
    order = sorted(entries, key=lambda e: (e.batches > 0, -e.priority if e.batches else 0))
    chosen: list[Entry] = []
    while order and (
        sum(e.batch for e in chosen) < measurer.workers or len(chosen) < len(measurer.runners)
    ):
        chosen.append(order.pop(0))
    return chosen


def following(entries: Sequence[Entry], now: list[Entry], measurer: Measurer) -> list[Entry]:
    """Return the sessions of the round after that of ``now``, as far as can be told.

    Those that never went go first; else it is the same ones.
    """
    waiting = [e for e in entries if not e.batches and not e.exhausted and e not in now]
    return choose(waiting, measurer) or now


def outcomes(entries: Sequence[Entry]) -> tuple[TaskResult, ...]:
    """Return what came of sessions, by name."""
    results = []
    for e in sorted(entries, key=lambda e: by_numbers(e.session.name)):
        best = e.session.best()
        after, candidate = (None, None) if best is None else (best.median_us, best.candidate)
        before = None if e.before is None else e.session.latest()[e.before].median_us
        results.append(TaskResult(e.session.name, before, after, e.trials, candidate))
    return tuple(results)

"""Choice without measuring: the knobs that a saved cost model puts first at sizes never tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmcap.kernel import models, tasks
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.features import template_features
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task

_TRUSTED = 1.5
"""A setting that the template's estimate puts further behind its best is not chosen: records are
mostly of settings that it puts first."""


@dataclass(frozen=True)
class Choice:
    """Knobs by number of rows, and which model chose them."""

    knobs: Mapping[int, Any]
    model: str


Choose = Callable[[Task, Iterable[int]], "Choice | None"]
"""``choose(task, known rows)``: the model's choice at the other sizes; None without a model."""


@dataclass(eq=False)
class Chooser:
    """Chooses knobs by the models beside the records of ``stores``, each read once."""

    stores: Stores
    target: Any
    _models: dict[str, tuple[RankModel, Path] | None] = field(default_factory=dict)

    def __call__(self, task: Task, known: Iterable[int] = ()) -> Choice | None:
        """Return the choice at each of the task's sizes but those of ``known`` rows."""
        name = task.template.name
        if name not in self._models:
            self._models[name] = models.find(self.stores, task.template, self.target)
        found = self._models[name]
        if found is None:
            return None
        model, path = found
        rows = {task.record_sizes(sizes)["rows"]: sizes for sizes in task.sizes()}
        knobs = {
            n: best(model, task.template, self._problem(task, sizes), self.target)
            for n, sizes in rows.items()
            if n not in set(known)
        }
        chosen = {n: k for n, k in knobs.items() if k is not None}
        return Choice(chosen, f"{path.name}, {model.pretrained} measurements") if chosen else None

    def _problem(self, task: Task, sizes: Mapping[str, int]) -> Any:
        if not task.vars:
            return task.problem
        return task.template.match(tasks.bind(task, sizes), self.target)


def best(model: RankModel, template: Any, problem: Any, target: Any) -> Any:
    """Return the setting that a model puts first of all that fit; None where nothing does."""
    points = [] if problem is None else template.space(problem, target)
    if points and template.estimate is not None:
        estimates = np.asarray(template.estimate(problem, points, target))
        points = [points[i] for i in np.flatnonzero(trusted(estimates))]
    if not points:
        return None
    scores = model.margins(template_features(template, problem, points, target))
    return points[int(np.argmax(scores))]


def trusted(estimates_us: Any) -> Any:
    """Return which settings a model chooses from, by the template's estimates (settings,)."""
    return estimates_us <= _TRUSTED * estimates_us.min()

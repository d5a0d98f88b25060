"""MetaSchedule's own XGBModel on the same records, which it needs the schedules themselves for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import loop_tasks
import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel.dataset import Group
from tvmcap.kernel.features import replay


class Stock:
    """Schedules of records of ``loop_tasks``, made again by their traces."""

    def __init__(self, target: Any) -> None:
        self.target = target
        known = [loop_tasks.task(name, target) for name in loop_tasks.TASKS]
        self._funcs = {task.workload_hash: task.func for task in known}
        self._known: dict[str, tuple[Any, dict[str, Any]]] = {}

    def knows(self, group: Group) -> bool:
        """Whether the function of a group is among the tasks."""
        return group.name.split(" ")[0] in self._funcs

    def schedules(self, group: Group) -> tuple[Any, list[Any]]:
        """Return the context and MetaSchedule's candidates of a group, in its order."""
        if group.name not in self._known:
            bound = self._funcs[group.name.split(" ")[0]]
            info = ms.arg_info.ArgInfo.from_prim_func(bound)
            made = {text: replay(bound, json.loads(text)) for text in group.knobs}
            mod = tvm.IRModule({"main": bound.with_attr("global_symbol", "main")})
            context = ms.TuneContext(mod, target=self.target, num_threads=1)
            found = {text: ms.MeasureCandidate(sch, info) for text, sch in made.items()}
            self._known[group.name] = context, found
        context, found = self._known[group.name]
        return context, [found[text] for text in group.knobs]

    def with_stores(self, group: Group) -> Any:
        """Return a group's features with MetaSchedule's: the largest and sum of all stores."""
        extractor = ms.feature_extractor.PerStoreFeature()
        tables = [t.numpy() for t in extractor.extract_from(*self.schedules(group))]
        rows = np.array([np.concatenate([t.max(0), t.sum(0)]) for t in tables], np.float32)
        return np.nan_to_num(np.hstack([group.rows, rows]), posinf=3e38, neginf=-3e38)

    def train(self, groups: Sequence[Group], seed: int) -> Callable[[Group], Any]:
        """Return what scores the candidates of a group, learnt from groups."""
        state = np.random.get_state()
        np.random.seed(seed)
        model = ms.cost_model.XGBModel(num_warmup_samples=0, num_tuning_cores=1)
        for group in groups:
            context, candidates = self.schedules(group)
            model.update(context, candidates, list(_results(group.times_us)))
        np.random.set_state(state)
        return lambda group: model.predict(*self.schedules(group))


def _results(times_us: Iterable[float | None]) -> Iterable[Any]:
    for us in times_us:
        run = None if us is None else [us * 1e-6]
        yield ms.runner.RunnerResult(run, None if run else "failed")

"""MetaSchedule's own XGBModel on the same records, which it needs the schedules themselves for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel import tasks
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.features import replay


class Stock:
    """Schedules of records, made again from the fused modules that they were measured on.

    ``folder`` holds those modules as TVM's JSON, ``NAME.json``.
    """

    def __init__(self, folder: Path, target: Any) -> None:
        self.target = target
        self._tasks: dict[str, Any] = {}
        self._known: dict[str, tuple[Any, list[Any]]] = {}
        for path in sorted(folder.glob("*.json")):
            for task in tasks.extract(tvm.ir.load_json(path.read_text()), target, _loops):
                self._tasks[task.workload_hash] = task

    def knows(self, group: Group) -> bool:
        """Whether the function of a group is among the modules."""
        return group.name.split(" ")[0] in self._tasks

    def schedules(self, group: Group) -> tuple[Any, list[Any]]:
        """Return the context and MetaSchedule's candidates of a group."""
        if group.name not in self._known:
            task = self._tasks[group.name.split(" ")[0]]
            sizes = {v.name: group.sizes[f"s{i}"] for i, v in enumerate(task.vars)}
            bound = tasks.bind(task, sizes)
            info = ms.arg_info.ArgInfo.from_prim_func(bound)
            made = [replay(bound, json.loads(text)) for text in group.knobs]
            mod = tvm.IRModule({"main": bound.with_attr("global_symbol", "main")})
            context = ms.TuneContext(mod, target=self.target, num_threads=1)
            found = [ms.MeasureCandidate(sch, info) for sch in made]
            self._known[group.name] = context, found
        return self._known[group.name]

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


def _loops(func: Any, target: Any) -> None:
    """Let every kernel count as a loop nest."""


def _results(times_us: Iterable[float | None]) -> Iterable[Any]:
    for us in times_us:
        run = None if us is None else [us * 1e-6]
        yield ms.runner.RunnerResult(run, None if run else "failed")

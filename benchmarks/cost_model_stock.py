"""MetaSchedule's own XGBModel on the same records, which it needs the schedules themselves for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import loop_tasks
import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel import tensor_core
from tvmcap.kernel.database import add_to_database, plain_json
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.features import replay
from tvmcap.kernel.measure import Candidate, Measurement
from tvmcap.kernel.records import Record, canonical
from tvmcap.kernel.search import Proposal, Session, new_context, runner_result
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tensor_intrinsics import no_tensor_intrinsics


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
            with no_tensor_intrinsics():
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
        with numpy_seed(seed):
            model = ms.cost_model.XGBModel(num_warmup_samples=0, num_tuning_cores=1)
            for group in groups:
                context, candidates = self.schedules(group)
                model.update(context, candidates, list(_results(group.times_us)))
        return lambda group: model.predict(*self.schedules(group))


class StockSession(Session):
    """MetaSchedule's evolution with its own settings and its own model."""

    def __init__(self, task: Any, target: Any, stores: Stores, seed: int, warm_up: int) -> None:
        super().__init__(task, {}, target, stores, seed)
        strategy = ms.search_strategy.EvolutionarySearch()
        self._context = new_context(
            self.bound, target, self.name, seed, tensor_core.space(self.bound, target), strategy
        )
        cores = int(target.attrs["num-cores"])
        self._model = ms.cost_model.XGBModel(num_warmup_samples=warm_up, num_tuning_cores=cores)
        self._database = ms.database.MemoryDatabase()
        for record in self.latest().values():
            add_to_database(self._database, record, self.bound, target)
        self._started = False
        with numpy_seed(seed):
            self._resume(list(self.latest().values()))

    def _resume(self, records: Sequence[Record]) -> None:
        """Teach the model what was measured before."""
        if records:
            info = ms.arg_info.ArgInfo.from_prim_func(self.bound)
            known = [ms.MeasureCandidate(replay(self.bound, r.trace or []), info) for r in records]
            results = [runner_result(Measurement(r.median_us)) for r in records]
            self._model.update(self._context, known, results)

    def propose(self, count: int) -> list[Proposal]:
        """Return what evolution finds; it is asked for so many each time."""
        with numpy_seed(self.seed):
            if not self._started:
                spaces = self._context.generate_design_space()
                self._context.pre_tuning(1 << 20, count, spaces, self._database, self._model)
                self._started = True
            found = list(self._context.generate_measure_candidates() or [])
        proposals = [self._proposal(measured) for measured in found]
        return [p for p in proposals if canonical(p.trace) not in self.done][:count]

    def _proposal(self, measured: Any) -> Proposal:
        trace = plain_json(measured.sch.trace.as_json())
        name = f"{self.task.workload_hash} {canonical(trace)}"
        return Proposal(
            Candidate(name, measured.sch.mod["main"], bound=True), measured, trace=trace
        )

    def _learn(self, measured: list[Any], outcomes: list[Any]) -> None:
        with numpy_seed(self.seed):
            self._context.notify_runner_results(measured, outcomes)
            self._model.update(self._context, measured, outcomes)
        workload = self._database.commit_workload(self._context.mod)
        for candidate, outcome in zip(measured, outcomes, strict=True):
            record = ms.database.TuningRecord(
                candidate.sch.trace, workload, outcome.run_secs, self.target, candidate.args_info
            )
            self._database.commit_tuning_record(record)


@contextlib.contextmanager
def numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which MetaSchedule's model draws from; then put it back."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)


def _results(times_us: Iterable[float | None]) -> Iterable[Any]:
    for us in times_us:
        run = None if us is None else [us * 1e-6]
        yield ms.runner.RunnerResult(run, None if run else "failed")

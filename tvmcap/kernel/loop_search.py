"""Search over loop nests: MetaSchedule's evolution with its own rules, at a static size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel import tensor_core
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.database import add_to_database, plain_json
from tvmcap.kernel.dataset import group_name
from tvmcap.kernel.features import copy_func, replay
from tvmcap.kernel.loop_features import FEATURES, LoopCostModel, loop_features
from tvmcap.kernel.measure import Candidate
from tvmcap.kernel.records import Record, canonical
from tvmcap.kernel.search import Proposal, Session, new_context
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task

_POPULATION = 64
_GENERATIONS = 2
_FRESH = 32
_PER_ITERATION = 16  # evolution takes as long for one candidate as for many
_MANY = 1 << 20
_TRIES = 3
_WHOLE = 1e5


class LoopNestSession(Session):
    """MetaSchedule's evolutionary search with its own rules and our cost model."""

    def __init__(
        self,
        task: Task,
        sizes: dict[str, int],
        target: Any,
        stores: Stores,
        seed: int,
        fallback: Callable[[Any, Any], Any] | None = None,
        model: RankModel | None = None,
    ) -> None:
        super().__init__(task, sizes, target, stores, seed)
        first = fallback is not None and "[]" not in self.done
        self._fallback = (
            fallback(copy_func(self.bound), target) if first and fallback is not None else None
        )
        self._waiting: list[Proposal] = []
        self._database = ms.database.MemoryDatabase()
        for record in stores.history(task.key, target, self.record_sizes):
            add_to_database(self._database, record, self.bound, target)
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=_POPULATION,
            init_min_unmeasured=_FRESH,
            genetic_num_iters=_GENERATIONS,
        )
        self._context = new_context(
            self.bound, target, self.name, seed, tensor_core.space(self.bound, target), strategy
        )
        group = group_name(task.workload_hash, self.record_sizes)
        known = RankModel(seed, FEATURES) if model is None else model
        self._cost_model = LoopCostModel(known, group)
        self._started = False

    def propose(self, count: int) -> list[Proposal]:
        """Return the fallback's kernel first (its trace is empty), then evolution's."""
        first: list[Proposal] = []
        if self._fallback is not None:
            first.append(Proposal(self._candidate("fallback", self._fallback), None, trace=[]))
            self._fallback, count = None, count - 1
        if count > 0:
            with _numpy_seed(self.seed):
                if not self._started:
                    spaces = self._context.generate_design_space()
                    self._context.pre_tuning(
                        _MANY, _PER_ITERATION, spaces, self._database, self._cost_model
                    )
                    self._started = True
                batch = self._waiting or self._generate()
            self._waiting = batch[count:]
            first += batch[:count]
        return first

    def _generate(self) -> list[Proposal]:
        """Return a batch of traces never measured; some rounds bring up what the records hold."""
        found: list[Proposal] = []
        for _ in range(_TRIES):
            found += self._fresh()
            if len(found) >= _PER_ITERATION // 2:
                break
        return found

    def _fresh(self) -> list[Proposal]:
        found: list[Proposal] = []
        batch = list(self._context.generate_measure_candidates() or [])
        for measured, row in zip(batch, loop_features(self._context, batch), strict=True):
            trace = plain_json(measured.sch.trace.as_json())
            if canonical(trace) not in self.done:
                candidate = self._candidate(canonical(trace), measured.sch.mod["main"])
                features = [_short(x) for x in row]
                found.append(Proposal(candidate, measured, trace=trace, features=features))
        return found

    def repeat(self, records: Sequence[Record]) -> list[Proposal]:
        """Return proposals for recorded traces."""
        return [p for r in records if r.trace and (p := self._again(r.trace)) is not None]

    def _again(self, trace: list[Any]) -> Proposal | None:
        sch = replay(self.bound, trace)
        return Proposal(self._candidate(canonical(trace), sch.mod["main"]), None, trace=trace)

    def _candidate(self, name: str, func: Any) -> Candidate:
        return Candidate(
            f"{self.task.workload_hash} {canonical(self.record_sizes)} {name}", func, bound=True
        )

    def _learn(self, measured: list[Any], outcomes: list[Any]) -> None:
        with _numpy_seed(self.seed):
            self._context.notify_runner_results(measured, outcomes)
            self._cost_model.update(self._context, measured, outcomes)
        workload = self._database.commit_workload(self._context.mod)
        for candidate, outcome in zip(measured, outcomes, strict=True):
            record = ms.database.TuningRecord(
                candidate.sch.trace, workload, outcome.run_secs, self.target, candidate.args_info
            )
            self._database.commit_tuning_record(record)


def _short(value: float) -> float:
    """Round to five digits; most features are whole numbers, which take less room as such."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < _WHOLE else rounded


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which MetaSchedule's model draws from; then put it back."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)

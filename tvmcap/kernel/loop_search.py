"""Search over loop nests: MetaSchedule's evolution with its own rules, at a static size.

Evolution fills a pool of candidates, and each batch is the pool's best by what the model knows by
then. It makes so many for each candidate asked for, a bound that is no time, so that a seed gives
the same proposals again. It runs in a thread of its own while something is compiled, and ends
before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel import tensor_core
from tvmcap.kernel.cost_model import RankModel, times_us
from tvmcap.kernel.database import add_to_database, plain_json
from tvmcap.kernel.dataset import group_name
from tvmcap.kernel.features import copy_func, replay
from tvmcap.kernel.loop_features import FEATURES, LoopCostModel, loop_features, stored
from tvmcap.kernel.measure import Candidate
from tvmcap.kernel.records import Record, canonical
from tvmcap.kernel.search import Proposal, Session, new_context
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task

_WIDE, _NARROW = 64, 16
"""Populations: of the whole space for the first batch, then around the best measured."""
_MEASURED = 0.5
"""Share of a population that is the best measured so far."""
_GENERATIONS = 1
_FIRST, _LATER = 16, 2
"""Candidates that the pool gets for each that is asked for, in the first batch and later."""
_POOL = 512
_MANY = 1 << 20
_TRIES = 3
_APART = 20.0
_EXPLORED = 8
"""One in so many of a batch is any candidate of the pool."""
_THREAD = ThreadPoolExecutor(1, "tvmcap-evolution")


@dataclass(frozen=True, eq=False)
class _Known:
    """A candidate of the pool, as MetaSchedule has it, with its trace and features."""

    measured: Any
    trace: list[Any]
    row: Any


@dataclass(eq=False)
class _Evolution:
    """MetaSchedule's evolution in populations of one size."""

    context: Any
    population: int
    database: Any
    cost_model: Any
    started: bool = False

    def candidates(self) -> list[Any]:
        """Return a population's worth of candidates that it never returned."""
        if not self.started:
            spaces = self.context.generate_design_space()
            self.context.pre_tuning(_MANY, self.population, spaces, self.database, self.cost_model)
            self.started = True
        return list(self.context.generate_measure_candidates() or [])


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
        self._database = ms.database.MemoryDatabase()
        for record in stores.history(task.key, target, self.record_sizes):
            add_to_database(self._database, record, self.bound, target)
        self._group = group_name(task.workload_hash, self.record_sizes)
        self.model = RankModel(seed, FEATURES) if model is None else model
        self._cost_model = LoopCostModel(self.model.snapshot())
        self._wide, self._narrow = self._evolution(_WIDE, seed), self._evolution(_NARROW, seed + 1)
        self._context = self._wide.context
        self._pool: dict[str, _Known] = {}
        self._rng = np.random.default_rng(seed)
        self._growing: Future[None] | None = None
        self._batches, self._owed, self._looked = 0, 0, False

    def propose(self, count: int) -> list[Proposal]:
        """Return the fallback's kernel first (its trace is empty), then the pool's best."""
        first: list[Proposal] = []
        if self._fallback is not None:
            first.append(Proposal(self._candidate("fallback", self._fallback), None, trace=[]))
            self._fallback, count = None, count - 1
        if count > 0:
            self.ahead(count)
            self.settle()
            for _ in range(_TRIES):
                if len(self._fresh()) >= count:
                    break
                self._grow(self._wide)
                self.settle()
            first += self._best(count)
            self._batches, self._looked = self._batches + 1, False
        return first

    def ahead(self, count: int) -> None:
        """Let evolution begin to fill the pool for the next batch, unless it did."""
        if not self._looked:
            self._looked = True
            if not self._batches:
                self._grow(self._wide, math.ceil(_FIRST * count / _WIDE))
                return
            times, self._owed = divmod(self._owed + _LATER * count, _NARROW)
            if times:
                self._grow(self._narrow, times)

    def settle(self) -> None:
        """Wait until evolution has ended, so that what is timed now has the processor alone."""
        if self._growing is not None:
            self._growing.result()
            self._growing = None

    def _evolution(self, population: int, seed: int) -> _Evolution:
        space, strategy = tensor_core.space(self.bound, self.target), _strategy(population)
        context = new_context(self.bound, self.target, self.name, seed, space, strategy)
        return _Evolution(context, population, self._database, self._cost_model)

    def _grow(self, evolution: _Evolution, times: int = 1) -> None:
        """Let evolution fill the pool by what the model knows now; ``settle`` waits for it."""
        self.settle()
        self._cost_model.model = self.model.snapshot()
        self._growing = _THREAD.submit(self._evolve, evolution, times)

    def _evolve(self, evolution: _Evolution, times: int) -> None:
        for _ in range(times):
            batch = evolution.candidates()
            rows = self._cost_model.features(self._context, batch)
            self._cost_model.forget()
            for measured, row in zip(batch, rows, strict=True):
                trace = plain_json(measured.sch.trace.as_json())
                self._pool.setdefault(canonical(trace), _Known(measured, trace, row))

    def _fresh(self) -> list[str]:
        """Return the traces of the pool that were never measured."""
        return [trace for trace in self._pool if trace not in self.done]

    def _best(self, count: int) -> list[Proposal]:
        """Return the best of the pool that are not much alike, and a few of any."""
        traces = self._fresh()
        if not traces:
            return []
        rows = np.array([self._pool[trace].row for trace in traces])
        scores = self.model.margins(rows)
        order = [int(i) for i in np.argsort(-scores, kind="stable")]
        explored = count // _EXPLORED
        chosen = unlike(rows, order, count - explored)
        left = [i for i in order if i not in set(chosen)]
        chosen += [left[i] for i in self._rng.permutation(len(left))[:explored]]
        found = [self._proposal(traces[i]) for i in chosen]
        kept = {traces[i] for i in order[:_POOL]} - {traces[i] for i in chosen}
        self._pool = {trace: known for trace, known in self._pool.items() if trace in kept}
        return found

    def _proposal(self, trace: str) -> Proposal:
        known = self._pool[trace]
        candidate = self._candidate(trace, known.measured.sch.mod["main"])
        features = stored(known.row)
        return Proposal(candidate, known.measured, trace=known.trace, features=features)

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
        self.settle()
        rows = loop_features(self._context, measured)
        self.model.add(self._group, rows, times_us(outcomes))
        self.model.fit()
        workload = self._database.commit_workload(self._context.mod)
        for candidate, outcome in zip(measured, outcomes, strict=True):
            record = ms.database.TuningRecord(
                candidate.sch.trace, workload, outcome.run_secs, self.target, candidate.args_info
            )
            self._database.commit_tuning_record(record)


def _strategy(population: int) -> Any:
    return ms.search_strategy.EvolutionarySearch(
        population_size=population,
        init_measured_ratio=_MEASURED,
        init_min_unmeasured=population // 2,
        genetic_num_iters=_GENERATIONS,
    )


def unlike(rows: Any, order: Sequence[int], count: int, apart: float = _APART) -> list[int]:
    """Return the first ``count`` of an order of rows that differ, then those that are left.

    Rows differ by more than ``apart`` in the sum of squares over columns of unit variance.
    """
    scaled = (rows - rows.mean(0)) / (rows.std(0) + 1e-6)
    chosen: list[int] = []
    for i in order:
        if len(chosen) == count:
            return chosen
        if not chosen or ((scaled[chosen] - scaled[i]) ** 2).sum(1).min() > apart:
            chosen.append(i)
    taken = set(chosen)
    return chosen + [i for i in order if i not in taken][: count - len(chosen)]

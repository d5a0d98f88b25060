"""Search: which candidates of a task to measure next, one session a task and size.

Both kinds of task run in MetaSchedule's frame (a TuneContext, a search strategy, a cost model): a
template's candidates are schedules with one annotation, chosen by ``KnobSearch``; loop nests use
MetaSchedule's own rules and evolution.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.search_strategy import PySearchStrategy

from tvmcap.kernel import tasks
from tvmcap.kernel.cost_model import KnobCostModel, RankModel, group_name
from tvmcap.kernel.features import annotate, read_knobs, template_features
from tvmcap.kernel.fingerprint import fingerprint, tvm_version
from tvmcap.kernel.measure import Candidate, Measurement, Workload
from tvmcap.kernel.records import Record, canonical
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task
from tvmcap.kernel.tensor_intrinsics import import_tensor_intrinsics
from tvmcap.kernel.traces import apply_trace as apply_trace

_EXPLORE = 0.2
_SHORT_LIST = 4
"""Candidates that the model chooses from, for each that is measured, by a template's estimate."""

_quiet = logging.getLogger("tvmcap.metaschedule")
_quiet.setLevel(logging.WARNING)
# TVM says that it does not pad rows of bfloat16 in shared memory; our rule does
_quiet.addFilter(lambda record: "StorageAlign" not in record.getMessage())


@dataclass(frozen=True, eq=False)
class Proposal:
    """A candidate to measure, with what MetaSchedule and the records need to know of it."""

    candidate: Candidate
    measured: Any
    knobs: dict[str, Any] | None = None
    trace: list[Any] | None = None
    features: list[float] | None = None


class Session:
    """The search for one task at one size: ``propose`` what to measure, ``notify`` how it went."""

    def __init__(
        self, task: Task, sizes: dict[str, int], target: Any, stores: Stores, seed: int
    ) -> None:
        self.task, self.target, self.stores, self.seed = task, target, stores, seed
        self.workload = Workload(task, sizes, seed)
        self.record_sizes = task.record_sizes(sizes)
        history = stores.history(task.key, target, self.record_sizes)
        self.done = {record.candidate for record in history}
        self.bound = tasks.bind(task, sizes)
        shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
        self.name = f"{task.name}[{shown}]" if shown else task.name

    def best(self) -> Record | None:
        """Return the best record at this size."""
        return self.stores.best(self.task.key, self.record_sizes, self.target)

    def propose(self, count: int) -> list[Proposal]:
        """Return at most ``count`` candidates never measured; none when the space is exhausted."""
        raise NotImplementedError

    def repeat(self, records: Sequence[Record]) -> list[Proposal]:
        """Return proposals that measure the candidates of records again."""
        raise NotImplementedError

    def notify(self, proposals: Sequence[Proposal], results: Sequence[Measurement]) -> None:
        """Learn from a measured batch."""
        known = [(p, r) for p, r in zip(proposals, results, strict=True) if p.measured is not None]
        if known:
            measured = [p.measured for p, _ in known]
            outcomes = [_runner_result(r) for _, r in known]
            self._learn(measured, outcomes)

    def _learn(self, measured: list[Any], outcomes: list[Any]) -> None:
        raise NotImplementedError

    def record(self, proposal: Proposal, result: Measurement) -> Record:
        """Write a measurement down as a record; its candidate counts as measured from now on."""
        key = self.task.key
        record = Record(
            kind=key.kind,
            workload=self.task.workload,
            workload_hash=key.workload_hash,
            sizes=self.record_sizes,
            template=key.template,
            template_hash=key.template_hash,
            knobs=proposal.knobs,
            trace=proposal.trace,
            target=fingerprint(self.target),
            tvm=tvm_version(),
            median_us=result.median_us,
            p10_us=result.p10_us,
            p90_us=result.p90_us,
            samples=result.samples,
            error=result.error,
            seed=self.seed,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            features=proposal.features,
        )
        self.done.add(record.candidate)
        return record


def _runner_result(result: Measurement) -> Any:
    if result.median_us is None:
        return ms.runner.RunnerResult(None, result.message or "no time")
    return ms.runner.RunnerResult([result.median_us * 1e-6], None)


@derived_object
class KnobSearch(PySearchStrategy):  # type: ignore[misc]
    """MetaSchedule's search strategy over knobs: ``choose`` returns the next schedules."""

    def __init__(self, choose: Callable[[], list[Any]], args_info: Any) -> None:
        super().__init__()
        self.choose, self.args_info = choose, args_info

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Any,
        database: Any,
        cost_model: Any,
    ) -> None:
        """Need nothing: records decide what was measured."""

    def post_tuning(self) -> None:
        """Need nothing."""

    def generate_measure_candidates(self) -> Any:
        """Return the next batch, or None where all was measured."""
        chosen = self.choose()
        return [ms.MeasureCandidate(sch, self.args_info) for sch in chosen] or None

    def notify_runner_results(self, measure_candidates: Any, results: Any) -> None:
        """Need nothing: the cost model and the records learn."""

    def clone(self) -> Any:
        """Return a strategy of the same choice."""
        return KnobSearch(self.choose, self.args_info)


class TemplateSession(Session):
    """Enumerates a space: the defaults first, then as the model ranks, a share at random."""

    def __init__(
        self,
        task: Task,
        sizes: dict[str, int],
        target: Any,
        stores: Stores,
        seed: int,
        model: RankModel,
    ) -> None:
        super().__init__(task, sizes, target, stores, seed)
        self.template, self.model = task.template, model
        self.problem = task.template.match(self.bound, target)
        defaults = [task.template.default(task.problem, target)]
        points = task.template.space(task.problem, target)
        sized = task.template.default(self.problem, target)
        if sized in points:
            defaults.append(sized)
        self._first = list(dict.fromkeys(defaults))
        self._points = list(dict.fromkeys([*defaults, *points]))
        self._features = template_features(task.template, self.problem, self._points, target)
        self._texts = [task.template.knobs_to_json(k) for k in self._points]
        self._prior = _order(task.template, self.problem, self._points, target)
        self._rng = np.random.default_rng(seed)
        self._count = 0
        self._context = new_context(
            self.bound,
            target,
            self.name,
            seed,
            None,
            KnobSearch(self._choose, _args_info(self.bound)),
        )
        group = group_name(task.workload_hash, self.record_sizes)
        self._cost_model = KnobCostModel(
            model, task.template, target, {self.name: (group, self.problem)}
        )

    def _choose(self) -> list[Any]:
        """Return schedules of the next candidates: defaults, then by score, some at random."""
        left = [i for i, text in enumerate(self._texts) if text not in self.done]
        chosen = [i for i in left if i < len(self._first)][: self._count]
        rest = [i for i in left if i not in set(chosen)]
        room = min(self._count - len(chosen), len(rest))
        if room > 0:
            if self._prior is not None:  # the model chooses from what the estimate puts first
                rest = sorted(rest, key=lambda i: self._prior[i])[: _SHORT_LIST * room]
            scores = self._scores(rest)
            order = [rest[i] for i in np.lexsort((self._rng.random(len(rest)), -scores))]
            informed = len(self.model) or self._prior is not None
            explore = int(room * _EXPLORE) if informed else room
            chosen += order[: room - explore]
            tail = order[room - explore :]
            chosen += [tail[i] for i in self._rng.permutation(len(tail))[:explore]]
        return [annotate(self.bound, self._texts[i]) for i in chosen]

    def _scores(self, points: list[int]) -> Any:
        if len(self.model) or self._prior is None:
            return self.model.scores(self._features[points])
        return -self._prior[points]

    def propose(self, count: int) -> list[Proposal]:
        """Return the next batch from the search strategy."""
        self._count = count
        candidates = self._context.generate_measure_candidates() or []
        return [self._proposal(read_knobs(c.sch) or "", c) for c in candidates]

    def repeat(self, records: Sequence[Record]) -> list[Proposal]:
        """Return proposals for recorded knobs."""
        texts = [
            self.template.knobs_to_json(self.template.knobs_from_json(canonical(r.knobs)))
            for r in records
        ]
        return [self._proposal(text, None) for text in texts]

    def _proposal(self, text: str, measured: Any) -> Proposal:
        row = template_features(
            self.template, self.problem, [self.template.knobs_from_json(text)], self.target
        )[0]
        candidate = Candidate(
            f"{self.task.workload_hash} {text}", self.task.func, self.template, text
        )
        return Proposal(
            candidate, measured, knobs=json.loads(text), features=[round(float(x), 6) for x in row]
        )

    def _learn(self, measured: list[Any], outcomes: list[Any]) -> None:
        self._context.notify_runner_results(measured, outcomes)
        self._cost_model.update(self._context, measured, outcomes)


def _order(template: Any, problem: Any, points: Sequence[Any], target: Any) -> Any:
    if template.estimate is None:
        return None
    return np.asarray(template.estimate(problem, points, target), dtype=np.float64)


def _args_info(func: Any) -> Any:
    return ms.arg_info.ArgInfo.from_prim_func(func)


def new_context(func: Any, target: Any, name: str, seed: int, space: Any, strategy: Any) -> Any:
    """Return a TuneContext; ``space`` is MetaSchedule's generator, None for a template."""
    import_tensor_intrinsics()
    if space is None:
        space = ms.space_generator.ScheduleFn(
            lambda sch: sch, sch_rules=[], postprocs=[], mutator_probs={}
        )
    return ms.TuneContext(
        tvm.IRModule({"main": func.with_attr("global_symbol", "main")}),
        target=target,
        space_generator=space,
        search_strategy=strategy,
        task_name=name,
        logger=_quiet,
        rand_state=seed % (2**31 - 2) + 1,
        num_threads=1,
    )

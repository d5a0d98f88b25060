"""Search: which candidates of a task to measure next, one session a task and size.

Both kinds of task run in MetaSchedule's frame (a TuneContext, a search strategy, a cost model): a
template's candidates are schedules with one annotation, chosen by ``KnobSearch``; loop nests use
MetaSchedule's own rules and evolution.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

from tvmcap.kernel import tasks, tensor_core
from tvmcap.kernel.admission import admits
from tvmcap.kernel.fingerprint import tvm_version
from tvmcap.kernel.measure import Candidate, Measurement, Workload
from tvmcap.kernel.records import Record
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task
from tvmcap.kernel.tensor_intrinsics import import_tensor_intrinsics, no_tensor_intrinsics
from tvmcap.kernel.traces import apply_trace as apply_trace

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
        self.admits = admits(task, target)
        history = stores.history(task.key, target, self.record_sizes)
        # where everything failed, it is the machine that was at fault, and may be mended by now
        mended = all(record.error is not None for record in history)
        self.done = set[str]() if mended else {record.candidate for record in history}
        self.bound = tasks.bind(task, sizes)
        shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
        self.name = f"{task.name}[{shown}]" if shown else task.name
        self.converged = False  # what is left should gain less than the noise of a measurement

    def best(self) -> Record | None:
        """Return the best record at this size."""
        return self.stores.best(self.task.key, self.record_sizes, self.target, self.admits)

    def latest(self) -> dict[str, Record]:
        """Return the last record of each candidate at this size."""
        history = self.stores.history(self.task.key, self.target, self.record_sizes)
        return {record.candidate: record for record in history if self.admits(record)}

    def propose(self, count: int) -> list[Proposal]:
        """Return at most ``count`` candidates never measured; none when the space is exhausted."""
        raise NotImplementedError

    def ahead(self, count: int) -> None:
        """Begin to look for the ``count`` candidates that are asked for next, beside compiling."""

    def settle(self) -> None:
        """Wait for what the session does beside compiling; nothing runs beside what is timed."""

    def repeat(self, records: Sequence[Record]) -> list[Proposal]:
        """Return proposals that measure the candidates of records again."""
        raise NotImplementedError

    def notify(self, proposals: Sequence[Proposal], results: Sequence[Measurement]) -> None:
        """Learn from a measured batch."""
        known = [(p, r) for p, r in zip(proposals, results, strict=True) if p.measured is not None]
        if known:
            measured = [p.measured for p, _ in known]
            outcomes = [runner_result(r) for _, r in known]
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
            target=self.stores.fingerprint(self.target),
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


def runner_result(result: Measurement) -> Any:
    """Return a measurement as MetaSchedule has it."""
    if result.median_us is None:
        return ms.runner.RunnerResult(None, result.message or "no time")
    return ms.runner.RunnerResult([result.median_us * 1e-6], None)


def new_context(func: Any, target: Any, name: str, seed: int, space: Any, strategy: Any) -> Any:
    """Return a TuneContext; ``space`` is MetaSchedule's generator, None for a template."""
    needed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if space is not None and tensor_core.uses_intrinsics(func, target):
        import_tensor_intrinsics()
    else:
        needed = no_tensor_intrinsics()
    if space is None:
        space = ms.space_generator.ScheduleFn(
            lambda sch: sch, sch_rules=[], postprocs=[], mutator_probs={}
        )
    with needed:
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

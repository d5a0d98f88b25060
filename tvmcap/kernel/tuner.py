"""A tuning run: which session measures next, until trials, seconds or candidates are used up."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvmcap.base.config import Config
from tvmcap.base.errors import TuneError
from tvmcap.kernel import fallback, tasks
from tvmcap.kernel import models as cost_models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.interrupt import interruptible
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.loop_search import LoopNestSession
from tvmcap.kernel.measure import Measurement, Measurer
from tvmcap.kernel.records import Record
from tvmcap.kernel.results import Progress, TaskResult, TuneRun, all_failed
from tvmcap.kernel.runner import Runner, WorkloadError
from tvmcap.kernel.search import Proposal, Session
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.template_search import TemplateSession

logger = logging.getLogger("tvmcap")

DEFAULT_TRIALS = 64
_LARGEST_BATCH = {"template": 8, "trace": 16}
_SMALLEST_BATCH = 4
_CONFIRMED = 3
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


@dataclass(eq=False)
class Run:
    """One tuning run: sessions, what they may use up, and what came of it."""

    config: Config
    target: Any
    stores: Stores
    progress: Progress | None
    entries: list[Entry] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    curve: list[tuple[int, str, float]] = field(default_factory=list)
    trials: int = 0
    stopped: str = "exhausted"
    unmeasured: WorkloadError | None = None
    overhead_s: float = 0.0
    start: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of what devices share

    @property
    def limit(self) -> int:
        """Trials in all."""
        return self.config.tune if isinstance(self.config.tune, int) else DEFAULT_TRIALS

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        elapsed = time.monotonic() - self.start
        return math.inf if self.config.budget_s is None else self.config.budget_s - elapsed

    def search(self, found: list[tasks.Task], sizes: Mapping[str, Sequence[int]] | None) -> None:
        """Measure until the trials, the seconds or the candidates are used up."""
        if self.progress is not None:
            self.progress.start(self.limit)
        try:
            with interruptible(), Measurer(self.target, workers=self.config.workers) as measurer:
                self.entries = self._think(self.open, measurer, found, sizes)
                while entries := self._next(measurer.workers):
                    self._round(measurer, entries)
                measurer.spread(lambda runner, e: self._confirm(measurer, e, runner), self.entries)
            if self.trials == 0 and self.unmeasured is not None:
                raise self.unmeasured
        except KeyboardInterrupt:
            self.stopped = "interrupted"
            logger.warning(
                "tuning interrupted after %d trials; what was found is kept", self.trials
            )
        finally:
            if self.progress is not None:
                self.progress.finish()

    def open(
        self, measurer: Measurer, found: list[tasks.Task], sizes: Mapping[str, Sequence[int]] | None
    ) -> list[Entry]:
        """Return a session for each task and size, heavy ones first."""
        models: dict[str, RankModel] = {}
        entries: list[Entry] = []
        for task in found:
            chosen = task.sizes(sizes)
            flops, nbytes = tasks.work(task, chosen[-1])
            for at in chosen:
                session = self._session(task, at, models)
                best = session.best()
                weight = task.count * max(flops, 4 * nbytes) / len(chosen)
                entries.append(Entry(session, weight, 0, None if best is None else best.candidate))
        total = sum(e.weight for e in entries) or 1.0
        # on a GPU's host, candidates for every worker between two updates of the model
        workers = 0 if measurer.device == "cpu" else measurer.workers
        for e in entries:
            e.weight /= total
            largest = max(_LARGEST_BATCH[e.session.task.key.kind], workers)
            e.batch = max(_SMALLEST_BATCH, min(largest, self.limit // (3 * len(entries))))
        return sorted(entries, key=lambda e: -e.weight)

    def _session(
        self,
        task: tasks.Task,
        at: dict[str, int],
        models: dict[str, RankModel],
    ) -> Session:
        seed = self.config.seed
        if task.template is None:
            model = self._model(LOOP_NESTS, models)
            return LoopNestSession(task, at, self.target, self.stores, seed, _rule, model)
        model = self._model(task.template, models)
        return TemplateSession(task, at, self.target, self.stores, seed, model)

    def _model(self, template: Any, models: dict[str, RankModel]) -> RankModel:
        """Return the model of a template or of loop nests, one for all sessions."""
        if template.name not in models:
            seed = self.config.seed
            models[template.name] = cost_models.ready(self.stores, template, self.target, seed)
        return models[template.name]

    def _next(self, workers: int) -> list[Entry]:
        """Pick the sessions of the next round: each once, then by priority.

        A round has work for every worker that builds.
        """
        if self.trials >= self.limit:
            self.stopped = "trials"
            return []
        each = (time.monotonic() - self.start) / max(self.trials, 1)
        if self.left_s() <= (each if self.trials else 0.0):
            self.stopped = "budget"
            return []
        open_entries = [e for e in self.entries if not e.exhausted]
        if not open_entries and any(e.session.converged for e in self.entries):
            self.stopped = "converged"
        order = sorted(open_entries, key=lambda e: (e.batches > 0, -e.priority if e.batches else 0))
        chosen: list[Entry] = []
        while order and sum(e.batch for e in chosen) < workers:
            chosen.append(order.pop(0))
        return chosen

    def _round(self, measurer: Measurer, entries: list[Entry]) -> None:
        """Build the next candidates of some sessions at once, then measure session by session."""
        left = self.limit - self.trials
        if self.trials and self.left_s() < math.inf:
            each = (time.monotonic() - self.start) / self.trials
            left = max(1, min(left, int(self.left_s() / each)))
        batches: list[tuple[Entry, list[Proposal]]] = []
        for entry in entries:
            proposals = self._think(entry.session.propose, min(entry.batch, left)) if left else []
            entry.exhausted = left > 0 and not proposals
            left -= len(proposals)
            if proposals:
                batches.append((entry, proposals))
        workloads = [entry.session.workload for entry, _ in batches]
        measurer.build([p.candidate for _, proposals in batches for p in proposals], workloads)
        before = [_median(entry.session.best()) for entry, _ in batches]
        results = self.measure(measurer, batches)
        for (entry, proposals), measured, us in zip(batches, results, before, strict=True):
            if measured:
                self._batch(entry, proposals, measured, us)

    def measure(
        self, measurer: Measurer, batches: Sequence[tuple[Entry, list[Proposal]]]
    ) -> list[list[Measurement]]:
        """Measure batches of different sessions on all devices; the records are on disk then.

        A session without arguments, or a reference to check against, gives no measurements.
        """
        results: list[list[Measurement]] = [[] for _ in batches]

        def work(runner: Runner, i: int) -> None:
            entry, proposals = batches[i]
            limit_us = _median(entry.session.best())
            try:
                results[i] = self._measure(measurer, entry, proposals, limit_us, runner)
            except WorkloadError as e:
                self._leave_out(entry, e)

        measurer.spread(work, range(len(batches)))
        return results

    def _think(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run what neither builds nor measures, and count its time."""
        start = time.monotonic()
        found = step(*args)
        self.overhead_s += time.monotonic() - start
        return found

    def _batch(
        self,
        entry: Entry,
        proposals: list[Proposal],
        results: list[Measurement],
        before: float | None,
    ) -> None:
        """Learn from what was measured."""
        self._think(entry.session.notify, proposals, results)
        entry.batches += 1
        if results and self.trials == len(results) and all(r.cause is not None for r in results):
            raise TuneError(all_failed(entry.session.name, results))
        self._note(entry, before)

    def _leave_out(self, entry: Entry, error: WorkloadError) -> None:
        """Go on without a kernel that has no arguments or nothing to check against."""
        with self._lock:
            self.failures["reference"] += 1
            entry.exhausted, self.unmeasured = True, error
        logger.warning("%s", error)

    def _measure(
        self,
        measurer: Measurer,
        entry: Entry,
        proposals: list[Proposal],
        limit_us: float | None,
        runner: Runner,
    ) -> list[Measurement]:
        """Measure proposals, appending each record as it comes."""
        results: list[Measurement] = []
        candidates = [p.candidate for p in proposals]
        measured = measurer.measure(entry.session.workload, candidates, limit_us, runner)
        for proposal, result in zip(proposals, measured, strict=True):
            with self._lock:
                self._think(self._keep, entry, proposal, result)
            results.append(result)
        return results

    def _keep(self, entry: Entry, proposal: Proposal, result: Measurement) -> None:
        """Write a record, count it and show it."""
        record = entry.session.record(proposal, result)
        self.stores.append([record])
        entry.trials += 1
        self.trials += 1
        if result.cause is not None:
            self.failures[result.cause] += 1
            logger.debug("%s: %s: %s", entry.session.name, result.cause, result.message)
        elif entry.before is None:
            entry.before = record.candidate
        self._tell(entry)

    def _note(self, entry: Entry, before: float | None) -> None:
        best = entry.session.best()
        if best is None or best.median_us is None:
            return
        entry.gain = 1.0 if before is None else max(0.0, 1 - best.median_us / before)
        self.curve.append((self.trials, entry.session.name, best.median_us))

    def _tell(self, entry: Entry) -> None:
        if self.progress is None:
            return
        best = entry.session.best()
        each = (time.monotonic() - self.start) / max(self.trials, 1)
        left = min(self.left_s(), each * (self.limit - self.trials))
        best_us = None if best is None else best.median_us
        self.progress.update(
            entry.session.name, best_us, self.trials, sum(self.failures.values()), max(left, 0.0)
        )

    def _confirm(self, measurer: Measurer, entry: Entry, runner: Runner) -> None:
        """Measure a session's fastest again, until the best was measured twice."""
        session, confirmed = entry.session, set[str]()
        while entry.trials and self.left_s() > 0 and len(confirmed) < 3 * _CONFIRMED:
            best = session.best()
            if best is None or best.candidate in confirmed:
                break
            again = session.repeat(_top(session, confirmed))
            if not again:
                break
            candidates = [p.candidate for p in again]
            measured = measurer.measure(session.workload, candidates, best.median_us, runner)
            try:
                records = [session.record(p, r) for p, r in zip(again, measured, strict=True)]
            except WorkloadError as e:
                return self._leave_out(entry, e)
            with self._lock:
                self.stores.append(records)
            confirmed |= {r.candidate for r in records}

    def result(self) -> TuneRun:
        """Return what came of the run."""
        results = []
        for e in sorted(self.entries, key=lambda e: e.session.name):
            best = e.session.best()
            after, candidate = (None, None) if best is None else (best.median_us, best.candidate)
            before = None if e.before is None else e.session.latest()[e.before].median_us
            results.append(TaskResult(e.session.name, before, after, e.trials, candidate))
        return TuneRun(
            results=tuple(results),
            trials=self.trials,
            failures=dict(self.failures),
            seconds=time.monotonic() - self.start,
            log=str(self.stores.writer.path),
            curve=tuple(self.curve),
            stopped=self.stopped,
            overhead_s=self.overhead_s,
        )


def _median(record: Record | None) -> float | None:
    return None if record is None else record.median_us


def _rule(func: Any, target: Any) -> Any:
    return fallback.schedule(func, target)[0]


def _top(session: Session, confirmed: set[str]) -> list[Record]:
    good = [
        r
        for r in session.latest().values()
        if r.median_us is not None and r.candidate not in confirmed
    ]
    return sorted(good, key=lambda r: r.median_us or 0.0)[:_CONFIRMED]

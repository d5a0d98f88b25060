"""A tuning run: which session measures next, until trials, seconds or candidates are used up."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvmcap.base.config import Config
from tvmcap.base.errors import TuneError
from tvmcap.kernel import remote, tasks
from tvmcap.kernel.confirming import CONFIRMED, confirm
from tvmcap.kernel.entries import Entry, Sessions, choose, following, open_entries, outcomes
from tvmcap.kernel.interrupt import interruptible
from tvmcap.kernel.measure import Measurement, Measurer
from tvmcap.kernel.records import Record
from tvmcap.kernel.results import Progress, TuneRun, all_failed
from tvmcap.kernel.runner import Runner, WorkloadError
from tvmcap.kernel.search import Proposal
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tracker import NoServerError

logger = logging.getLogger("tvmcap")

DEFAULT_TRIALS = 64


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
    measured_s: float = 0.0
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
            with interruptible(), self.measurer() as measurer:
                self.entries = self._think(self.open, found, sizes, measurer)
                while entries := self._next(measurer):
                    self._round(measurer, entries)
                measurer.spread(lambda runner, e: self._confirm(measurer, e, runner), self.entries)
            if self.trials == 0 and self.unmeasured is not None:
                raise self.unmeasured
        except NoServerError as e:
            if not self.trials:
                raise
            self.stopped = "no server"
            logger.warning(
                "tuning stopped after %d trials; what was found is kept\n%s", self.trials, e
            )
        except KeyboardInterrupt:
            self.stopped = "interrupted"
            logger.warning(
                "tuning interrupted after %d trials; what was found is kept", self.trials
            )
        finally:
            if self.progress is not None:
                self.progress.finish()

    def open(
        self,
        found: list[tasks.Task],
        sizes: Mapping[str, Sequence[int]] | None,
        measurer: Measurer,
    ) -> list[Entry]:
        """Open a session for each task and size, heavy ones first."""
        sessions = Sessions(self.target, self.stores, self.config.seed, found)
        return open_entries(found, sizes, sessions, measurer, self.limit)

    @contextlib.contextmanager
    def measurer(self) -> Iterator[Measurer]:
        """Have what measures, here or on servers; what those are goes into the records."""
        servers = remote.connect(self.config, self.target)
        workers = self.config.workers if servers is None else None
        with Measurer(self.target, workers=workers, servers=servers) as measurer:
            self.stores = replace(self.stores, machine=measurer.runners[0].machine())
            yield measurer

    def _next(self, measurer: Measurer) -> list[Entry]:
        """Pick the sessions of the next round; none where something is used up."""
        if self.trials >= self.limit:
            self.stopped = "trials"
            return []
        each = (time.monotonic() - self.start) / max(self.trials, 1)
        if self.left_s() <= (each + self._confirming_s(measurer) if self.trials else 0.0):
            self.stopped = "budget"
            return []
        left = [e for e in self.entries if not e.exhausted]
        if not left and any(e.session.converged for e in self.entries):
            self.stopped = "converged"
        return choose(left, measurer)

    def _round(self, measurer: Measurer, entries: list[Entry]) -> None:
        """Build the next candidates of some sessions at once, then measure session by session."""
        left = self.limit - self.trials
        if self.trials and self.left_s() < math.inf:
            each = (time.monotonic() - self.start) / self.trials
            left_s = self.left_s() - self._confirming_s(measurer)
            left = max(1, min(left, int(left_s / each)))
        self._ahead(entries, left)
        measurer.build([], [entry.session.workload for entry in entries])  # while evolution runs
        batches: list[tuple[Entry, list[Proposal]]] = []
        for entry in entries:
            proposals = self._think(entry.session.propose, min(entry.batch, left)) if left else []
            entry.exhausted = left > 0 and not proposals
            left -= len(proposals)
            if proposals:
                batches.append((entry, proposals))
        self._ahead(following(self.entries, [e for e, _ in batches], measurer), left)
        measurer.build([p.candidate for _, proposals in batches for p in proposals])
        for entry in self.entries:
            self._think(entry.session.settle)
        before = [_median(entry.session.best()) for entry, _ in batches]
        results = self.measure(measurer, batches)
        for (entry, proposals), measured, us in zip(batches, results, before, strict=True):
            if measured:
                self._batch(entry, proposals, measured, us)

    def _ahead(self, entries: Sequence[Entry], left: int) -> None:
        """Let sessions look for as many of ``left`` candidates as they are asked for next."""
        for entry in entries:
            if count := min(entry.batch, left):
                self._think(entry.session.ahead, count)
                left -= count

    def measure(
        self, measurer: Measurer, batches: Sequence[tuple[Entry, list[Proposal]]]
    ) -> list[list[Measurement]]:
        """Measure batches of different sessions on all devices; the records are on disk then.

        A session without arguments, or a reference to check against, gives no measurements.
        """
        checked = [False] * len(batches)
        limits = [_median(entry.session.best()) for entry, _ in batches]
        results = [[Measurement()] * len(proposals) for _, proposals in batches]
        # where there are fewer batches than devices, each is measured in parts
        pieces = math.ceil(len(measurer.runners) / max(len(batches), 1))

        def compute(runner: Runner, i: int) -> None:
            try:
                measurer.reference(batches[i][0].session.workload, runner)
                checked[i] = True
            except WorkloadError as e:
                self._leave_out(batches[i][0], e)

        def work(runner: Runner, part: tuple[int, int]) -> None:
            i, k = part
            (entry, proposals), limit_us = batches[i], limits[i]
            part_of = proposals[k::pieces]
            try:
                results[i][k::pieces] = self._measure(measurer, entry, part_of, limit_us, runner)
            except WorkloadError as e:
                checked[i] = False
                self._leave_out(entry, e)

        measurer.spread(compute, range(len(batches)))
        measurer.spread(work, [(i, k) for i, ok in enumerate(checked) if ok for k in range(pieces)])
        return [found if ok else [] for found, ok in zip(results, checked, strict=True)]

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
        start = time.monotonic()
        results: list[Measurement] = []
        candidates = [p.candidate for p in proposals]
        measured = measurer.measure(entry.session.workload, candidates, limit_us, runner)
        for proposal, result in zip(proposals, measured, strict=True):
            with self._lock:
                self._think(self._keep, entry, proposal, result)
            results.append(result)
        with self._lock:
            self.measured_s += time.monotonic() - start
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

    def _confirming_s(self, measurer: Measurer) -> float:
        """Seconds to leave for measuring the fastest of each session again: nothing is built."""
        tried = sum(entry.trials > 0 for entry in self.entries)
        each = self.measured_s / max(self.trials, 1)
        return tried * CONFIRMED * each / len(measurer.runners)

    def _confirm(self, measurer: Measurer, entry: Entry, runner: Runner) -> None:
        """Measure a session's fastest again."""

        def measure(again: list[Proposal], limit_us: float | None) -> list[Measurement]:
            candidates = [p.candidate for p in again]
            return list(measurer.measure(entry.session.workload, candidates, limit_us, runner))

        def keep(records: list[Record]) -> None:
            with self._lock:
                self.stores.append(records)

        if entry.trials:
            try:
                confirm(entry.session, measure, keep)
            except WorkloadError as e:
                self._leave_out(entry, e)

    def result(self) -> TuneRun:
        """Return what came of the run."""
        return TuneRun(
            results=outcomes(self.entries),
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

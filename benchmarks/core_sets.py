"""Work spread over disjoint sets of cores: one process a set, each with a measurer of its own.

Jobs are taken in order by whichever process is free. A job writes down what it has as it comes, so
that everything may be killed at any moment; what is left is worked out again at the next start.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmcap.kernel.search import Proposal, Session


@dataclass(eq=False)
class Seat:
    """What a process works with: its cores, its measurers by target, and when to stop."""

    cores: list[int]
    deadline: float
    _measurers: dict[str, Any] = field(default_factory=dict)

    @property
    def late(self) -> bool:
        """Whether the seconds are used up."""
        return time.time() > self.deadline

    def measurer(self, target: Any) -> Any:
        """Return the measurer for a target; it is kept."""
        from tvmcap.kernel.measure import Measurer

        if str(target) not in self._measurers:
            self._measurers[str(target)] = Measurer(target, workers=len(self.cores))
        return self._measurers[str(target)]

    def search(
        self,
        session: Session,
        count: int,
        batch: int,
        propose: Callable[[int], list[Proposal]] | None = None,
        learns: bool = True,
    ) -> None:
        """Measure ``count`` candidates of a session, ``batch`` at a time, until it is late.

        What ``propose`` gives, by default the session's own, is measured as ``tune`` does it: what
        the session does beside compiling ends before anything is timed, and records are on disk
        before the next batch. A session that ``learns`` is told how each batch went.
        """
        ask, measurer = propose or session.propose, self.measurer(session.target)
        while count > 0 and not self.late:
            proposals = ask(min(count, batch))
            if not proposals:
                break
            candidates = [p.candidate for p in proposals]
            count -= len(proposals)
            if propose is None and count > 0:
                session.ahead(min(count, batch))
            measurer.build(candidates, [session.workload])
            session.settle()
            best = session.best()
            limit_us = None if best is None else best.median_us
            results = list(measurer.measure(session.workload, candidates, limit_us))
            pairs = zip(proposals, results, strict=True)
            session.stores.append([session.record(*pair) for pair in pairs])
            if learns:
                session.notify(proposals, results)

    def close(self) -> None:
        """End the processes of the measurers."""
        for measurer in self._measurers.values():
            measurer.close()


def split_cores(workers: int, each: int) -> list[list[int]]:
    """Return ``workers`` sets of ``each`` of the cores that this process may use."""
    free = sorted(os.sched_getaffinity(0))
    if workers * each > len(free):
        raise SystemExit(f"{workers} workers of {each} cores: there are {len(free)} cores")
    return [free[i * each : (i + 1) * each] for i in range(workers)]


def run(
    jobs: Sequence[Any],
    work: Callable[[Any, Seat], None],
    workers: int,
    cores_per_worker: int,
    budget_s: float,
    show: Callable[[], str],
    every_s: float = 30.0,
) -> None:
    """Do the jobs until all are done or the seconds are used up; print ``show()`` now and then.

    ``work`` is a function of a module, for it is called in other processes.
    """
    start = time.time()
    sets = split_cores(workers, cores_per_worker)
    # TVM would bind its threads to the first cores of the machine, whatever the process may use
    os.environ["TVM_BIND_THREADS"] = "0"
    os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(cores_per_worker)
    spawn = multiprocessing.get_context("spawn")
    at = spawn.Value("i", 0)
    deadline = start + budget_s
    processes = [
        spawn.Process(target=_serve, args=(work, list(jobs), at, own, deadline)) for own in sets
    ]
    for process in processes:
        process.start()
    told = start
    while any(process.is_alive() for process in processes):
        time.sleep(0.5)
        if time.time() - told > every_s:
            told = time.time()
            print(f"{told - start:.0f} s: {show()}", flush=True)
    failed = sum(process.exitcode != 0 for process in processes)
    ended = f"; {failed} of {workers} processes failed" if failed else ""
    print(f"{time.time() - start:.0f} s: {show()}{ended}", flush=True)


def _serve(
    work: Callable[[Any, Seat], None], jobs: list[Any], at: Any, own: list[int], deadline: float
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the one that started it
    os.sched_setaffinity(0, own)
    seat = Seat(own, deadline)
    try:
        while not seat.late:
            with at.get_lock():
                index, at.value = at.value, at.value + 1
            if index >= len(jobs):
                break
            work(jobs[index], seat)
    finally:
        seat.close()

"""Measure loop nests of MetaSchedule's space on a CPU, for a cost model to learn from.

    python benchmarks/cost_model_llvm.py --logs DIR --workers 16 --cores-per-worker 2
        [--budget SECONDS] [--count 100] [--portable 40] [--again 12] [--only TASK,...]

Each task has ``--count`` candidates for this processor and ``--portable`` for x86-64-v3, half of
them drawn from the space, half from evolution that learns of the task as it goes. Then ``--again``
of each task are measured a second time, in random order: what two measurements agree on is what a
model can be right about. Every worker is bound to cores of its own. A batch is on disk before the
next one is built; a run that is killed goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import core_sets
import loop_tasks
import numpy as np
from cost_model_metrics import measured_once

from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import group_name
from tvmcap.kernel.loop_features import FEATURES, LOOP_NESTS
from tvmcap.kernel.loop_search import LoopNestSession
from tvmcap.kernel.records import Record, RecordStore
from tvmcap.kernel.stores import Stores

CHUNK, BATCH = 24, 12
DRAWN = 0.5
"""Share of a task's candidates that is drawn from the space."""


class Job(NamedTuple):
    """So many candidates of a task for a target: drawn, evolved or measured again."""

    logs: str
    arch: str | None
    cores: int
    task: str
    kind: str
    count: int
    seed: int


def jobs(options: argparse.Namespace, names: Sequence[str]) -> list[Job]:
    """Return what is left to measure: first what is drawn, then what evolves, then again."""
    store, found = RecordStore(options.logs), list[tuple[int, int, Job]]()
    for arch, count in ((None, options.count), (loop_tasks.PORTABLE, options.portable)):
        target = loop_tasks.target(options.cores_per_worker, arch)
        for name in names:
            own = of_task(store.records, loop_tasks.task(name, target), target)
            have = len({r.candidate for r in own})
            drawn = round(DRAWN * count)
            parts = [("drawn", drawn - have), ("evolved", count - max(have, drawn))]
            if arch is None:
                twice = sum(n > 1 for n in Counter(r.candidate for r in own).values())
                parts.append(("again", options.again - twice))
            for stage, (kind, missing) in enumerate(parts):
                for i, first in enumerate(range(0, missing, CHUNK)):
                    size = min(CHUNK, missing - first)
                    seed = 1000 * stage + have + i
                    how = (options.cores_per_worker, name, kind, size, seed)
                    found.append((stage, i, Job(str(options.logs), arch, *how)))
    return [job for _, _, job in sorted(found, key=lambda item: item[:2])]


class Chance(RankModel):
    """Ranks by chance, so that what is drawn is like any part of the space."""

    def margins(self, rows: Any) -> Any:
        """Return random numbers, the same ones for the same rows and seed."""
        values = np.asarray(rows, np.float32)
        return np.random.default_rng([self.seed, *values[:, 1:].tobytes()[:64]]).random(len(values))

    def snapshot(self) -> Chance:
        """Return itself: it learns nothing."""
        return self


def of_task(records: Sequence[Record], task: Any, target: Any) -> list[Record]:
    """Return the records of a task for a target's architecture and cores."""
    arch, cores = str(target.attrs["mcpu"]), int(target.attrs["num-cores"])
    return [
        r
        for r in records
        if r.workload_hash == task.workload_hash
        and (r.target["arch"], r.target["cores"]) == (arch, cores)
    ]


def work(job: Job, seat: core_sets.Seat) -> None:
    """Measure what a job asks for, batch by batch."""
    target = loop_tasks.target(job.cores, job.arch)
    task, store = loop_tasks.task(job.task, target), RecordStore(Path(job.logs))
    stores = Stores((store,), store)
    model = RankModel(job.seed, FEATURES) if job.kind == "evolved" else Chance(job.seed, FEATURES)
    if job.kind == "evolved":
        for group in LOOP_NESTS.groups(of_task(store.records, task, target)):
            model.add(group.name, group.rows, group.times_us)
        model.fit()
    session = LoopNestSession(task, {}, target, stores, job.seed, None, model)
    propose = functools.partial(again, session, job.seed) if job.kind == "again" else None
    seat.search(session, job.count, BATCH, propose, learns=job.kind == "evolved")


def again(session: LoopNestSession, seed: int, count: int) -> list[Any]:
    """Return proposals of ``count`` candidates that ran, drawn from those measured once.

    They keep their features, for of two records of a candidate the later one counts.
    """
    from dataclasses import replace

    chosen = measured_once(session, count, seed)
    features = {r.candidate: r.features for r in chosen}
    found = []
    for proposal, record in zip(session.repeat(chosen), chosen, strict=True):
        found.append(replace(proposal, features=features[record.candidate]))
    return found


def counted(logs: Path) -> str:
    """Say what a store holds, by architecture."""
    records = RecordStore(logs).records
    parts = []
    for arch in sorted({str(r.target["arch"]) for r in records}):
        own = [r for r in records if r.target["arch"] == arch]
        found = {(group_name(r.workload_hash, r.sizes), r.candidate) for r in own}
        failed = Counter(r.error["cause"] for r in own if r.error is not None)
        tasks = len({r.workload_hash for r in own})
        again = len(own) - len(found)
        parts.append(f"{arch} {len(found)} of {tasks} tasks, {again} again, failed {dict(failed)}")
    return "; ".join(parts) or "nothing yet"


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cores-per-worker", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--count", type=int, default=100, help="candidates of a task")
    parser.add_argument("--portable", type=int, default=40, help="of a task, for x86-64-v3")
    parser.add_argument("--again", type=int, default=12, help="of a task, measured twice")
    parser.add_argument("--only", default="", help="TASK,...; default: all")
    options = parser.parse_args()
    names = loop_tasks.named([n for n in options.only.split(",") if n])
    core_sets.run(
        jobs(options, names),
        work,
        options.workers,
        options.cores_per_worker,
        options.budget,
        lambda: counted(options.logs),
    )


if __name__ == "__main__":
    main()

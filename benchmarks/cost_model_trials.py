"""How many trials the search of loop nests takes to what MetaSchedule's own reaches in N.

    python benchmarks/cost_model_trials.py search --records DIR --logs DIR --workers 16
        --cores-per-worker 2 [--budget SECONDS] [--trials 64] [--seeds 5] [--only TASK,...]
    python benchmarks/cost_model_trials.py show --logs DIR [--json OUT] [--trials 64]

Both searches have MetaSchedule's rules, start from nothing but them, and are measured and checked
alike. Ours has a model of the records of other tasks (DIR of cost_model_llvm.py), so never of the
task it searches; ``product`` is the same with the rule's own kernel first, as ``tune`` does it.
MetaSchedule's has its defaults: evolution of 512 candidates in 4 generations, and its XGBModel,
which predicts by chance for the first 100 samples; ``eager`` is the same with a model from the
first batch on. A search is a folder of records, and goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import core_sets
import loop_tasks
import numpy as np
from cost_model_load import machine, stored
from cost_model_stock import StockSession
from cost_model_tables import ratios

from tvmcap.kernel import entries, models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.loop_recall import recall
from tvmcap.kernel.loop_search import LoopNestSession
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.search import Session
from tvmcap.kernel.stores import Stores

SEARCHED = (
    "matmul-128x3072x768-silu",
    "matmul-256x512x1000-relu",
    "batched-16x256x256x64",
    "conv2d-128x28-128x3",
)
METHODS = ("ours", "stock", "eager", "product")
COMPARED = METHODS[:2]
"""Methods that a seed needs all trials of, to count."""
BATCHES = {"ours": 8, "stock": 16, "eager": 16, "product": 8}
"""Candidates that each asks for at a time: `tune` does with ours, TVM's examples with its own."""


class Search(NamedTuple):
    """One search: what searches which task, with which seed, for how many trials."""

    records: str
    logs: str
    cores: int
    task: str
    method: str
    seed: int
    trials: int

    @property
    def folder(self) -> Path:
        """Where its records are."""
        return Path(self.logs) / f"{self.method}-{self.task}-{self.seed}"


def session_of(search: Search, target: Any, stores: Stores) -> Session:
    """Return the session of a search, which knows what it measured before."""
    task = loop_tasks.task(search.task, target)
    before = stores.history(task.key, target)
    if search.method in ("stock", "eager"):
        return StockSession(
            task, target, stores, search.seed, 100 if search.method == "stock" else 0
        )
    model = taught(Path(search.records), search.task, target, search.seed)
    for group in LOOP_NESTS.groups(before):
        model.add(group.name, group.rows, group.times_us)
    model.fit()
    rule = entries.rule if search.method == "product" else None
    return LoopNestSession(task, {}, target, stores, search.seed, rule, model)


def taught(records: Path, name: str, target: Any, seed: int) -> RankModel:
    """Return a model of all tasks' records for a target but those of the task itself."""
    store = stored(records)
    others = [loop_tasks.task(n, target) for n in loop_tasks.TASKS if n != name]
    keys = {task.key for task in others}
    known = [r for r in Stores((store,), store).usable(target) if r.key in keys]
    return models.train(recall(known, others), LOOP_NESTS, target, seed)


def work(search: Search, seat: core_sets.Seat) -> None:
    """Search, batch by batch."""
    target, store = loop_tasks.target(search.cores), RecordStore(search.folder)
    session = session_of(search, target, Stores((store,), store))
    seat.search(session, search.trials - len(store.records), BATCHES[search.method])


def curve(store: RecordStore) -> list[float]:
    """Return the best time after each trial, microseconds; infinite while all failed."""
    times = [np.inf if r.median_us is None else r.median_us for r in store.records]
    return [float(t) for t in np.minimum.accumulate(times)] if times else []


def row(logs: Path, name: str, trials: int, seeds: int) -> dict[str, Any] | None:
    """Return, of a task, the trials of each method to what stock has after ``trials``, by seed.

    ``reached`` counts them from 1; None where all trials of a method did not suffice. That of
    ``stock`` is the trial at which it found its best.
    """
    curves = {
        method: [curve(RecordStore(logs / f"{method}-{name}-{seed}")) for seed in range(seeds)]
        for method in METHODS
    }
    whole = [i for i in range(seeds) if all(len(curves[m][i]) >= trials for m in COMPARED)]
    if not whole:
        return None
    goals = [curves["stock"][i][trials - 1] for i in whole]
    reached = {
        method: [_first(found[i][:trials], goal) for i, goal in zip(whole, goals, strict=True)]
        for method, found in curves.items()
    }
    asked = {m: [len(found[i][:trials]) for i in whole] for m, found in curves.items()}
    raw = {
        method: [[round(t, 1) for t in found[i]] for i in whole] for method, found in curves.items()
    }
    best = {method: [c[-1] if c else None for c in found] for method, found in raw.items()}
    measured = RecordStore(logs / f"ours-{name}-{whole[0]}").records
    return {
        "task": name,
        "machine": machine(measured),
        "trials": trials,
        "seeds": whole,
        "goal_us": [round(goal, 1) for goal in goals],
        "reached": reached,
        "asked": asked,
        "best_us": best,
        "curves_us": raw,
    }


def _first(times: Sequence[float], goal: float) -> int | None:
    return next((i + 1 for i, us in enumerate(times) if us <= goal), None)


def shown(logs: Path) -> str:
    """Count the trials of each method."""
    counts = {
        method: sum(len(RecordStore(folder).records) for folder in logs.glob(f"{method}-*"))
        for method in METHODS
    }
    return ", ".join(f"{method} {count} trials" for method, count in counts.items())


def show(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Print how many trials each took, and write the rows."""
    found = [row(options.logs, name, options.trials, options.seeds) for name in names]
    rows = [r for r in found if r is not None]
    for r in rows:
        each = ratios(r)
        mean = float(np.exp(np.mean(np.log(each))))
        print(f"{r['task']:28} stock {r['reached']['stock']} ours {r['reached']['ours']}"
              f" {mean:.1f}x ({min(each):.1f} to {max(each):.1f})")  # fmt: skip
    if options.json and rows:
        from common import write

        write(options.json, rows, folders=("kernel", "schedules"))


def main() -> None:
    """Search, or show what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("search", "show"))
    parser.add_argument("--records", type=Path, help="what the model learns from")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cores-per-worker", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", default="ours,stock")
    parser.add_argument("--only", default=",".join(SEARCHED), help="TASK,...")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = loop_tasks.named([n for n in options.only.split(",") if n])
    if options.verb == "show":
        return show(options, names)
    if options.records is None:
        parser.error("search needs --records, what cost_model_llvm.py measured")
    folders = (str(options.records), str(options.logs))
    searches = [
        Search(*folders, options.cores_per_worker, name, method, seed, options.trials)
        for seed in range(options.seeds)
        for name in names
        for method in options.methods.split(",")
    ]
    how = (options.workers, options.cores_per_worker, options.budget)
    core_sets.run(searches, work, *how, lambda: shown(options.logs))


if __name__ == "__main__":
    main()

"""How well the cost model ranks candidates of shapes it never saw, against simpler orders.

Held out are whole (K, N) pairs, a third of them, and one epilogue where records have several; never
M alone. Each seed holds out others. Rows: ours, the analytic estimate alone (prior), squared error
on the same features (regression), random; for loop nests MetaSchedule's own model, too (stock),
where the modules that were tuned are given.

    python benchmarks/cost_model.py --json OUT [--logs FOLDER] [--template NAME] [--write FOLDER]
    python benchmarks/cost_model.py --json OUT --target llvm --modules FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, meta
from cost_model_metrics import CLOSE, NAMES, Scored, ceiling, dropped, metrics
from cost_model_stock import Stock

from tvmcap.kernel.cost_model import PRIOR, RankModel
from tvmcap.kernel.dataset import Group, data_hash, group_name
from tvmcap.kernel.records import Record, RecordStore

HELD_OUT = 3
"""One in so many (K, N) pairs is held out."""
LEAST = 8
"""Candidates that a group must have to be tested on."""
EXHAUSTIVE = 100
"""Candidates of a group from which on the best of them counts as that of an exhaustive search."""


def pair_of(group: Group) -> tuple[Any, ...]:
    """Return what is held out together: K and N, the columns of a row kernel, a loop nest."""
    work = group.workload
    return tuple(work[name] for name in ("k", "n", "columns", "func") if name in work)


def epilogue_of(group: Group, names: Mapping[str, str]) -> str:
    """Return the name of a group's epilogue; those without one count as one."""
    return names.get(str(group.workload.get("digest")), "unnamed")


def split(
    groups: Sequence[Group], names: Mapping[str, str], seed: int
) -> tuple[list[Group], list[Group]]:
    """Return the groups to learn from, and those held out."""
    rng = np.random.default_rng(seed)
    found = sorted({pair_of(g) for g in groups}, key=str)
    chosen = rng.permutation(len(found))[: -(-len(found) // HELD_OUT)]
    held = {found[i] for i in chosen}
    epilogues = sorted({epilogue_of(g, names) for g in groups})
    out = epilogues[int(rng.integers(len(epilogues)))] if len(epilogues) > 1 else None
    test = [g for g in groups if pair_of(g) in held or epilogue_of(g, names) == out]
    tested = set(map(id, test))
    return [g for g in groups if id(g) not in tested], test


def measured(group: Group) -> tuple[Any, Any]:
    """Return which candidates ran, and their times."""
    ran = np.array([t is not None for t in group.times_us], dtype=bool)
    return ran, np.array([t for t in group.times_us if t is not None], dtype=np.float64)


def orders(
    train: Sequence[Group], features: Sequence[str], seed: int, stock: Stock | None
) -> dict[str, Any]:
    """Return what scores the candidates of a group, by name."""
    names, rng = tuple(features), np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for name, objective, columns in (
        ("ours", "rank:pairwise", names),
        ("ndcg", "rank:ndcg", names),
        ("regression", "reg:squarederror", names),
    ):
        model = RankModel(seed, columns, objective)
        model.pretrain(train)
        found[name] = partial(_margins, model)
    if PRIOR in names:
        found["prior"] = partial(_margins, RankModel(seed, names))
    if stock is not None:
        found["stock"] = stock.train(train, seed)
    return {**found, "random": lambda group: rng.random(len(group.rows))}


def _margins(model: RankModel, group: Group) -> Any:
    return model.margins(group.rows)


def evaluate(
    groups: Sequence[Group],
    features: Sequence[str],
    names: Mapping[str, str],
    seed: int,
    stock: Stock | None = None,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each order on what one seed holds out."""
    train, test = split(groups, names, seed)
    test = [g for g in test if measured(g)[0].sum() >= LEAST]
    if not train or not test:
        raise SystemExit(f"{len(train)} groups to learn from and {len(test)} to test on: too few")
    result = {}
    for name, score in orders(train, features, seed, stock).items():
        scored = []
        for group in test:
            ran, times = measured(group)
            scored.append(Scored(np.asarray(score(group))[ran], times))
        result[name] = metrics(scored)
        large = [s for s in scored if len(s.times_us) >= EXHAUSTIVE]
        if large:
            ones = [s.times_us.min() / s.times_us[np.argmax(s.scores)] for s in large]
            result[name]["zero_trial"] = float(np.exp(np.mean(np.log(ones))))
            result[name]["zero_trial_shapes"] = float(len(large))
    return result


def over_seeds(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the mean of each metric over seeds, and its least and largest value as ``spread``."""
    table: dict[str, Any] = {}
    for row in runs[0]:
        columns = defaultdict(list)
        for run in runs:
            for name, value in run[row].items():
                columns[name].append(value)
        means = {name: round(float(np.mean(values)), 4) for name, values in columns.items()}
        spread = {n: [round(min(v), 4), round(max(v), 4)] for n, v in columns.items()}
        table[row] = {**means, "spread": spread}
    return table


def timed_twice(records: Sequence[Record]) -> list[list[tuple[float, float]]]:
    """Return, a group, the first and last time of the candidates measured more than once."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if r.median_us is not None:
            found[group_name(r.workload_hash, r.sizes)][r.candidate].append(r.median_us)
    return [[(t[0], t[-1]) for t in g.values() if len(t) > 1] for g in found.values()]


def describe(
    groups: Sequence[Group], records: Sequence[Record], names: Mapping[str, str]
) -> dict[str, Any]:
    """Count what there is, and say what measuring again would give."""
    times = [measured(g)[1] for g in groups]
    share, count = ceiling(timed_twice(records))
    return {
        "records": len(records),
        "candidates": int(sum(len(g.times_us) for g in groups)),
        "failed": int(sum(t is None for g in groups for t in g.times_us)),
        "shapes": len(groups),
        "pairs_of_k_and_n": len({pair_of(g) for g in groups}),
        "epilogues": len({epilogue_of(g, names) for g in groups}),
        "shapes_of_100": sum(len(t) >= EXHAUSTIVE for t in times),
        "dropped_pairs": round(dropped(times), 4),
        "dropped_below": CLOSE,
        "ceiling": None if share is None else round(share, 4),
        "ceiling_pairs": count,
        "data": data_hash(groups),
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table as text."""
    lines = [f"{'':12}" + "".join(f"{name:>24}" for name in NAMES)]
    for row, values in rows.items():
        cells = (
            f"{values[n]:.3f} ({values['spread'][n][0]:.3f}-{values['spread'][n][1]:.3f})"
            for n in NAMES
        )
        lines.append(f"{row:12}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Evaluate, print, and write."""
    from tvmcap.base.codegen import make_target
    from tvmcap.kernel import models
    from tvmcap.kernel.loop_features import LOOP_NESTS
    from tvmcap.schedules import TEMPLATES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--logs", type=Path, action="append", help="folders of records")
    parser.add_argument("--target", default="cuda", help="cuda or llvm")
    parser.add_argument("--template", help="default: hopper_gemm, and loop_nest for llvm")
    parser.add_argument("--modules", type=Path, help="the fused modules of loop nests' records")
    parser.add_argument("--epilogues", type=Path, help="JSON: name of an epilogue by digest")
    parser.add_argument("--any-source", action="store_true", help="earlier sources' records, too")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="folder for a model learnt from all of it")
    options = parser.parse_args()
    target = make_target({"kind": "cuda", "arch": "sm_90a"} if options.target == "cuda" else "llvm")
    kinds: dict[str, Any] = {t.name: t for t in (*TEMPLATES, LOOP_NESTS)}
    chosen = options.template or ("hopper_gemm" if options.target == "cuda" else LOOP_NESTS.name)
    if chosen not in kinds:
        raise SystemExit(f"--template {chosen}: expected one of {', '.join(kinds)}")
    template = kinds[chosen]
    folders = options.logs or [ROOT / "tuning_logs" / options.target]
    records = [
        r for f in folders for r in RecordStore(f).records if (r.template or "loop_nest") == chosen
    ]
    groups = models.groups(records, template, target, options.any_source)
    stock = Stock(options.modules, target) if options.modules else None
    if stock is not None:
        groups = [g for g in groups if stock.knows(g)]
    names = json.loads(options.epilogues.read_text()) if options.epilogues else {}
    if not groups:
        raise SystemExit(f"no record of today's {template.name} among {len(records)}")
    about = describe(groups, records, names)
    features = template.feature_names
    runs = [evaluate(groups, features, names, s, stock) for s in range(options.seeds)]
    rows = over_seeds(runs)
    print(json.dumps(about, indent=1))
    print(table(rows))
    if options.json:
        found = {"meta": meta(), "data": {options.target: about}, options.target: rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        model = models.train(records, template, target, 0, any_source=options.any_source)
        print(models.save(model, options.write, template.name, target))


if __name__ == "__main__":
    main()

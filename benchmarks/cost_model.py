"""How well the cost model ranks candidates of shapes it never saw, against simpler orders.

Rows: ours, the analytic estimate alone (prior), squared error on the same features (regression),
random; for loop nests, which have no estimate, MetaSchedule's own model (stock), and
ours with MetaSchedule's features of each store, too (stores). ``zero_trial`` is
the best time over that of the pick that ``tvmcap.build`` would make, the geometric mean over
shapes; ``search_N`` the best time over the best of N trials of the search that ``tvmcap.tune``
runs, replayed on records: with the model (ours), without one (prior), of candidates drawn (random).
The section ``transfer`` has what records of one dtype tell of another, or those of one processor;
``unseen`` has the metrics on products that ``--unseen`` holds and that the constants of the
estimate were not fitted to either, by models that learnt from all others.

    python benchmarks/cost_model.py --json OUT [--logs FOLDER] [--unseen FOLDER]
        [--template NAME] [--write FOLDER]
    python benchmarks/cost_model.py --json OUT --target llvm [--logs FOLDER] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, meta
from cost_model_load import load, load_records
from cost_model_metrics import CLOSE, EXHAUSTIVE, NAMES, ceiling, dropped, evaluated, measured
from cost_model_replay import TRIALS, drawn, replay, replayed, search_metrics
from cost_model_split import EPILOGUES, epilogue_of, in_random_order, pair_of, split
from cost_model_stock import Stock
from cost_model_transfer import transfer

from tvmcap.kernel import models
from tvmcap.kernel.cost_model import PRIOR, RankModel
from tvmcap.kernel.dataset import Group, data_hash, group_name
from tvmcap.kernel.records import Record

SAMPLES = Path(__file__).with_name("records")
FURTHER = ("zero_trial", *(f"search_{n}" for n in TRIALS))
LEAST = 8
"""Candidates that a group must have to be tested on."""


def orders(
    train: Sequence[Group], features: Sequence[str], seed: int, stock: Stock | None
) -> dict[str, Any]:
    """Return what scores candidates, by name: a model, or a function of the group."""
    names, rng = tuple(features), np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for name, objective in (
        ("ours", "rank:pairwise"),
        ("ndcg", "rank:ndcg"),
        ("regression", "reg:squarederror"),
    ):
        found[name] = RankModel(seed, names, objective)
        found[name].pretrain(train)
    if PRIOR in names:
        found["prior"] = RankModel(seed, names)
    if stock is not None:
        found["stock"] = stock.train(train, seed)
        found["stores"] = with_stores(train, stock, seed)
    return {**found, "random": lambda group: rng.random(len(group.rows))}


def with_stores(train: Sequence[Group], stock: Stock, seed: int) -> Callable[[Group], Any]:
    """Return what scores the candidates of a group by MetaSchedule's features, too."""
    model, known = RankModel(seed), [replace(g, rows=stock.with_stores(g)) for g in train]
    model.pretrain(known)
    return lambda group: model.margins(stock.with_stores(group))


def evaluate(
    groups: Sequence[Group],
    template: Any,
    target: Any,
    names: Mapping[str, str],
    seed: int,
    stock: Stock | None = None,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each order on what one seed holds out."""
    return judged(*split(groups, names, seed), template, target, seed, stock)


def judged(
    train: Sequence[Group],
    test: Sequence[Group],
    template: Any,
    target: Any,
    seed: int,
    stock: Stock | None = None,
) -> dict[str, dict[str, float]]:
    """Return the metrics on some groups of each order, learnt from others."""
    test = [g for g in test if measured(g)[0].sum() >= LEAST]
    if not train or not test:
        raise SystemExit(f"{len(train)} groups to learn from and {len(test)} to test on: too few")
    found = orders(train, template.feature_names, seed, stock)
    result = {name: evaluated(order, test) for name, order in found.items()}
    shapes = replayed(test, template, seed)
    for name in ("ours", "prior") if shapes else ():
        runs = [replay(g, template, found[name], target, seed) for g in shapes]
        result[name].update(search_metrics(runs))
    if shapes:
        result["random"].update(search_metrics([drawn(g, seed) for g in shapes]))
    return result


def over_seeds(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the mean of each metric over seeds, and its least and largest value as ``spread``."""
    table: dict[str, Any] = {}
    for row in runs[0] if runs else ():
        columns = defaultdict(list)
        for run in runs:
            for name, value in run[row].items():
                columns[name].append(value)
        means = {name: round(float(np.mean(values)), 4) for name, values in columns.items()}
        spread = {n: [round(min(v), 4), round(max(v), 4)] for n, v in columns.items()}
        table[row] = {**means, "spread": spread}
    return table


def timed_twice(
    records: Sequence[Record], second: Sequence[Record]
) -> list[list[tuple[float, float]]]:
    """Return, a group, the first and last time of the candidates measured more than once."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in (*records, *second):
        if r.median_us is not None:
            found[group_name(r.workload_hash, r.sizes)][r.candidate].append(r.median_us)
    return [[(t[0], t[-1]) for t in g.values() if len(t) > 1] for g in found.values()]


def describe(
    groups: Sequence[Group],
    records: Sequence[Record],
    second: Sequence[Record],
    names: Mapping[str, str],
) -> dict[str, Any]:
    """Count what there is, and say what measuring again would give."""
    times = [measured(g)[1] for g in groups]
    share, count = ceiling(timed_twice(records, second))
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


def write(path: Path, target: str, rows: Any, sections: Mapping[str, Any]) -> None:
    """Write the rows and sections of a target; those of another in the file stay.

    ``meta`` is of the last run, ``metas`` of each target's.
    """
    known = json.loads(path.read_text()) if path.is_file() else {}
    more = {name: {**known.get(name, {}), target: part} for name, part in sections.items()}
    found = {**known, "meta": sections["metas"], **more, target: rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table as text."""
    known = [n for n in (*NAMES, *FURTHER) if any(n in values for values in rows.values())]
    lines = [f"{'':12}" + "".join(f"{name:>24}" for name in known)]
    for row, values in rows.items():
        cells = (
            f"{values[n]:.3f} ({values['spread'][n][0]:.3f}-{values['spread'][n][1]:.3f})"
            if n in values
            else ""
            for n in known
        )
        lines.append(f"{row:12}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Evaluate, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--logs", type=Path, action="append", help="folders of records; default: the shipped"
    )
    parser.add_argument("--target", default="cuda", choices=("cuda", "llvm"))
    parser.add_argument(
        "--unseen", type=Path, default=SAMPLES / "unseen", help="records that nothing was fitted to"
    )
    parser.add_argument(
        "--again", type=Path, default=SAMPLES / "again", help="candidates measured a second time"
    )
    parser.add_argument("--template", help="default: hopper_gemm, and loop_nest for llvm")
    parser.add_argument("--epilogues", type=Path, default=EPILOGUES, help="names, by digest")
    parser.add_argument("--any-source", action="store_true", help="earlier sources' records, too")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="folder for a model learnt from all of it")
    options = parser.parse_args()
    shipped = {"cuda": ROOT / "tuning_logs" / "cuda", "llvm": SAMPLES / "llvm"}
    folders = options.logs or [shipped[options.target]]
    data = load(options.target, folders, options.template, options.any_source)
    names = json.loads(options.epilogues.read_text())
    groups, template = data.groups, data.template
    if not groups:
        raise SystemExit(f"no record of today's {template.name} among {len(data.records)}")
    second = load_records(options.target, [options.again], options.template)
    about = {**describe(groups, data.records, second, names), "machine": data.machine}
    seeds = range(options.seeds)
    rows = over_seeds(
        [evaluate(groups, template, data.target, names, s, data.stock) for s in seeds]
    )
    print(json.dumps(about, indent=1))
    print(table(rows))
    moved = [transfer(data.source, data.own, template.feature_names, s) for s in seeds]
    across = over_seeds([run for run in moved if run is not None])
    if across:
        print(table(across))
    unseen = {}
    if new := load_records(options.target, [options.unseen], options.template):
        fresh = models.groups(new, template, data.target, options.any_source)
        unseen = over_seeds(
            [judged(groups, in_random_order(fresh, s), template, data.target, s) for s in seeds]
        )
        print(table(unseen))
    if options.json:
        sections = {
            "data": about,
            "transfer": across,
            "unseen": unseen,
            "metas": meta(("kernel", "schedules")),
        }
        write(options.json, options.target, rows, sections)
    if options.write:
        model = models.train(data.records, template, data.target, any_source=options.any_source)
        print(models.save(model, options.write, template.name, data.target))


if __name__ == "__main__":
    main()

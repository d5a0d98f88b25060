"""Write the tables of README.md and docs/, and figures, from benchmarks/results/*.json.

    python benchmarks/render.py            rewrites the documents
    python benchmarks/render.py --check    changes nothing; exit status 1 where one is out of date

A table stands between <!-- table:NAME --> and <!-- end -->. A row measured with other source than
the code's of today is marked stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cost_model_tables as cost
import gemm_tables as gemm
import plots
import quantize_tables
import runtime_tables as runtime
import serving_tables
import training_tables as training

from tvmcap.versions import COMPILER, source_hash

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STALE = "stale"

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def walk(rows: list[Row]) -> Table:
    """One line a step from eager to compiled."""
    first = rows[0]
    head = [
        "step",
        "kernels",
        "HBM bytes",
        "activation traffic",
        "planned peak",
        "us a call",
        "eager, us",
        "speed-up",
    ]
    eager = [
        "eager",
        str(first["eager_kernels"]),
        "",
        _x(first["eager_activation_traffic"]),
        "",
        "",
        "",
        "",
    ]
    body = [
        [
            row["step"],
            str(row["kernels"]),
            _mib(row["hbm_bytes"]),
            _x(row["activation_traffic"]),
            _mib(row["peak_bytes_planned"]),
            _us(row["ours_us"]),
            _us(row["baselines_us"]["eager"]),
            _over(row, "eager"),
        ]
        for row in rows
    ]
    return head, [eager, *body]


def cpu_block(rows: list[Row]) -> Table:
    """One line a batch size: ours tuned and untuned, eager, torch.compile."""
    head = ["block", "batch", "tuned, us", "untuned, us", "eager, us", "torch.compile, us"]
    head += ["speed-up over eager", "over torch.compile"]
    body = []
    for row in rows:
        times = [_us(row["baselines_us"].get(n)) for n in ("untuned", "eager", "torch.compile")]
        ratios = [_over(row, "eager"), _over(row, "torch.compile")]
        body.append([row["case"], str(row["M"]), _us(row["ours_us"]), *times, *ratios])
    return head, body


def gpu_blocks(rows: list[Row]) -> Table:
    """One line a case: the range of speed-ups over eager in each dtype."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        cases[_case(row)].append(row)
    body = []
    for case, of_case in cases.items():
        kernels = ", ".join(dict.fromkeys(str(r["kernels"]) for r in of_case if "kernels" in r))
        right = f"{sum(bool(r.get('right')) for r in of_case)} of {len(of_case)}"
        sizes = ", ".join(dict.fromkeys(str(r["B"]) for r in of_case))
        cells = [_range([r for r in of_case if r["dtype"] == d]) for d in dtypes]
        body.append([case, sizes, kernels, right, *cells])
    return ["case", "batch sizes", "kernels", "right", *(f"{d}, speed-up" for d in dtypes)], body


def gpu_blocks_all(rows: list[Row]) -> Table:
    """One line a measurement."""
    head = [
        "case",
        "dtype",
        "batch",
        "kernels",
        "us a call",
        "eager, us",
        "speed-up",
        "error",
        "eager's error",
        "right",
    ]
    body = []
    for row in rows:
        names = [_case(row), row["dtype"], str(row["B"])]
        if "failed" in row:
            body.append(
                [*names, "", "", "", "", "", "", row["failed"].replace("|", "/").replace("\n", " ")]
            )
            continue
        times = [_us(row["ours_us"]), _us(row["baselines_us"]["eager"]), _over(row, "eager")]
        errors = [
            f"{row['error']:.2g}",
            f"{row['eager_error']:.2g}",
            "yes" if row["right"] else "**no**",
        ]
        body.append([*names, str(row["kernels"]), *times, *errors])
    return head, body


def overheads(rows: list[Row]) -> Table:
    """One line a figure: median and spread."""
    body = [
        [r["figure"], f"{r['median']:.3g} {r['unit']}", f"{r['p10']:.3g} to {r['p90']:.3g}"]
        for r in rows
    ]
    return ["figure", "median", "10th to 90th percentile"], body


TABLES: dict[str, tuple[str, Callable[[list[Row]], Table]]] = {
    "walk": ("walk", walk),
    "cpu_block": ("cpu_block", cpu_block),
    "gpu_blocks": ("gpu_blocks", gpu_blocks),
    "gpu_blocks_all": ("gpu_blocks", gpu_blocks_all),
    "overheads": ("overheads", overheads),
    "runtime_host": ("runtime_host", runtime.host_times),
    "runtime_counts": ("runtime_host", runtime.counts),
    "runtime_host_cpu": ("runtime_host_cpu", runtime.host_times),
    "runtime_counts_cpu": ("runtime_host_cpu", runtime.counts),
    "gemm_summary": ("gemm_suite", gemm.summary_table),
    "gemm_suite": ("gemm_suite", lambda rows: gemm.suite_table(_us)(rows)),
    "gemm_row_template": ("gemm_suite", lambda rows: gemm.row_table(_us)(rows)),
    "gemm_never_tuned": ("gemm_suite", lambda rows: gemm.never_tuned_table(_us)(rows)),
    "gemm_ladder": ("gemm_ladder", gemm.ladder_table),
    "quantize_gpu": ("quantize_gpu", lambda rows: quantize_tables.table(_us)(rows)),
    "quantize_cpu": ("quantize_cpu", lambda rows: quantize_tables.cpu_table(_us)(rows)),
    "serving": ("serving", serving_tables.table),
    "training": ("training", lambda rows: training.layers(_us)(rows)),
    "training_memory": ("training_memory", training.planned),
    "training_budget": ("training", lambda rows: training.budgets(_us)(rows)),
    "gemm_traffic": ("gemm_traffic", gemm.traffic_table),
    "cost_model_cuda": ("cost_model", cost.orders),
    "cost_model_cuda_records": ("cost_model", cost.records),
    "cost_model_cuda_transfer": ("cost_model", cost.transfer("bf16", "fp16")),
    "cost_model_cuda_unseen": ("cost_model", cost.orders),
    "cost_model_llvm": ("cost_model", cost.orders),
    "cost_model_llvm_records": ("cost_model", cost.records),
    "cost_model_llvm_transfer": ("cost_model", cost.transfer("x86-64-v3", "this processor")),
    "cost_model_trials": ("cost_model_trials", cost.trials),
    "search_overhead": ("search_overhead", cost.overhead),
}
"""Name of a table to the result file it is made of and what makes it."""
PARTS: dict[str, Callable[[Row], tuple[Row, list[Row]]]] = {
    "runtime_host": runtime.part(runtime.calls),
    "runtime_counts": runtime.part(runtime.others),
    "runtime_host_cpu": runtime.part(runtime.calls),
    "runtime_counts_cpu": runtime.part(runtime.others),
    "cost_model_cuda": cost.part("cuda"),
    "cost_model_cuda_records": cost.data("cuda"),
    "cost_model_cuda_transfer": cost.part("cuda", "transfer"),
    "cost_model_cuda_unseen": cost.part("cuda", "unseen"),
    "cost_model_llvm": cost.part("llvm"),
    "cost_model_llvm_records": cost.data("llvm"),
    "cost_model_llvm_transfer": cost.part("llvm", "transfer"),
}
"""What takes the meta data and the rows of a table from a file that has several parts."""


def table(name: str, results: Path, source: Callable[[tuple[str, ...]], str]) -> str:
    """Render one table; ``source`` gives the hash of folders of the package as they are."""
    file, make = TABLES[name]
    path = results / f"{file}.json"
    data = json.loads(path.read_text()) if path.is_file() else {}
    meta, rows = PARTS[name](data) if name in PARTS else (data.get("meta"), data.get("rows"))
    if not meta or not rows:
        return (
            f"Not measured yet: `benchmarks/{file}.py` writes `benchmarks/results/{file}.json`.\n"
        )
    now = source(tuple(meta.get("folders", COMPILER)))
    stale = [row.get("source", meta["source"]) != now for row in rows]
    head, body = make(rows)
    note = ""
    if all(stale):
        note = f" **{STALE.capitalize()}: the source has changed since.**"
    elif any(stale):
        head, body = _mark(head, body, stale)
    lines = [_meta(meta) + note, "", _line(head), _line(["---"] * len(head)), *map(_line, body)]
    return "\n".join(lines) + "\n"


def fill(text: str, results: Path, source: Callable[[tuple[str, ...]], str]) -> str:
    """Replace what stands between the markers; raises ValueError for a table there is not."""

    def new(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{table(match[2], results, source)}{match[3]}"

    return MARKED.sub(new, text)


def _mark(head: list[str], body: list[list[str]], stale: list[bool]) -> Table:
    """Mark rows, or every line where a line is not a row."""
    if len(body) != len(stale):
        return [*head, ""], [[*row, f"partly {STALE}"] for row in body]
    return [*head, ""], [[*row, STALE if old else ""] for row, old in zip(body, stale, strict=True)]


def _meta(meta: dict[str, Any]) -> str:
    threads = f", {meta['threads']} threads" if not meta.get("card") and meta.get("threads") else ""
    driver = f", driver {meta['driver']}" if meta.get("driver") else ""
    where = f"{meta.get('card') or meta['cpu']}{threads}{driver}"
    versions = ", ".join(
        f"{k} {v}" for k, v in meta["versions"].items() if k in ("torch", "tvm") and v
    )
    dtype = f"; {meta['dtype'].removeprefix('torch.')}" if "dtype" in meta else ""
    return f"*{where}; {versions}; {meta['date'][:10]}{dtype}; `{meta['command']}`.*"


def _case(row: Row) -> str:
    return f"{row['case']}, weights frozen" if row.get("frozen") else str(row["case"])


def _range(rows: list[Row]) -> str:
    ratios = sorted(r["speedup_vs_best"] for r in rows if "speedup_vs_best" in r)
    failed = sum("failed" in r for r in rows)
    parts = [f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x"] if ratios else []
    return ", ".join([*parts, *([f"{failed} failed"] if failed else [])]) or "-"


def _us(latency: dict[str, float] | None) -> str:
    if latency is None:
        return "-"
    digits = 0 if latency["median"] >= 1000 else 1
    median, low, high = (f"{latency[name]:.{digits}f}" for name in ("median", "p10", "p90"))
    return f"{median} ({low} to {high})"


def _over(row: Row, baseline: str) -> str:
    base = row["baselines_us"].get(baseline)
    return "-" if base is None else f"{base['median'] / row['ours_us']['median']:.2f}x"


def _x(value: float) -> str:
    return f"{value:.2f}x"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Rewrite the documents, or say which are out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where a document is out of date"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("documents", type=Path, nargs="*", help="default: README.md and docs/*.md")
    options = parser.parse_args()
    old = []
    for path in options.documents or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        new = fill(text, options.results, source_hash)
        if new != text:
            old.append(path)
            if not options.check:
                path.write_text(new)
    if not options.documents:
        for name in plots.outdated(ROOT / "docs", options.results):
            old.append(ROOT / "docs" / name)
            if not options.check:
                plots.draw(name, ROOT / "docs", options.results)
    done = "out of date; run python benchmarks/render.py" if options.check else "rendered"
    for path in old:
        print(f"{path}: {done}")
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main())

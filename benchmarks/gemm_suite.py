"""The GEMM suite: one library a (K, N) for every M, beside cuBLASLt, PyTorch and torch.compile.

    python benchmarks/gemm_suite.py build FOLDER [--logs DIR] [--shapes 2048x1024x4096,...]
    python benchmarks/gemm_suite.py run FOLDER --json OUT [--budget SECONDS] [--again] [--fresh]

``build`` compiles a library for each (K, N), several at a time, and needs no GPU; the records that
decide its kernels are those of ``--logs``, the user's folder and the shipped ones. ``run`` checks
and times, and writes after each row; rows that OUT has already, of the same source and with every
baseline that is asked for, are kept, so that a run can be split. ``--fresh`` also compares sizes
that were never tuned with a tuning at that size; it may name some of the problems, as 1024x4096.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm

#: Sizes that no record is for, and the problems they are tried at.
NEVER_TUNED = {
    f"{k}x{n}": tuple(gemm.Shape(m, k, n) for m in (77, 500, 3000))
    for k, n in ((1024, 4096), (4096, 4096), (4096, 14336))
}
Row = dict[str, Any]


def library(folder: Path, k: int, n: int) -> Path:
    """Return where the library of a problem is."""
    return folder / f"{k}x{n}.so"


def example(name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return the function of ``"KxN"``, or of a case of the row template, and its arguments.

    Arguments are shapes by name; x and r have any number of rows.
    """
    import gemm_rows
    from gemm_timing import linear_gelu

    if name in gemm_rows.ROW_CASES:
        fn, order = gemm_rows.ROW_CASES[name]
        columns = gemm_rows.COLUMNS
        return fn, {n: (128, columns) if n in ("x", "r") else (columns,) for n in order}
    k, n = map(int, name.split("x"))
    return linear_gelu, {"x": (128, k), "w": (n, k), "b": (n,)}


def build_one(folder: Path, name: str, logs: str | None) -> None:
    """Compile one function for any number of rows into a library."""
    import torch

    import tvmcap

    fn, shapes = example(name)
    lib = tvmcap.build(
        fn,
        tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes.values()),
        target="cuda:sm_90a",
        dynamic={n: {0: tvmcap.Dim("B", max=gemm.MAX_ROWS)} for n in shapes if n in ("x", "r")},
        log_dir=logs,
        verify=False,
    )
    lib.export(folder / f"{name}.so")
    for served in lib.manifest.coverage:
        print(name, served["served_by"], served["ranges"], served["records"], flush=True)


def build(folder: Path, names: Iterable[str], logs: str | None, workers: int) -> None:
    """Compile libraries in processes of their own, several at a time."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> None:
        command = [sys.executable, __file__, "build", str(folder), "--only", name]
        command += ["--logs", logs] if logs else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout if done.returncode == 0 else done.stderr[-2000:], flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, names))


class Suite:
    """A result file in the making; ``summary`` gives the figures that its rows come to."""

    def __init__(
        self, options: argparse.Namespace, summary: Callable[[list[Row]], Row] | None = None
    ) -> None:
        from common import meta
        from gemm_tables import summary as of_gemms

        self.options, self.summary = options, summary or of_gemms
        self.start = time.monotonic()
        self.meta = meta(("schedules",), dtype="bfloat16")
        self.rows: list[Row] = []
        if options.json.exists():
            self.rows = json.loads(options.json.read_text())["rows"]

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.options.budget - (time.monotonic() - self.start))

    def wants(self, key: Row) -> bool:
        """Whether a row is missing, of other source, or lacks a baseline; says when time is out."""
        if self.left() < self.options.reserve:
            print(f"no time left for {key}", flush=True)
            return False
        old = next((r for r in self.rows if key.items() <= r.items()), None)
        fresh = old is not None and old["source"] == self.meta["source"] and "failed" not in old
        enough = old is not None and (old["complete"] or self.options.no_compile)
        return bool(self.options.again or not (fresh and enough))

    def add(self, key: Row, measured: Callable[[], Row]) -> None:
        """Measure a row that is wanted, put it in the place of the old one, write the file."""
        if not self.wants(key):
            return
        try:
            row = measured()
        except Exception as e:  # one row must not take the others along
            row = {"failed": f"{type(e).__name__}: {e}"[:400], "complete": False}
        new = {**key, **row, "source": self.meta["source"]}
        self.rows = [r for r in self.rows if not key.items() <= r.items()] + [new]
        shown = {k: v for k, v in new.items() if not isinstance(v, dict | list)}
        print(json.dumps(shown), flush=True)
        self.write()
        if "failed" in row:
            import torch

            torch.zeros(1, device="cuda").item()  # raises where a fault took the context along

    def write(self) -> None:
        """Write meta, rows and what they come to."""
        data = {"meta": self.meta, "summary": self.summary(self.rows), "rows": self.rows}
        self.options.json.write_text(json.dumps(data, indent=1) + "\n")


def run(options: argparse.Namespace) -> None:
    """Measure the rows that are wanted and not there yet."""
    import gemm_rows

    suite = Suite(options)
    suite.meta["bandwidth_gb_s"] = gb_s = gemm_rows.bandwidth()
    partial = functools.partial
    for shape in gemm.parse_shapes(options.shapes):
        path = library(options.folder, shape.k, shape.n)
        row = partial(gemm_rows.gemm_row, shape, path, options, gb_s)
        suite.add({"kind": "gemm", **gemm_rows.names(shape)}, row)
    for name in gemm_rows.ROW_CASES if options.shapes is None else ():
        suite.add({"kind": "row", "case": name}, partial(gemm_rows.row_case, name, options))
    for shapes in fresh(options.fresh):
        rows = tuple(shape.m for shape in shapes)
        for shape in shapes:
            path = library(options.folder, shape.k, shape.n)
            row = partial(gemm_rows.never_tuned_row, shape, rows, path, options)
            suite.add({"kind": "never tuned", **gemm_rows.names(shape)}, row)
    suite.write()
    print(json.dumps(suite.summary(suite.rows), indent=1), flush=True)


def fresh(text: str | None) -> list[tuple[gemm.Shape, ...]]:
    """Return the sizes of the problems that ``--fresh`` names, which are all without a name."""
    if text is None:
        return []
    names = text.split(",") if text else list(NEVER_TUNED)
    if not set(names) <= set(NEVER_TUNED):
        raise SystemExit(f"--fresh {text}: expected some of {','.join(NEVER_TUNED)}")
    return [NEVER_TUNED[name] for name in names]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="build one KxN or case in this process")
    parser.add_argument("--logs", help="folder of tuning records that come first")
    parser.add_argument("--shapes", help="MxKxN,...; default: the suite")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--json", type=Path, default=Path("gemm_suite.json"))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds to spend in all")
    parser.add_argument("--reserve", type=float, default=20.0, help="seconds one row may take")
    parser.add_argument(
        "--compile-cap", type=float, default=60.0, help="seconds torch.compile gets"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--again", action="store_true", help="measure rows that are there as well")
    parser.add_argument(
        "--fresh", nargs="?", const="", help="also tune at sizes never tuned: KxN,...; default: all"
    )
    parser.add_argument("--trials", type=int, default=48, help="trials of each such tuning")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Build or run."""
    options = parse()
    if options.verb == "run":
        run(options)
    elif options.only:
        build_one(options.folder, options.only, options.logs)
    else:
        shapes = gemm.parse_shapes(options.shapes)
        if options.shapes is None:
            import gemm_rows

            names = [*gemm_rows.ROW_CASES, *(f"{s.k}x{s.n}" for s in shapes), *NEVER_TUNED]
        else:
            names = [f"{s.k}x{s.n}" for s in shapes]
        build(options.folder, dict.fromkeys(names), options.logs, options.workers)


if __name__ == "__main__":
    main()

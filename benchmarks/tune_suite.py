"""Tune the problems of the GEMM suite, and pick what ships of the records.

    python benchmarks/tune_suite.py capture FOLDER [--schemes int8,e4m3]     needs no GPU
    python benchmarks/tune_suite.py tune FOLDER --logs DIR [--trials N] [--budget SECONDS]
    python benchmarks/tune_suite.py compact --logs DIR [--to tuning_logs/cuda] [--most 200]

``capture`` writes fused kernels as files; with ``--schemes`` those of the block in 8 bits, else in
bf16. ``tune`` tunes the block at the rows that the suite has for each (K, N) (and ``--rows`` beside
them), and the row template's cases; records go to DIR, and a run goes on where the last one
stopped. ``compact`` merges the measurements of DIR, without failures and without features that can
be computed again, into the records that ship, and prunes those as ``tvmcap cache prune`` does: for
each task and size the fastest candidates stay, and others, drawn, that a cost model learns from,
``--most`` in all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm
import quantized_gemm as quantized

ROW_CASE_ROWS = 8192
MOST_BYTES = 8_000_000


def problems(shapes: Sequence[gemm.Shape]) -> dict[tuple[int, int], list[int]]:
    """Return the rows of each (K, N)."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for shape in shapes:
        found[shape.k, shape.n].add(shape.m)
    return {problem: sorted(rows) for problem, rows in found.items()}


def capture_one(name: str, path: Path) -> None:
    """Write the fused module of one function, as ``tvmcap.tune`` makes it, in TVM's JSON."""
    import tvm

    size, _, scheme = name.partition("-")
    fused = quantized.fused(*map(int, size.split("x")), scheme) if scheme else fused_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tvm.ir.save_json(fused))


def fused_of(name: str) -> Any:
    """Return the fused module of a function of the suite."""
    import torch
    from gemm_suite import example

    fn, shapes = example(name)
    return gemm.fused(fn, {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()})


def capture_all(folder: Path, names: Iterable[str], workers: int) -> None:
    """Capture in processes of their own, several at a time."""

    def one(name: str) -> None:
        command = [sys.executable, __file__, "capture", str(folder), "--only", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(name, "captured" if done.returncode == 0 else done.stderr[-1500:], flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, names))


def tune(folder: Path, options: argparse.Namespace) -> None:
    """Tune every captured module within one budget."""
    import tvm

    from tvmcap.base.codegen import make_target
    from tvmcap.base.config import Config
    from tvmcap.kernel import spaces, tasks
    from tvmcap.kernel.stores import open_stores
    from tvmcap.kernel.tuner import Run
    from tvmcap.view.progress import LogProgress

    target = make_target("cuda")
    found = []
    for path in sorted(folder.glob("*.json")):
        sizes = sizes_of(path.stem, options)
        for task in tasks.extract(tvm.ir.load_json(path.read_text()), target, spaces.find):
            if sizes:
                found.append(replace(task, name=f"{path.stem}:{task.name}", typical=sizes))
    config = Config(
        target="cuda", log_dir=str(options.logs), tune=options.trials, budget_s=options.budget,
        seed=options.seed,
    )  # fmt: skip
    run = Run(config, target, open_stores(config, target), LogProgress())
    run.search(found, None)
    result = run.result()
    print(result, flush=True)
    print(f"{result.seconds / max(result.trials, 1):.3f} s a trial", flush=True)


def sizes_of(name: str, options: argparse.Namespace) -> tuple[int, ...]:
    """Return the rows at which what a file of this name holds is tuned; () leaves it out."""
    size, _, scheme = name.partition("-")
    k, _, n = size.partition("x")
    if not (k.isdecimal() and n.isdecimal()):
        return (ROW_CASE_ROWS,)
    asked = quantized.SHAPES if scheme and not options.shapes else gemm.parse_shapes(options.shapes)
    rows = problems(asked).get((int(k), int(n)), [])
    extra = [int(m) for m in options.rows.split(",")] if options.rows else []
    return tuple(sorted({*rows, *extra})) if rows else ()


def names_of(options: argparse.Namespace) -> list[str]:
    """Name what is captured: the problems of the schemes, or of bf16 and, for all, the rows'."""
    import gemm_rows

    if options.schemes:
        schemes = options.schemes.split(",")
        if not set(schemes) <= set(quantized.SCHEMES):
            raise SystemExit(f"--schemes {options.schemes}: expected {','.join(quantized.SCHEMES)}")
        asked = gemm.parse_shapes(options.shapes) if options.shapes else quantized.SHAPES
        return [f"{k}x{n}-{scheme}" for k, n in problems(asked) for scheme in schemes]
    cases = list(gemm_rows.ROW_CASES) if options.shapes is None else []
    return [f"{k}x{n}" for k, n in problems(gemm.parse_shapes(options.shapes))] + cases


def compact(logs: Path, to: Path, most: int) -> Any:
    """Merge the measurements of ``logs`` into the records that ship, and prune those."""
    from tvmcap.kernel.records import RecordStore
    from tvmcap.kernel.stores import open_store
    from tvmcap.kernel.upkeep import BEST, prune, why_dropped
    from tvmcap.schedules import TEMPLATES

    recalled = {template.name for template in TEMPLATES if template.recall is not None}
    measured = [record for record in open_store(logs).records if record.error is None]
    why = why_dropped(measured, best=len(measured), sample=0)
    shipped = RecordStore(to)
    shipped.append_missing(
        replace(record, features=None) if record.template in recalled else record
        for record, reason in zip(measured, why, strict=True)
        if reason is None
    )
    done = prune(to, best=BEST, sample=max(0, most - BEST))
    if done.bytes[1] > MOST_BYTES:
        raise SystemExit(
            f"{shipped.path}: {done.bytes[1]} bytes are more than {MOST_BYTES}: compact again with "
            "a smaller --most"
        )
    return done


def main() -> None:
    """Capture, tune or compact."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("capture", "tune", "compact"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("captured"))
    parser.add_argument("--only", help="capture one KxN or case in this process")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--shapes", help="MxKxN,...; default: the suite")
    parser.add_argument("--schemes", help="capture the block in 8 bits: int8,e4m3")
    parser.add_argument("--rows", help="further rows to tune each problem at, as 64,256")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=gemm.shipped())
    parser.add_argument("--most", type=int, default=200, help="candidates of a task and size")
    options = parser.parse_args()
    if options.verb == "capture" and options.only:
        capture_one(options.only, options.folder / f"{options.only}.json")
    elif options.verb == "capture":
        capture_all(options.folder, names_of(options), options.workers)
    elif options.verb == "tune":
        import logging

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        tune(options.folder, options)
    else:
        done = compact(options.logs, options.to, options.most)
        print(f"{options.to}: {done.kept} records; dropped: {dict(done.dropped)}")


if __name__ == "__main__":
    main()

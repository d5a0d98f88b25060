"""Measure many candidates of many products, for a cost model to learn from and be tested on.

    python benchmarks/cost_model_data.py capture FOLDER       fused kernels as files; needs no GPU
    python benchmarks/cost_model_data.py measure FOLDER --logs DIR [--tiled 100] [--few 40]
        [--budget SECONDS] [--workers N]
    python benchmarks/cost_model_data.py measure FOLDER --logs DIR --again 12

Each problem has one list of settings that all its sizes measure, so that a kernel is compiled once:
what the estimate puts first at each size in turn, then settings drawn from the whole space, all in
random order. The next problem's kernels are compiled while a GPU times the last one's. What was
measured before is left out, so that a run can be split. ``--again`` instead measures some
candidates of each size a second time, in random order: what two measurements agree on is what a
model can be right about. ``capture`` also writes the epilogues' names to epilogues.json here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm
import numpy as np
from cost_model_metrics import measured_once
from cost_model_split import EPILOGUES
from tune_suite import problems

SMALL = 64
"""Rows up to which the kernel with exchanged operands is measured, too."""
DRAWN = 0.4
"""Share of a list that is drawn from the whole space."""


class Problem(NamedTuple):
    """A product: sizes, dtype of its operands, and the name of its epilogue."""

    k: int
    n: int
    dtype: str
    epilogue: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        """Spell as files are named."""
        return f"{self.k}x{self.n}-{self.dtype}-{self.epilogue}"


_ROWS = (16, 128, 512, 1536, 4096)
PROBLEMS = (
    *(Problem(k, n, "bfloat16", "gelu", tuple(m)) for (k, n), m in problems(gemm.SUITE).items()),
    Problem(2048, 8192, "float16", "relu", _ROWS),
    Problem(5120, 5120, "bfloat16", "residual", _ROWS),
    Problem(11008, 4096, "float16", "residual", _ROWS),
    Problem(1536, 6144, "float16", "gelu", _ROWS),
    Problem(4096, 11008, "bfloat16", "relu", _ROWS),
    Problem(2560, 2560, "float16", "relu", _ROWS),
    # measured after the estimate had been fitted to the ones above
    Problem(3584, 18944, "bfloat16", "relu", _ROWS),
    Problem(6144, 2048, "float16", "residual", _ROWS),
    Problem(5120, 13824, "bfloat16", "gelu", _ROWS),
)


def function(epilogue: str) -> Any:
    """Return the function of an epilogue's name: of x, w [N, K], b and, maybe, a residual r."""
    import torch
    import torch.nn.functional as F

    return {
        "gelu": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        "relu": lambda x, w, b: torch.relu(F.linear(x, w, b)),
        "residual": lambda x, w, b, r: F.linear(x, w, b) + r,
    }[epilogue]


def capture(problem: Problem, folder: Path) -> None:
    """Write the fused module of a problem, as ``tvmcap.tune`` makes it, in TVM's JSON."""
    import torch
    import tvm

    shapes = {"x": (128, problem.k), "w": (problem.n, problem.k), "b": (problem.n,)}
    if problem.epilogue == "residual":
        shapes["r"] = (128, problem.n)
    dtype = getattr(torch, problem.dtype)
    args = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    fused = gemm.fused(function(problem.epilogue), args)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{problem}.json").write_text(tvm.ir.save_json(fused))


def settings(entries: Sequence[Any], tiled: int, few: int, seed: int) -> dict[Any, list[Any]]:
    """Return the settings that each entry of one problem measures, by entry.

    ``tiled`` settings of tiles for all sizes, and ``few`` of the kernel with exchanged operands for
    small ones, which also measure ``few`` of the tiles alone.
    """
    found: dict[Any, list[Any]] = {e: [] for e in entries}
    for swapped, count in ((False, tiled), (True, few)):
        sizes = [e for e in entries if not swapped or e.session.record_sizes["rows"] <= SMALL]
        if not sizes:
            continue
        ranked = {e: [k for k in e.session.by_estimate() if k.swapped == swapped] for e in sizes}
        rng = np.random.default_rng(seed)
        chosen: dict[Any, None] = {}
        for knobs in itertools.chain.from_iterable(zip(*ranked.values(), strict=True)):
            if len(chosen) < (1 - DRAWN) * count:
                chosen[knobs] = None
        points = next(iter(ranked.values()))
        for i in rng.permutation(len(points)):
            if len(chosen) < count:
                chosen[points[i]] = None
        for e in sizes:
            own = [k for k in ranked[e] if k in chosen]
            small = e.session.record_sizes["rows"] <= SMALL and not swapped
            found[e] += own[: few if small else None]
    # a card's clocks change in a run: what the estimate puts first shall not gain by it
    rng = np.random.default_rng(seed)
    return {e: [own[i] for i in rng.permutation(len(own))] for e, own in found.items()}


def batches(entries: Sequence[Any], options: argparse.Namespace) -> list[tuple[Any, list[Any]]]:
    """Return what is left to measure of one problem, by entry, or what is measured again."""
    if options.again:
        drawn = [(e, again(e.session, options.again, options.seed)) for e in entries]
        return [(e, proposals) for e, proposals in drawn if proposals]
    found = []
    for entry, points in settings(entries, options.tiled, options.few, options.seed).items():
        session = entry.session
        texts = {session.template.knobs_to_json(k): k for k in points}
        new = [k for text, k in texts.items() if text not in session.done]
        if new:
            found.append((entry, session.proposals(new)))
    return found


def again(session: Any, count: int, seed: int) -> list[Any]:
    """Return proposals of ``count`` candidates that ran, drawn from those measured once."""
    return list(session.repeat(measured_once(session, count, seed)))


def measure(folder: Path, names: Iterable[str], options: argparse.Namespace) -> None:
    """Build and measure problem after problem within the budget."""
    import tvm

    from tvmcap.base.config import Config
    from tvmcap.kernel import spaces, tasks
    from tvmcap.kernel.stores import open_stores
    from tvmcap.kernel.tuner import Run

    start, target = time.monotonic(), gemm.target()
    config = Config(
        target="cuda", log_dir=str(options.logs), tune=1 << 30, seed=options.seed,
        workers=options.workers,
    )  # fmt: skip
    run = Run(config, target, open_stores(config, target), None)
    known = {str(p): p for p in PROBLEMS}
    with run.measurer() as measurer, ThreadPoolExecutor(1) as ahead:

        def build(name: str) -> list[tuple[Any, list[Any]]]:
            mod = tvm.ir.load_json((folder / f"{name}.json").read_text())
            found = [
                replace(task, name=f"{name}:{task.name}", typical=known[name].rows)
                for task in tasks.extract(mod, target, spaces.find)
            ]
            todo = batches(run.open(found, None, measurer), options)
            candidates = [p.candidate for _, proposals in todo for p in proposals]
            measurer.build(candidates, [entry.session.workload for entry, _ in todo])
            return todo

        order = list(names)
        waiting = ahead.submit(build, order[0])
        for i, name in enumerate(order):
            todo = waiting.result()
            late = time.monotonic() - start > options.budget
            if i + 1 < len(order) and not late:
                waiting = ahead.submit(build, order[i + 1])
            before = time.monotonic()
            results = run.measure(measurer, todo)
            count, seconds = sum(map(len, results)), time.monotonic() - before
            print(f"{name}: {count} in {seconds:.1f} s, at {time.monotonic() - start:.0f} s;"
                  f" {dict(run.failures)}", flush=True)  # fmt: skip
            if late:
                break


def main() -> None:
    """Capture or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("capture", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="KxN-DTYPE-EPILOGUE,...; default: all")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--tiled", type=int, default=100)
    parser.add_argument("--few", type=int, default=40)
    parser.add_argument("--again", type=int, default=0, help="candidates of each size, once more")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 4))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [str(p) for p in PROBLEMS]
    unknown = sorted(set(names) - {str(p) for p in PROBLEMS})
    if unknown:
        raise SystemExit(f"--only {','.join(unknown)}: expected some of {[*map(str, PROBLEMS)]}")
    if options.verb == "measure":
        measure(options.folder, names, options)
        return
    digests = json.loads(EPILOGUES.read_text()) if EPILOGUES.is_file() else {}
    for problem in PROBLEMS:
        if str(problem) in names:
            capture(problem, options.folder)
            digests.update(epilogues(options.folder / f"{problem}.json", problem.epilogue))
    EPILOGUES.write_text(json.dumps(digests, indent=1) + "\n")


def epilogues(path: Path, name: str) -> dict[str, str]:
    """Return the epilogue's name by the digest of a captured problem."""
    import tvm

    from tvmcap.kernel import spaces, tasks

    mod = tvm.ir.load_json(path.read_text())
    return {t.workload["digest"]: name for t in tasks.extract(mod, gemm.target(), spaces.find)}


if __name__ == "__main__":
    main()

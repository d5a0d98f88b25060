"""The block on the CPU: one symbolic library, tuned and untuned, against eager and torch.compile.

    python benchmarks/cpu_block.py --json benchmarks/results/cpu_block.json

gelu_tanh(x @ w + b), float32, K=1024, N=4096; w and b frozen, and as arguments. All sides run on
the same threads, in turns.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import models
from common import timed, write

import tvmcap
from tvmcap.base.timing import measure, rotated

SIZES = (1, 16, 128, 512)


def libraries(
    args: tuple[torch.Tensor, ...], trials: int, seconds: float, folder: str
) -> dict[str, Any]:
    """Build the four libraries: frozen or arguments, tuned or not; tuning's seconds come along."""
    dynamic = {"x": {0: tvmcap.Dim("B", max=4096)}}
    made: dict[str, Any] = {}
    for name, constants in (("frozen", ("w", "b")), ("arguments", ())):
        options = {"target": "llvm", "dynamic": dynamic, "constants": constants, "verify": True}
        made[f"{name} untuned"] = tvmcap.build(models.gelu_tanh, args, tune="none", **options)
        logs = f"{folder}/{name}"
        start = time.perf_counter()
        run = tvmcap.tune(
            models.gelu_tanh, args, trials=trials, budget_s=seconds, log_dir=logs, **options
        )
        made[f"{name} seconds"] = time.perf_counter() - start
        print(run, flush=True)
        made[f"{name} tuned"] = tvmcap.build(models.gelu_tanh, args, log_dir=logs, **options)
        print(made[f"{name} tuned"].explain(), flush=True)
    return made


def row(
    made: dict[str, Any], name: str, args: tuple[torch.Tensor, ...], size: int, compiled: Any
) -> dict[str, Any]:
    """Check one size, then time tuned, untuned, eager and torch.compile in turns."""
    x = torch.randn(size, args[0].shape[1])
    full = (x, *args[1:])
    given = (lambda a: a[:1]) if name == "frozen" else (lambda a: a)
    tuned, untuned = made[f"{name} tuned"], made[f"{name} untuned"]
    wide = models.gelu_tanh(*(t.double() for t in full))
    error = (tuned(*given(full)).double() - wide).abs().max().item()
    eager_error = (models.gelu_tanh(*full).double() - wide).abs().max().item()
    assert error <= 2 * eager_error + 1e-6, (error, eager_error)
    calls = {
        "eager": models.gelu_tanh,
        "torch.compile": compiled,
        "ours": lambda *a: tuned(*given(a)),
        "untuned": lambda *a: untuned(*given(a)),
    }
    inputs = [full] if name == "frozen" else rotated(full, most=1)
    latency = measure(calls, inputs, budget_s=8)
    best = min(latency["eager"].median, latency["torch.compile"].median)
    return {
        "case": f"block, w and b {name}",
        "M": size,
        "K": args[1].shape[0],
        "N": args[1].shape[1],
        "us": round(latency["ours"].median, 1),
        "untuned_us": round(latency["untuned"].median, 1),
        "eager_us": round(latency["eager"].median, 1),
        "speedup_vs_eager": round(latency["eager"].median / latency["ours"].median, 3),
        "speedup_vs_best": round(best / latency["ours"].median, 3),
        "untuned_over_tuned": round(latency["untuned"].median / latency["ours"].median, 3),
        "error": error,
        "eager_error": eager_error,
        "ours_us": timed(latency["ours"]),
        "baselines_us": {k: timed(v) for k, v in latency.items() if k != "ours"},
    }


def main() -> None:
    """Read the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.manual_seed(0)
    _, args, _ = models.CASES["block"]()
    compiled = torch.compile(models.gelu_tanh, dynamic=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        made = libraries(args, options.trials, options.seconds, folder)
        rows = [
            row(made, name, args, size, compiled)
            for name in ("frozen", "arguments")
            for size in SIZES
        ]
    for r in rows:
        print({k: v for k, v in r.items() if not isinstance(v, dict)}, flush=True)
    seconds = {name: round(made[f"{name} seconds"], 1) for name in ("frozen", "arguments")}
    write(options.json, rows, folders=("schedules",), tuning_s=seconds, trials=options.trials)


if __name__ == "__main__":
    main()

"""The walk from eager to compiled: the block's kernels, traffic and latency, pass by pass.

    python benchmarks/walk.py --json benchmarks/results/walk.json [--trials 48]

Each stage is a library of its own, timed in turns with the others and with eager.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import models
from common import timed, write

import tvmcap
from tvmcap.base.codegen import gpu_architecture
from tvmcap.base.config import Config
from tvmcap.base.score import Score
from tvmcap.scoreboard import default_steps, walk


def row(name: str, score: Score) -> dict[str, object]:
    """One step of the walk as a row of a result file."""
    assert score.latency_us is not None and score.eager_us is not None
    baselines = {"eager": score.eager_us}
    if score.torch_compile_us is not None:
        baselines["torch.compile"] = score.torch_compile_us
    best = min(t.median for t in baselines.values())
    return {
        "step": name,
        **{f"{k}": v for k, v in score.sizes.items()},
        "kernels": score.kernels,
        "kernels_traced": score.kernels_traced,
        "hbm_bytes": score.hbm_bytes,
        "activation_traffic": score.activation_traffic,
        "peak_bytes_planned": score.peak_bytes_planned,
        "peak_bytes_measured": score.peak_bytes_measured,
        "eager_kernels": score.eager_kernels,
        "eager_activation_traffic": score.eager_activation_traffic,
        "tuned": f"{score.tuned_tasks} of {score.tasks}",
        "us": round(score.latency_us.median, 2),
        "eager_us": round(score.eager_us.median, 2),
        "speedup": score.speedup,
        "speedup_vs_best": round(best / score.latency_us.median, 3),
        "ours_us": timed(score.latency_us),
        "baselines_us": {k: timed(v) for k, v in baselines.items()},
    }


def main() -> None:
    """Read the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--logs", help="keep the tuning records in this folder")
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if gpu_architecture() else ("cpu", torch.float32)
    _, (_, w, b), dynamic = models.CASES["block"]()
    x = torch.randn(options.rows, w.shape[0])
    args = tuple(t.to(device, dtype) for t in (x, w, b))
    target = "cuda" if device == "cuda" else "llvm"
    with tempfile.TemporaryDirectory() as logs:
        logs = options.logs or logs
        config = Config(target=target, dynamic=dynamic, log_dir=logs, verify=False)
        print(tvmcap.tune(models.gelu_tanh, args, config=config, trials=options.trials), flush=True)
        steps = {name: replace(step, verify=True) for name, step in default_steps(config).items()}
        rows = [row(r.name, r.score) for r in walk(models.gelu_tanh, args, steps, progress=print)]
    for r in rows:
        print({k: v for k, v in r.items() if not isinstance(v, dict)}, flush=True)
    write(options.json, rows, folders=("schedules", "graph"), dtype=str(dtype))


if __name__ == "__main__":
    main()

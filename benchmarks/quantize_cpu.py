"""The block in int8 on the CPU against our own float32, and torch's quantized linear (oneDNN).

    python benchmarks/quantize_cpu.py --json benchmarks/results/quantize_cpu.json --trials 64

gelu_tanh(linear(x)), K=1024, N=4096, weights with one scale a column and inputs with one a row,
found at run time; torch's has one scale for all of its input, and one a column with
``--per-channel``. All sides run on the same threads, in turns.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import timed, write
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig, per_channel_dynamic_qconfig

import tvmcap
from tvmcap.base.timing import measure

SIZES = (1, 16, 128, 512)
K, N = 1024, 4096
Libraries = dict[str, Any]


class Block(nn.Module):
    """A linear with the tanh form of GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N)
        nn.init.normal_(self.linear.weight, std=K**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, N] of [rows, K]."""
        return nn.functional.gelu(self.linear(x), approximate="tanh")


def sides(model: Block, trials: int, seconds: float, per_channel: bool) -> Libraries:
    """Build what is compared: ours in int8 and float32, torch's quantized and float32 models."""
    x = torch.randn(128, K)
    made: Libraries = {}
    for name, scheme in (("ours", "int8"), ("ours float32", None)):
        options = {"target": "llvm", "dynamic": {0: {0: "B"}}, "quantize": scheme}
        with tempfile.TemporaryDirectory() as logs:
            if trials:
                given = {"trials": trials, "budget_s": seconds, "log_dir": logs}
                print(tvmcap.tune(model, (x,), **given, **options), flush=True)
            tuned = {"log_dir": logs} if trials else {"tune": "none"}
            made[name] = tvmcap.build(model, (x,), verify=False, **tuned, **options)
        print(made[name].explain(), flush=True)
    torch.backends.quantized.engine = "onednn"
    config = per_channel_dynamic_qconfig if per_channel else default_dynamic_qconfig
    made["torch int8"] = torch.ao.quantization.quantize_dynamic(model, {nn.Linear: config})
    linear = made["torch int8"].linear
    assert isinstance(linear, torch.ao.nn.quantized.dynamic.Linear), linear
    made["torch float32"] = model
    return made


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the signal-to-noise ratio in dB."""
    noise = (want - got.double()).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise))


def row(made: Libraries, size: int, seconds: float) -> dict[str, Any]:
    """Check one size, then time all sides in turns."""
    x = torch.randn(size, K)
    want = made["torch float32"].double()(x.double())
    made["torch float32"].float()
    noise = {name: sqnr_db(want, call(x)) for name, call in made.items()}
    assert noise["ours"] >= noise["torch int8"] - 0.5, noise
    latency = measure(made, [(x,)], budget_s=seconds)
    times = {name: latency[name].median for name in made}
    return {
        "case": "int8 block",
        "M": size,
        "K": K,
        "N": N,
        "us": round(times["ours"], 1),
        "speedup_vs_float32": round(times["ours float32"] / times["ours"], 3),
        "speedup_vs_torch_int8": round(times["torch int8"] / times["ours"], 3),
        "speedup_vs_best": round(
            min(t for n, t in times.items() if n != "ours") / times["ours"], 3
        ),
        "sqnr_db": {name: round(value, 2) for name, value in noise.items()},
        "ours_us": timed(latency["ours"]),
        "baselines_us": {k: timed(v) for k, v in latency.items() if k != "ours"},
    }


def main() -> None:
    """Read the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="of tuning, for each of ours")
    parser.add_argument("--budget", type=float, default=8, help="seconds of timing, for each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--per-channel", action="store_true", help="torch's weights, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.manual_seed(0)
    with torch.no_grad():
        model = Block().eval()
        made = sides(model, options.trials, options.seconds, options.per_channel)
        rows = [row(made, size, options.budget) for size in options.sizes]
    for r in rows:
        print({k: v for k, v in r.items() if not k.endswith("_us")}, flush=True)
    write(options.json, rows, folders=("graph", "kernel", "schedules"), trials=options.trials)


if __name__ == "__main__":
    main()

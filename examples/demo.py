"""The main job on real input: capture, tune, verify, export, load, run at several batch sizes.

The block is gelu(x @ w + b), 1024 -> 4096; the rows of x are the lines of this project's licence as hashed character
trigrams. On a GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from models import gelu_tanh
from rich.console import Console
from rich.table import Table

import tvmcap
from tvmcap.base.codegen import gpu_architecture
from tvmcap.base.timing import measure
from tvmcap.view.progress import default_progress

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 16, 128, 512)
K, N = 1024, 4096


def features(text: str, width: int = K) -> torch.Tensor:
    """Count each line's character trigrams in ``width`` hashed buckets.

    Float32 [lines, width], rows of unit norm.
    """
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 3]
    counts = torch.zeros(len(lines), width)
    for row, line in enumerate(lines):
        for i in range(len(line) - 2):
            counts[row, zlib.crc32(line[i : i + 3].encode()) % width] += 1
    return torch.nn.functional.normalize(counts)


def main() -> None:
    """Run every step and print what it gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=90)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    console = Console()
    target, device = ("cuda", "cuda") if gpu_architecture() else ("llvm", "cpu")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = features((ROOT / "LICENSE").read_text())
    w, b = torch.randn(K, N) / K**0.5, torch.randn(N)
    x, w, b = (t.to(device, dtype) for t in (rows.repeat(-(-SIZES[-1] // len(rows)), 1), w, b))
    console.print(f"input: {len(rows)} lines of text as float rows of {K}; target {target}, {dtype}")
    with tempfile.TemporaryDirectory() as folder:
        options_of = {"target": target, "dynamic": {"x": {0: tvmcap.Dim("B", max=8192)}}, "constants": ("w", "b")}
        console.print("[bold]1. build[/] without tuning: capture, passes, codegen, verify")
        untuned = tvmcap.build(gelu_tanh, (x[:128], w, b), tune="none", **options_of)
        console.print(untuned.explain(), highlight=False)
        console.print(f"[bold]2. tune[/] {options.trials} trials, at most {options.seconds:.0f} s")
        run = tvmcap.tune(
            gelu_tanh,
            (x[:128], w, b),
            trials=options.trials,
            budget_s=options.seconds,
            log_dir=folder,
            progress=default_progress(),
            **options_of,
        )
        console.print(str(run), highlight=False)
        console.print("[bold]3. build[/] with the records, and verify")
        tuned = tvmcap.build(gelu_tanh, (x[:128], w, b), log_dir=folder, **options_of)
        console.print(str(tvmcap.verify(tuned)), highlight=False)
        console.print("[bold]4. export and load[/]")
        path = tuned.export(Path(folder, "block.so"))
        loaded = tvmcap.load(path)
        console.print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MB, weights inside")
        console.print("[bold]5. run[/] at several batch sizes, one library, no further compile")
        console.print(compare(x, w, b, untuned, loaded, device))


def compare(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, untuned: Any, tuned: Any, device: str) -> Table:
    """Check each size against eager and time all three in turns."""
    table = Table(title=f"one call, median microseconds ({torch.get_num_threads()} threads)")
    for column in ("rows", "eager", "untuned", "tuned", "eager / tuned", "largest error"):
        table.add_column(column, justify="right")
    for size in SIZES:
        part = x[:size]
        error = (tuned(part).double() - gelu_tanh(part.double(), w.double(), b.double())).abs().max().item()
        calls = {"eager": lambda part=part: gelu_tanh(part, w, b), "untuned": lambda part=part: untuned(part)}
        calls["tuned"] = lambda part=part: tuned(part)
        times = {name: t.median for name, t in measure(calls, device=device, budget_s=3).items()}
        ratio = f"{times['eager'] / times['tuned']:.2f}x"
        table.add_row(str(size), *(f"{times[n]:.0f}" for n in calls), ratio, f"{error:.1e}")
    return table


if __name__ == "__main__":
    main()

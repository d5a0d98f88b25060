"""The main job on real input: capture, tune, verify, export, load, run at several batch sizes.

The block is gelu(x @ w + b), 1024 -> 4096; the rows of x are the lines of this project's licence
as hashed character trigrams. On a GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from models import gelu_tanh
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

import tvmcap
from tvmcap.base.codegen import gpu_architecture
from tvmcap.base.timing import measure
from tvmcap.view.report import UNSTEADY, verify_table

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 16, 128, 512)
K, N = 1024, 4096

console = Console()


def features(text: str, width: int = K) -> torch.Tensor:
    """Count each line's character trigrams in ``width`` hashed buckets.

    Returns float32 [lines, width] with rows of unit norm.
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
    parser.add_argument("--trials", type=int, default=48, help="candidates to measure")
    parser.add_argument(
        "--seconds", type=float, default=90, help="that tuning may take; timing takes a tenth"
    )
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.ERROR, format="%(message)s", handlers=[RichHandler(console=console)]
    )
    start = time.perf_counter()
    target, device = ("cuda", "cuda") if gpu_architecture() else ("llvm", "cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w, b = (t.to(device, dtype) for t in inputs())
    say(f"y = gelu(x @ w + b), {dtype} on {target}; x: lines of LICENSE as rows of {K} features")
    with tempfile.TemporaryDirectory() as folder:
        untuned, tuned = make(x, w, b, target, Path(folder), options)
        title("4. export and load", "one file that TVM's runtime alone can load")
        path = tuned.export(Path(folder, "block.so"))
        loaded = tvmcap.load(path)
        say(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, weights inside")
        title("5. run", "several batch sizes, one library, no further compile")
        budget_s = options.seconds / 10 / len(SIZES)
        console.print(compare(x, w, b, untuned, loaded, device, budget_s))
    say(f"done in {time.perf_counter() - start:.0f} s")


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [rows, K] of the licence's lines, repeated to the largest batch, w [K, N], b [N]."""
    rows = features((ROOT / "LICENSE").read_text())
    make = torch.Generator().manual_seed(0)
    w = torch.randn(K, N, generator=make) / K**0.5
    b = torch.randn(N, generator=make)
    return rows.repeat(-(-SIZES[-1] // len(rows)), 1), w, b


def make(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, target: str, folder: Path, options: Any
) -> tuple[Any, Any]:
    """Build without tuning, tune, and build with the records; returns both libraries."""
    common: dict[str, Any] = {
        "target": target,
        "dynamic": {"x": {0: tvmcap.Dim("B", max=8192)}},
        "constants": ("w", "b"),
    }
    args = (x[:128], w, b)
    title("1. build", "capture, passes, codegen and verification; no tuning")
    untuned = tvmcap.build(gelu_tanh, args, tune="none", **common)
    say(untuned.explain())
    title("2. tune", f"at most {options.trials} trials and {options.seconds:.0f} s")
    logging.getLogger("tvmcap").setLevel(logging.INFO)  # progress, where this is no terminal
    run = tvmcap.tune(
        gelu_tanh,
        args,
        trials=options.trials,
        budget_s=options.seconds,
        log_dir=str(folder),
        **common,
    )
    logging.getLogger("tvmcap").setLevel(logging.ERROR)
    say(str(run))
    title("3. build again", "with the records, and verify")
    tuned = tvmcap.build(gelu_tanh, args, log_dir=str(folder), **common)
    console.print(verify_table(tvmcap.verify(tuned)))
    return untuned, tuned


def compare(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    untuned: Any,
    tuned: Any,
    device: str,
    budget_s: float,
) -> Table:
    """Check each size against float64 and time all three in turns, ``budget_s`` seconds each."""
    table = Table(title=f"one call, median microseconds ({torch.get_num_threads()} threads)")
    for column in ("rows", "eager", "untuned", "tuned", "eager / tuned", "largest error"):
        table.add_column(column, justify="right")
    for size in SIZES:
        part = x[:size]
        right = gelu_tanh(part.double(), w.double(), b.double())
        error = (tuned(part).double() - right).abs().max().item()
        calls = {
            "eager": lambda part=part: gelu_tanh(part, w, b),
            "untuned": lambda part=part: untuned(part),
            "tuned": lambda part=part: tuned(part),
        }
        times = measure(calls, device=device, budget_s=budget_s)
        if any(t.p90 > 2 * t.p10 for t in times.values()):
            table.caption = UNSTEADY
        medians = [times[name].median for name in calls]
        ratio = f"{medians[0] / medians[2]:.2f}x"
        table.add_row(str(size), *(f"{m:.0f}" for m in medians), ratio, f"{error:.1e}")
    return table


def title(step: str, text: str) -> None:
    """Announce a step."""
    console.print(f"\n[bold]{step}[/]: {text}", highlight=False)


def say(text: str) -> None:
    """Print plain text as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()

"""How often torch.compile(backend="tvmcap") compiles over random batch sizes, and its speed.

python benchmarks/batches.py --count 1000 --json batches.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from torch import nn

import tvmcap
from tvmcap import dynamo


def measure(count: int, largest: int = 512, seed: int = 0) -> dict[str, Any]:
    """Train a two-layer MLP for one step at each of ``count`` random batch sizes.

    Returns the sizes' number, the graphs that Dynamo captured, and how many of them came after the
    second call.
    """
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    fast = torch.compile(model, backend=dynamo.backend, options={"tune": "none"})
    draw = torch.Generator().manual_seed(seed)
    early, start = 0, time.perf_counter()
    for i, size in enumerate(torch.randint(2, largest, (count,), generator=draw).tolist()):
        x = torch.randn(size, 32, generator=draw)
        fast(x).square().mean().backward()
        early = stats["unique_graphs"] if i == 1 else early
    seconds = time.perf_counter() - start
    graphs = stats["unique_graphs"]
    return {"sizes": count, "graphs": graphs, "later": graphs - early, "seconds": seconds}


def main() -> None:
    """Print the counts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--json", help="where the counts go")
    args = parser.parse_args()
    found = {"version": tvmcap.__version__, **measure(args.count)}
    sys.stdout.write(json.dumps(found) + "\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()

"""What the search of loop nests costs a tuning run beside compiling and measuring.

    python benchmarks/search_overhead.py [--trials 64] [--workers N] [--only TASK,...] [--json OUT]

Each task of ``loop_tasks`` is tuned alone, as ``tune`` does it, in a new folder. The overhead is
the time in which nothing was compiled or measured: the search proposed, learnt and wrote records.
Most of the search goes on beside compiling, so its processor time is shown as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import loop_tasks
from common import write

from tvmcap.base.config import Config
from tvmcap.kernel.stores import open_stores
from tvmcap.kernel.tuner import Run


def measure(name: str, trials: int, workers: int) -> dict[str, Any]:
    """Tune a task; return its row."""
    target = loop_tasks.target(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="tvmcap-overhead-") as folder:
        config = Config(target="llvm", tune=trials, workers=workers, log_dir=folder)
        run = Run(config, target, open_stores(config, target), None)
        cpu_s = time.process_time()  # what compiles and what measures are other processes
        run.search([loop_tasks.task(name, target)], None)
        cpu_s, found = time.process_time() - cpu_s, run.result()
    return {
        "task": name,
        "trials": found.trials,
        "workers": workers,
        "seconds": round(found.seconds, 2),
        "overhead_s": round(found.overhead_s, 2),
        "share": round(found.overhead_s / found.seconds, 4),
        "search_cpu_s": round(cpu_s, 2),
        "best_us": found.results[0].after_us,
        "failures": found.failures,
    }


def main() -> None:
    """Tune one task after another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="TASK,...; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in loop_tasks.named([n for n in options.only.split(",") if n]):
        row = measure(name, options.trials, options.workers)
        rows.append(row)
        print(f"{name:28} {row['trials']} trials in {row['seconds']:.1f} s, {row['overhead_s']:.1f}"
              f" s overhead ({row['share']:.1%}), search {row['search_cpu_s']:.1f} s of processor,"
              f" best {row['best_us'] or 0:.0f} us", flush=True)  # fmt: skip
        if options.json:
            write(options.json, rows, folders=("kernel", "schedules"))


if __name__ == "__main__":
    main()

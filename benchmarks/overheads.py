"""What a user waits for besides kernels: import, builds, load, first result, host time of a call.

    python benchmarks/overheads.py --json benchmarks/results/overheads.json

Each start-up figure comes from fresh processes; the host time is that of a call on a tiny block,
kernel included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import host_function, timed, write

from tvmcap.base.timing import measure, summarize

ROOT = Path(__file__).resolve().parent.parent
PRELUDE = f"""
import json, sys, time, logging
logging.basicConfig(level=logging.ERROR)
sys.path.insert(0, {str(ROOT / "examples")!r})
def say(**figures): print("FIGURES" + json.dumps(figures))
"""
IMPORT = (
    PRELUDE
    + """
start = time.perf_counter()
import tvmcap
say(import_s=time.perf_counter() - start)
"""
)
BUILD = (
    PRELUDE
    + """
import torch, tvm, models, tvmcap
import tvmcap.pipeline, tvmcap.tune
torch.manual_seed(0)
fn, args, dynamic = models.CASES["block"]()
options = dict(target="llvm", dynamic=dynamic, constants=("w", "b"), tune="none", verify=False)
options["cache_dir"] = sys.argv[1]
start = time.perf_counter()
lib = tvmcap.build(fn, args, **options)
cold = time.perf_counter() - start
start = time.perf_counter()
again = tvmcap.build(fn, args, **options)
hit = time.perf_counter() - start
assert again.from_cache and not lib.from_cache
lib.export(sys.argv[2])
say(cold_build_s=cold, cached_build_s=hit, **{"pass " + k: v for k, v in lib.passes})
"""
)
LOAD = (
    PRELUDE
    + """
import numpy as np, tvm_ffi, tvmcap
import tvmcap.compiled
x = np.random.default_rng(0).standard_normal((16, 1024), dtype=np.float32)
start = time.perf_counter()
lib = tvmcap.load(sys.argv[2])
loaded = time.perf_counter()
y = lib(x)
say(load_s=loaded - start, first_result_s=time.perf_counter() - start)
"""
)


def fresh(code: str, *args: str) -> dict[str, float]:
    """Run code in a new process and return what it says."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES"))
    figures: dict[str, float] = json.loads(line[len("FIGURES") :])
    return figures


def startup(runs: int) -> list[dict[str, Any]]:
    """Median and spread of the start-up figures, in seconds."""
    seen: dict[str, list[float]] = {}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "block.so")
            for code in (IMPORT, BUILD, LOAD):
                for name, value in fresh(code, os.path.join(folder, "cache"), library).items():
                    seen.setdefault(name, []).append(value)
    return [
        {"figure": name, "unit": "s", **timed(summarize(values))} for name, values in seen.items()
    ]


def host_time() -> list[dict[str, Any]]:
    """Microseconds of a call on x[2, 8] @ w[8, 8]: all of it, and the host function alone."""
    import numpy as np
    import torch

    import tvmcap

    lib = tvmcap.build(
        lambda x, w: x @ w,
        (torch.randn(2, 8), torch.randn(8, 8)),
        target="llvm",
        tune="none",
        verify=False,
        dynamic={"x": {0: "B"}},
    )
    x, w = torch.randn(2, 8), torch.randn(8, 8)
    out, xn, wn = torch.empty(2, 8), x.numpy(), w.numpy()
    assert np.allclose(lib(xn, wn), xn @ wn, atol=1e-5)
    with torch.no_grad():
        calls = {
            "torch": lambda: lib(x, w),
            "torch, out=": lambda: lib(x, w, out=out),
            "numpy": lambda: lib(xn, wn),
            "host function alone": host_function(lib, x, w, out),
            "torch eager": lambda: x @ w,
        }
        latency = measure(calls, budget_s=6)
    return [
        {"figure": f"call, {name}", "unit": "us", **timed(value)} for name, value in latency.items()
    ]


def main() -> None:
    """Read the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    rows = [*startup(options.runs), *host_time()]
    for row in rows:
        print(row["figure"], row["median"], row["unit"], flush=True)
    write(options.json, rows)


if __name__ == "__main__":
    main()

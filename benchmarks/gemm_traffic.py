"""HBM traffic of one call of the block as Nsight Compute counts it, beside the scoreboard's count.

    python benchmarks/gemm_traffic.py FOLDER --json OUT [--shapes 2048x1024x4096,...]

FOLDER holds the libraries that ``gemm_suite.py build`` made. It runs itself under ncu, which needs
the right to read the GPU's counters; caches are flushed before the kernel.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm
from gemm_suite import library

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
DEFAULT = "2048x1024x4096,16x4096x14336,8192x1024x4096"
_UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def call(path: Path, shape: gemm.Shape) -> None:
    """Call the library once between the marks that ncu waits for."""
    import gemm_timing as timing
    import torch

    import tvmcap

    lib = tvmcap.load(path)
    inputs = timing.gemm_inputs(*shape, seed=0)
    one = inputs.sets[0]
    lib(one["x"], one["nk"], one["b"], out=one["out"])
    flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    flush.zero_()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    lib(one["x"], one["nk"], one["b"], out=one["out"])
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counted(path: Path, shape: gemm.Shape) -> dict[str, int]:
    """Return the bytes that the scoreboard counts, reads and writes apart."""
    import tvmcap
    from tvmcap.scoreboard import counted
    from tvmcap.view.traffic import kernel_table

    lib = tvmcap.load(path)
    score = counted(lib.manifest, {"B": shape.m}, kernel_table(lib))
    written = 2 * shape.m * shape.n
    return {"hbm_bytes": score.hbm_bytes or 0, "reads": (score.hbm_bytes or 0) - written,
            "writes": written}  # fmt: skip


def profiled(path: Path, shape: gemm.Shape) -> dict[str, float]:
    """Run ``call`` under ncu and return the sum of each metric over the kernels."""
    ncu = ["ncu", "--profile-from-start", "off", "--cache-control", "all", "--csv"]
    ncu += ["--clock-control", "none", "--metrics", ",".join(METRICS)]
    command = [*ncu, sys.executable, __file__, str(path), "--call", str(shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return read_metrics(done.stdout, done.stdout[-1000:] + done.stderr[-1000:])


def read_metrics(text: str, words: str = "") -> dict[str, float]:
    """Read ncu's CSV, whatever stands before its header; ``words`` go into the error."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError(f"ncu printed no metrics: {words or text[-2000:]}")
    found: dict[str, float] = {}
    kernels: set[str] = set()
    for row in csv.DictReader(lines[start:]):
        name, value = row["Metric Name"], float(row["Metric Value"].replace(",", ""))
        found[name] = found.get(name, 0.0) + value * _UNITS[row["Metric Unit"]]
        kernels.add(row["ID"])
    return {**found, "kernels": len(kernels)}


def row(folder: Path, shape: gemm.Shape) -> dict[str, Any]:
    """Compare both counts for one shape."""
    path = library(folder, shape.k, shape.n)
    expected, seen = counted(path, shape), profiled(path, shape)
    read, written = (seen[name] for name in METRICS)
    return {
        "M": shape.m, "K": shape.k, "N": shape.n,
        "kernels": seen["kernels"],
        "counted_read_bytes": expected["reads"], "profiled_read_bytes": read,
        "counted_written_bytes": expected["writes"], "profiled_written_bytes": written,
        "read_ratio": round(read / expected["reads"], 4),
    }  # fmt: skip


def main() -> None:
    """Call a library, or profile the shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--call", help="MxKxN: call the library FOLDER once")
    parser.add_argument("--shapes", default=DEFAULT)
    parser.add_argument("--json", type=Path, default=Path("gemm_traffic.json"))
    options = parser.parse_args()
    if options.call:
        call(options.folder, gemm.parse_shapes(options.call)[0])
        return
    from common import write

    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on PATH: install Nsight Compute, or use a host that has it")
    rows = []
    for shape in gemm.parse_shapes(options.shapes):
        rows.append(row(options.folder, shape))
        print(json.dumps(rows[-1]), flush=True)
        write(options.json, rows, folders=("schedules",), dtype="bfloat16")


if __name__ == "__main__":
    main()

"""The block in int8 and e4m3 on a Hopper GPU, beside our own bf16 and what PyTorch has.

    python benchmarks/quantize_gpu.py build FOLDER [--logs DIR] [--shapes 2048x1024x4096,...]
    python benchmarks/quantize_gpu.py run FOLDER --json OUT [--budget SECONDS] [--again]

``gelu_tanh(x @ w.T + b)`` on bf16 activations, which are quantized with a scale a row. ``build``
needs no GPU; records of ``--logs``, the user's folder and the shipped ones decide the kernels.
``run`` checks and times, and writes after each row; rows that OUT has already, of the same source
and with every baseline, are kept, so that a run can be split. Baselines: our bf16; torch.compile's
max-autotune of quantize, ``torch._int_mm`` and the rest; without GELU, ``torch._scaled_mm`` of
inputs that are in e4m3 already, and torch.compile's max-autotune of quantize and
``torch._scaled_mm``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm
import gemm_suite
import quantized_gemm as quantized


def names(shapes: Iterable[gemm.Shape]) -> list[str]:
    """Name the libraries of shapes: bf16, and for each scheme the layer and its product alone."""
    found: dict[str, None] = {}
    for shape in shapes:
        name = f"{shape.k}x{shape.n}"
        found[name] = None
        for scheme in quantized.SCHEMES:
            found[f"{name}-{scheme}"] = found[f"{name}-{scheme}-alone"] = None
    return list(found)


def build_one(folder: Path, name: str, logs: str | None) -> None:
    """Compile the library of a name for any number of rows."""
    size, _, rest = name.partition("-")
    if not rest:
        gemm_suite.build_one(folder, name, logs)
        return
    scheme, _, part = rest.partition("-")
    mod = quantized.fused(*map(int, size.split("x")), scheme)
    mod = quantized.alone(mod) if part else mod
    manifest = quantized.write(mod, folder / f"{name}.so", logs)
    for served in manifest.coverage:
        print(name, served["served_by"], served["ranges"], served["records"], flush=True)


def build(options: argparse.Namespace, wanted: Iterable[str]) -> int:
    """Compile in processes of their own, several at a time; returns how many failed."""
    options.folder.mkdir(parents=True, exist_ok=True)

    def one(name: str) -> bool:
        command = [sys.executable, __file__, "build", str(options.folder), "--only", name]
        command += ["--logs", options.logs] if options.logs else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout if done.returncode == 0 else done.stderr[-2000:], flush=True)
        return done.returncode != 0

    with ThreadPoolExecutor(options.workers) as pool:
        return sum(pool.map(one, wanted))


def run(options: argparse.Namespace) -> None:
    """Measure the rows that are wanted and not there yet."""
    import gemm_rows
    import quantize_rows
    from quantize_tables import summary

    suite = gemm_suite.Suite(options, summary)
    for shape in shapes_of(options):
        for scheme in quantized.SCHEMES:
            key = {"kind": "8 bits", "scheme": scheme, **gemm_rows.names(shape)}
            suite.add(key, functools.partial(quantize_rows.row, shape, scheme, options))
    suite.write()
    print(json.dumps(summary(suite.rows), indent=1), flush=True)


def shapes_of(options: argparse.Namespace) -> tuple[gemm.Shape, ...]:
    """Return the shapes that were asked for."""
    return gemm.parse_shapes(options.shapes) if options.shapes else quantized.SHAPES


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="build one library in this process")
    parser.add_argument("--logs", help="folder of tuning records that come first")
    parser.add_argument("--shapes", help="MxKxN,...; default: the four")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--json", type=Path, default=Path("quantize_gpu.json"))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds to spend in all")
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds one row may take")
    parser.add_argument(
        "--compile-cap", type=float, default=90.0, help="seconds torch.compile gets"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--again", action="store_true", help="measure rows that are there as well")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    """Build or run."""
    options = parse()
    if options.verb == "run":
        run(options)
    elif options.only:
        build_one(options.folder, options.only, options.logs)
    else:
        return int(build(options, names(shapes_of(options))) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

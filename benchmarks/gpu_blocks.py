"""Blocks and small models on a GPU: errors in three dtypes at odd sizes, and time against eager.

    python benchmarks/gpu_blocks.py build FOLDER [CASE...]
    python benchmarks/gpu_blocks.py run FOLDER --json OUT

The first needs nvcc and no GPU, the second the GPU and TVM's runtime alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import models
from common import timed, write

from tvmcap.base.timing import measure, rotated

DTYPES = ("bfloat16", "float16", "float32")
SIZES = {
    "block": (1, 7, 128, 2048, 2049),
    "block_erf": (1, 128, 2049),
    "mlp": (1, 64, 2049),
    "norm_mlp": (1, 64, 2049),
}
OTHER_SIZES = (1, 8, 33)
FROZEN = {"block": (False, True), "block_erf": (True,)}


def variants() -> list[tuple[str, str, bool]]:
    """List (case, dtype, whether w and b are frozen)."""
    return [
        (case, dtype, frozen)
        for case in models.CASES
        for dtype in DTYPES
        for frozen in FROZEN.get(case, (False,))
    ]


def make(case: str, dtype: str) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, dict[int, str]]]:
    """Make the case with the same weights wherever it is made."""
    torch.manual_seed(0)
    fn, args, dynamic = models.CASES[case]()
    kind = getattr(torch, dtype)
    return (
        (fn.to(kind) if isinstance(fn, torch.nn.Module) else fn),
        tuple(a.to(kind) for a in args),
        dynamic,
    )


def build(folder: Path, cases: list[str]) -> None:
    """Cross-compile every variant into ``folder``."""
    import tvmcap

    folder.mkdir(parents=True, exist_ok=True)
    for case, dtype, frozen in variants():
        if cases and case not in cases:
            continue
        fn, args, dynamic = make(case, dtype)
        constants = ("w", "b") if frozen else ()
        lib = tvmcap.build(
            fn, args, target="cuda", dynamic=dynamic, constants=constants, verify=False
        )
        lib.export(folder / f"{case}-{dtype}{'-frozen' if frozen else ''}.so")
        print(
            case,
            dtype,
            "frozen" if frozen else "",
            lib.manifest.kernels_per_call,
            "kernels",
            flush=True,
        )


def run(folder: Path, out: Path) -> None:
    """Check and time every library of ``folder``."""
    import tvmcap

    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for case, dtype, frozen in variants():
        path = folder / f"{case}-{dtype}{'-frozen' if frozen else ''}.so"
        if not path.exists():
            continue
        fn, args, _ = make(case, dtype)
        fn = fn.cuda() if isinstance(fn, torch.nn.Module) else fn
        lib = tvmcap.load(path)
        for size in SIZES.get(case, OTHER_SIZES):
            row: dict[str, Any] = {"case": case, "dtype": dtype, "frozen": frozen, "B": size}
            try:
                row.update(one(lib, fn, args, size, frozen))
            except Exception as e:  # one failing case must not lose the others' figures
                row["failed"] = f"{type(e).__name__}: {e}"[:400]
            rows.append(row)
            print(
                json.dumps({k: v for k, v in row.items() if k not in ("ours_us", "baselines_us")}),
                flush=True,
            )
    write(out, rows, folders=("schedules", "graph"))


def one(
    lib: Any, fn: Any, args: tuple[torch.Tensor, ...], size: int, frozen: bool
) -> dict[str, Any]:
    """Compare with a double-precision reference, then time library and eager as CUDA graphs."""
    x = torch.randn(size, *args[0].shape[1:], device="cuda").to(args[0].dtype)
    rest = tuple(a.cuda() for a in args[1:])
    given = (x,) if frozen else (x, *rest)
    wide = fn.double() if isinstance(fn, torch.nn.Module) else fn
    reference = wide(x.double(), *(a.double() for a in rest))
    fn = fn.to(x.dtype) if isinstance(fn, torch.nn.Module) else fn
    eager = fn(x, *rest)
    ours = lib(*given)
    error, eager_error = ((t.double() - reference).abs().max().item() for t in (ours, eager))
    finfo = torch.finfo(x.dtype)
    ulp = finfo.eps * reference.abs().max().item()
    right = error <= 2 * eager_error + ulp
    inputs = rotated((x, *rest), most=8)
    calls = {"ours": (lambda *a: lib(a[0])) if frozen else lib, "eager": fn}
    with torch.no_grad():
        latency = measure(calls, inputs, device="cuda", graph=True, budget_s=0.6)
    return {
        "right": right,
        "error": error,
        "eager_error": eager_error,
        "kernels": lib.manifest.kernels_per_call,
        "us": round(latency["ours"].median, 2),
        "eager_us": round(latency["eager"].median, 2),
        "speedup_vs_best": round(latency["eager"].median / latency["ours"].median, 3),
        "ours_us": timed(latency["ours"]),
        "baselines_us": {"eager": timed(latency["eager"])},
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if options.verb == "build":
        build(options.folder, options.cases)
    else:
        run(options.folder, options.json)


if __name__ == "__main__":
    main()

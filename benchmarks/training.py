"""A layer forward and backward on a GPU, over the time of its three bare matrix products.

    python benchmarks/training.py build FOLDER [--logs DIR] [--static]
    python benchmarks/training.py plan FOLDER --json OUT
    python benchmarks/training.py tune FOLDER --logs DIR [--trials N]
    python benchmarks/training.py run FOLDER --json OUT [--only layer | budget]

``y = gelu_tanh(x @ w.T + b)`` in bf16 and its gradients by x, w and b for a dense random gradient
of y; and an MLP of eight layers over memory budgets (``training_memory.py``). ``build`` needs nvcc
and no GPU, ``plan`` what that built; ``tune`` and ``run`` need the GPU. Times are those of
CUDA-graph replays over rotating inputs, interleaved with the baselines: the three products alone,
eager, torch.compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import training_memory
from common import timed, write
from torch.nn import functional as F

import tvmcap
from tvmcap.base.numerics import compare
from tvmcap.base.timing import measure, rotated

SHAPES = ((2048, 1024, 4096), (8192, 4096, 4096))


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The layer."""
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def tensors(m: int, k: int, n: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Return x, w, b and the gradient of y, normal, with products of size about one."""
    make = torch.Generator(device).manual_seed(0)
    shapes = (((m, k), 1.0), ((n, k), k**-0.5), ((n,), 1.0), ((m, n), 1.0))
    drawn = [s * torch.randn(shape, generator=make, device=device) for shape, s in shapes]
    return tuple(t.bfloat16() for t in drawn)


def library(folder: Path, m: int, k: int, n: int, static: bool) -> Path:
    """Where the library of a shape lies; one for any number of rows serves all of them."""
    return folder / (f"block-{m}x{k}x{n}.so" if static else f"block-{k}x{n}.so")


def build(options: argparse.Namespace) -> None:
    """Cross-compile every library that is not there yet."""
    options.folder.mkdir(parents=True, exist_ok=True)
    common = {"target": "cuda:sm_90a", "verify": False, "log_dir": options.logs}
    for m, k, n in SHAPES:
        path = library(options.folder, m, k, n, options.static)
        if not path.exists():
            x, w, b, _ = tensors(256 if not options.static else m, k, n)
            dynamic = None if options.static else {"x": {0: "B"}}
            lib = tvmcap.build(block, (x, w, b), dynamic=dynamic, backward=True, **common)
            lib.export(path)
            print(path, lib.explain(), flush=True)
    training_memory.build(options.folder, **common)


def plan(options: argparse.Namespace) -> None:
    """Write what the libraries of the memory budgets say of themselves."""
    rows = training_memory.planned(options.folder)
    print(json.dumps(rows, indent=1))
    write(options.json, rows, dtype="bfloat16")


def tune(options: argparse.Namespace) -> None:
    """Tune the kernels of the layer at the sizes that ``run`` measures, on this GPU."""
    for m, k, n in SHAPES:
        x, w, b, _ = tensors(m, k, n)
        dynamic = None if options.static else {"x": {0: "B"}}
        config = {"target": "cuda", "backward": True, "log_dir": options.logs}
        print(tvmcap.tune(block, (x, w, b), dynamic=dynamic, trials=options.trials, **config))


Step = Callable[..., Any]


def step_of(fn: Callable[..., torch.Tensor]) -> Step:
    """Return a function of x, w, b and the gradient of y that returns the gradients of the rest."""

    def step(*values: torch.Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in values[:-1]]
        return torch.autograd.grad(fn(*inputs), inputs, values[-1])

    return step


def ours_of(lib: Any) -> Step:
    """Return the same of a library, its two entries called one after the other."""
    executor = lib.executor

    def step(*values: torch.Tensor) -> Any:
        _, saved = executor.split(executor.forward(*values[:-1]))
        return executor.backward(*saved, values[-1])

    return step


def products(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> Any:
    """The three bare matrix products of a step: y, and the gradients of x and w."""
    return x @ w.T, dy @ w, dy.T @ x


def layer_row(options: argparse.Namespace, m: int, k: int, n: int) -> dict[str, Any]:
    """Check and time one shape."""
    path = library(options.folder, m, k, n, options.static)
    lib = tvmcap.load(path)
    values = tensors(m, k, n, "cuda")
    steps = {"ours": ours_of(lib), "three_matmuls": products, "eager": step_of(block)}
    if not options.no_compile:
        steps["torch_compile"] = step_of(torch.compile(block))
    for step in steps.values():
        step(*values)
    times = measure(
        steps, rotated(values), device="cuda", budget_s=options.budget, samples=51, graph=True
    )
    errors = checked(steps, values)
    ours = times.pop("ours")
    best = min(t.median for name, t in times.items() if name != "three_matmuls")
    return {
        "kind": "layer",
        "case": "one size" if options.static else "any batch",
        "M": m,
        "K": k,
        "N": n,
        "kernels": lib.manifest.kernels_per_call,
        "ours_us": timed(ours),
        "baselines_us": {name: timed(t) for name, t in times.items()},
        "over_matmuls": {
            name: t.median / times["three_matmuls"].median
            for name, t in {"ours": ours, **times}.items()
        },
        "speedup_vs_best": best / ours.median,
        **errors,
    }


def checked(steps: dict[str, Step], values: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Compare gradients with those of float32 products of the same numbers, beside eager's."""
    exact = [t.detach() for t in step_of(block)(*(t.double() for t in values))]
    ours, eager = steps["ours"](*values), steps["eager"](*values)
    found = [
        compare(o, r, e, name=f"gradient of {name}", dtype="bfloat16")
        for o, r, e, name in zip(ours, exact, eager, "xwb", strict=True)
    ]
    return {
        "error": max(c.max_abs for c in found),
        "eager_error": max(c.eager_abs for c in found),
        "right": all(c.ok for c in found),
        "errors": [str(c) for c in found],
    }


def run(options: argparse.Namespace) -> None:
    """Measure every row and write them; one that fails says why."""
    rows: list[dict[str, Any]] = []
    jobs: list[tuple[dict[str, Any], Callable[[], list[dict[str, Any]]]]] = []
    for m, k, n in SHAPES:
        names = {"kind": "layer", "M": m, "K": k, "N": n}
        jobs.append((names, lambda m=m, k=k, n=n: [layer_row(options, m, k, n)]))
    budgets = functools.partial(training_memory.measured, options.folder, options.budget)
    jobs.append(({"kind": "budget"}, lambda: budgets(not options.no_compile)))
    for names, job in jobs:
        if options.only and names["kind"] != options.only:
            continue
        try:
            found = job()
        except Exception as e:
            found = [{**names, "failed": (str(e).splitlines() or [type(e).__name__])[0][:300]}]
        rows += found
        hidden = ("ours_us", "baselines_us")
        shown = [{k: v for k, v in row.items() if k not in hidden} for row in found]
        print(json.dumps(shown, indent=1), flush=True)
        write(options.json, rows, dtype="bfloat16")


def main() -> int:
    """Build, tune or run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("build", "plan", "tune", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--logs", help="folder of tuning records that come first")
    parser.add_argument("--trials", type=int, default=256)
    parser.add_argument("--static", action="store_true", help="a library a shape, for that size")
    parser.add_argument("--json", type=Path, default=Path("training.json"))
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of measuring a row")
    parser.add_argument("--only", choices=("layer", "budget"), help="rows of this kind alone")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    {"build": build, "plan": plan, "tune": tune, "run": run}[options.verb](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

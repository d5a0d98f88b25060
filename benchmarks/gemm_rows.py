"""The rows of the GEMM suite, each checked first and timed in turns with its baselines."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemm_timing as timing
import torch
import torch.nn.functional as F
from common import timed
from gemm_common import Shape, fused

import tvmcap
from tvmcap.base.codegen import make_target
from tvmcap.base.timing import summarize
from tvmcap.tune import tune_module

ROWS, COLUMNS = 8192, 4096
TURNS, SECONDS = 5, 0.15
#: Calls of tvmcap's, which write into "out".
OURS = ("ours", "tuned")
#: By name: a function, and its arguments: x and r are [ROWS, COLUMNS], w and b [COLUMNS].
ROW_CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b), ("x", "w", "b")),
    "rms_norm": (lambda x, w: F.rms_norm(x, (COLUMNS,), w), ("x", "w")),
    "softmax": (lambda x: torch.softmax(x, -1), ("x",)),
    "residual_layer_norm_gelu": (
        lambda x, r, w, b: F.gelu(F.layer_norm(x + r, (COLUMNS,), w, b)),
        ("x", "r", "w", "b"),
    ),
    "scaled_softmax": (lambda x, b: torch.softmax(x * 0.125 + b, -1), ("x", "b")),
}
Row = dict[str, Any]


def names(shape: Shape) -> Row:
    """Return a shape as a row holds it."""
    return {"M": shape.m, "K": shape.k, "N": shape.n}


def bandwidth() -> dict[str, float]:
    """Measure what the device's memory gives, in GB/s."""
    return {name: round(value, 1) for name, value in timing.read_bandwidth().items()}


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once ``seconds`` have passed."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled(fn: Callable[..., Any], args: tuple[Any, ...], cap: float) -> Callable[..., Any]:
    """Compile with torch.compile's widest search, for these sizes alone.

    Its own CUDA graphs are left out: every side is captured in one here.
    """
    torch._dynamo.reset()
    made = torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=False)
    with at_most(cap):
        made(*args)
    return made


def measure(
    calls: dict[str, timing.Call], inputs: timing.Inputs, seconds: float = SECONDS
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Check ours, then time calls in turns; also say which could not be captured and why."""
    stream, graphs, refused = torch.cuda.Stream(), {}, {}
    for name, call in calls.items():
        if name in OURS:
            inputs.poison()
            call(inputs.sets[0])
            inputs.require(inputs.sets[0]["out"], name)
        try:
            graphs[name] = timing.Graph(call, inputs, stream)
        except RuntimeError as e:
            if name in OURS:
                raise
            refused[name] = str(e)[:300]
    return timing.interleaved(graphs, TURNS, seconds), refused


def finish(us: dict[str, list[float]], inputs: timing.Inputs, refused: dict[str, str]) -> Row:
    """Return what every row holds: times, the ratio to the best baseline, the error."""
    ends = inputs.sets[0], inputs.sets[-1]
    error = max(inputs.require(s["out"], "ours, when repeated,") for s in ends)
    ours = summarize(us.pop("ours"))
    base = {name: summarize(values) for name, values in us.items()}
    best = min(base, key=lambda name: base[name].median)
    return {
        "us": round(ours.median, 3),
        "best_baseline": best,
        "speedup_vs_best": round(base[best].median / ours.median, 4),
        "error": error,
        "complete": "torch_compile_max_autotune" in base,
        "refused": refused,
        "ours_us": timed(ours),
        "baselines_us": {name: timed(value) for name, value in base.items()},
    }


def with_compiled(
    calls: dict[str, timing.Call],
    fn: Any,
    order: tuple[str, ...],
    inputs: timing.Inputs,
    options: Any,
) -> dict[str, str]:
    """Add torch.compile to the calls unless it is left out; return why it is not there."""
    if options.no_compile:
        return {"torch_compile_max_autotune": "left out"}
    try:
        made = compiled(fn, tuple(inputs.sets[0][name] for name in order), options.compile_cap)
    except Exception as e:  # whatever stops the compiler must not stop the suite
        return {"torch_compile_max_autotune": f"{type(e).__name__}: {e}"[:300]}
    calls["torch_compile_max_autotune"] = lambda s: made(*(s[name] for name in order))
    return {}


def gemm_row(shape: Shape, path: Path, options: argparse.Namespace, gb_s: dict[str, float]) -> Row:
    """Measure the block at one shape with the library of its problem."""
    lib = tvmcap.load(path)
    inputs = timing.gemm_inputs(*shape, options.seed)
    calls: dict[str, timing.Call] = {
        "ours": lambda s: lib(s["x"], s["nk"], s["b"], out=s["out"]),
        **timing.baselines(),
    }
    with torch.no_grad():
        missing = with_compiled(calls, timing.linear_gelu, ("x", "nk", "b"), inputs, options)
        us, refused = measure(calls, inputs)
    row = finish(us, inputs, refused | missing)
    base = row["baselines_us"]
    fused = [b for name, b in base.items() if name.startswith("cublaslt_epilogue")]
    if fused:
        base["cublaslt_epilogue"] = min(fused, key=lambda b: b["median"])
        row["ratio_to_cublaslt"] = round(base["cublaslt_epilogue"]["median"] / row["us"], 4)
    row["tflops"] = round(inputs.flops / row["us"] / 1e6, 1)
    row["read_share"] = round(inputs.read_bytes / row["us"] / 1e3 / gb_s["read"], 4)
    return {**row, **used(lib, shape.m)}


def used(lib: Any, rows: int) -> Row:
    """Return which kernel served a number of rows: its knobs, and whether records chose them."""
    (served,) = lib.manifest.coverage
    for limit, knobs in served["ranges"].items():
        if limit == "any" or rows <= int(limit.removeprefix("<=")):
            return {
                "served_by": served["served_by"],
                "knobs": json.loads(knobs),
                "tuned": served["tuned"],
            }
    return {"served_by": served["served_by"], "knobs": None, "tuned": served["tuned"]}


def row_case(name: str, options: argparse.Namespace) -> Row:
    """Measure a normalisation or softmax beside eager, torch.compile and a copy."""
    (fn, order), new = ROW_CASES[name], timing.draw(options.seed, "cuda")
    shapes = {"x": (ROWS, COLUMNS), "r": (ROWS, COLUMNS), "w": (COLUMNS,), "b": (COLUMNS,)}
    first = {n: new(*shapes[n]) for n in order}
    reference = fn(*(first[n].float() for n in order))
    first["out"] = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    inputs = timing.Inputs(first, reference, order, 0)
    # PyTorch rounds between operators
    eager_error = inputs.error(fn(*(first[n] for n in order)))
    inputs.limit = max(timing.TOLERANCE, 2 * eager_error)
    lib = tvmcap.load(options.folder / f"{name}.so")
    calls: dict[str, timing.Call] = {
        "ours": lambda s: lib(*(s[n] for n in order), out=s["out"]),
        "eager": lambda s: fn(*(s[n] for n in order)),
        "copy": lambda s: torch.empty_like(s["x"]).copy_(s["x"]),
    }
    with torch.no_grad():
        missing = with_compiled(calls, fn, order, inputs, options)
        us, refused = measure(calls, inputs)
    copy = us.pop("copy")
    row = finish(us, inputs, refused | missing)
    rate = 2 * first["x"].nbytes / statistics.median(copy)
    row["copy_us"] = timed(summarize(copy))
    row["copy_share"] = round(inputs.nbytes / row["us"] / rate, 4)
    compile_us = row["baselines_us"].get("torch_compile_max_autotune")
    row["ratio_to_torch_compile"] = compile_us and round(compile_us["median"] / row["us"], 4)
    services = [s["served_by"] for s in lib.manifest.coverage]
    return {**row, "kernels": lib.manifest.kernels_per_call, "served_by": ", ".join(services)}


@functools.cache
def tuned_at(k: int, n: int, rows: tuple[int, ...], trials: int) -> tuple[dict[int, Any], int]:
    """Tune a product at sizes in one run of ``trials`` each.

    Returns a library for each size, and the number of trials there were.
    """
    shapes = {"x": (rows[0], k), "w": (n, k), "b": (n,)}
    drawn = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as logs:
        config = tvmcap.Config(
            target="cuda", log_dir=logs, verify=False, tune=trials * len(rows),
            dynamic={"x": {0: tvmcap.Dim("B", min=1)}},
        )  # fmt: skip
        mod = fused(timing.linear_gelu, drawn)
        run = tune_module(mod, make_target("cuda"), config, sizes={"B": rows})
        libs: dict[int, Any] = {}
        for m in rows:
            args = (drawn["x"].new_zeros(m, k), drawn["w"], drawn["b"])
            static = replace(config, dynamic={}, tune="cached")
            libs[m] = tvmcap.build(timing.linear_gelu, args, config=static)
    return libs, run.trials


def never_tuned_row(
    shape: Shape, rows: tuple[int, ...], path: Path, options: argparse.Namespace
) -> Row:
    """Compare the library at a size without records with one tuned at that very size.

    All ``rows`` that the product is tried at are tuned in one run.
    """
    lib = tvmcap.load(path)
    inputs = timing.gemm_inputs(*shape, options.seed)
    libs, trials = tuned_at(shape.k, shape.n, rows, options.trials)
    tuned = libs[shape.m]
    calls: dict[str, timing.Call] = {
        "tuned": lambda s: tuned(s["x"], s["nk"], s["b"], out=s["out"]),
        "ours": lambda s: lib(s["x"], s["nk"], s["b"], out=s["out"]),
        **timing.baselines(),
    }
    with torch.no_grad():
        us, refused = measure(calls, inputs)
    at_size = summarize(us.pop("tuned"))
    row = finish(us, inputs, refused)
    return {
        **row,
        **used(lib, shape.m),
        "complete": True,
        "trials": trials,
        "tuned_us": timed(at_size),
        "ratio_to_tuned": round(at_size.median / row["us"], 4),
        "tuned_knobs": used(tuned, shape.m)["knobs"],
    }

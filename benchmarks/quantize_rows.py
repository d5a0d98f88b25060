"""The rows of the 8-bit benchmark: checked first, then timed in turns with their baselines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gemm_rows
import gemm_timing as timing
import torch
import torch.nn.functional as F
from common import timed
from gemm_common import Shape
from quantized_gemm import SCHEMES

import tvmcap
from tvmcap.base.quantization import LARGEST
from tvmcap.base.timing import summarize

#: Largest error against the same sums in float32: tensor cores add e4m3 products in fewer bits.
LIMITS = {"int8": timing.TOLERANCE, "e4m3": 5e-2}
#: A value's step in 8 bits over the largest magnitude of its row, at its coarsest.
STEPS = {"int8": 1 / 127, "e4m3": 32 / 448}
#: Least signal-to-noise ratio of the layer against the block of the rounded values, in dB.
LEAST_DB = {"int8": 40.0, "e4m3": 30.0}
BF16_LIMIT = timing.TOLERANCE
TINY = 1e-30
Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def quantized(x: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in 8 bits, and the largest magnitude [rows, 1] of each row in float32."""
    largest, wide = LARGEST[SCHEMES[scheme]], x.float()
    top = wide.abs().amax(-1, keepdim=True).clamp_min(TINY)
    scaled = wide * (largest / top)
    if scheme == "int8":
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(getattr(torch, SCHEMES[scheme])), top


def inputs_of(shape: Shape, scheme: str, seed: int, device: str = "cuda") -> timing.Inputs:
    """Draw the block, and what its product reads: q, top [M, 1], w [N, K], scale [N] and bias [N].

    The reference is the block of the rounded values, in float32; "x", "nk" and "b" are bf16's.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    (m, k, n), new = shape, timing.draw(seed, device)
    first = {"x": new(m, k), "nk": new(n, k, scale=k**-0.5), "b": new(n)}
    first["q"], first["top"] = quantized(first["x"], scheme)
    first["w"], most = quantized(first["nk"], scheme)
    largest = LARGEST[SCHEMES[scheme]]
    first["scale"], first["rows"] = most[:, 0] / largest, first["top"] / largest
    first["bias"] = first["b"].float()
    first["out"] = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    sums = first["q"].float() @ first["w"].float().t()
    reference = F.gelu(sums * first["rows"] * first["scale"] + first["bias"], approximate="tanh")
    return timing.Inputs(first, reference, ("q", "w"), 2 * m * k * n)


def linear_gelu_int8(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Quantize rows of x, multiply by w [N, K], scale, add the bias, GELU: for torch.compile."""
    q, top = quantized(x, "int8")
    sums = torch._int_mm(q, w.t()).float() * (top * (1 / LARGEST["int8"]))
    return F.gelu(sums * scale + bias, approximate="tanh").to(x.dtype)


def quantized_scaled_mm(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Quantize rows of x to e4m3 and multiply, without GELU: for torch.compile."""
    q, top = quantized(x, "e4m3")
    return torch._scaled_mm(
        q, w.t(), scale_a=top * (1 / LARGEST[SCHEMES["e4m3"]]), scale_b=scale[None],
        bias=bias.to(x.dtype), out_dtype=x.dtype, use_fast_accum=True,
    )  # fmt: skip


#: By scheme: the name of the baseline that torch.compile gets whole, and its function.
COMPILED = {
    "int8": ("torch_compile_int8", linear_gelu_int8),
    "e4m3": ("quantized_scaled_mm", quantized_scaled_mm),
}


def scaled_mm(s: Tensors) -> torch.Tensor:
    """Multiply e4m3 of one scale a tensor, with the bias and without GELU."""
    one = s["one"]
    return torch._scaled_mm(
        s["q"], s["w"].t(), scale_a=one, scale_b=one, bias=s["b"], out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


def scaled_mm_rowwise(s: Tensors) -> torch.Tensor:
    """Multiply e4m3 of a scale a row and a column, with the bias and without GELU."""
    return torch._scaled_mm(
        s["q"], s["w"].t(), scale_a=s["rows"], scale_b=s["scale"][None], bias=s["b"],
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def libraries(folder: Path, shape: Shape, scheme: str) -> dict[str, Path]:
    """Return where ours are: the layer in 8 bits, its product alone, and bf16."""
    name = f"{shape.k}x{shape.n}"
    return {
        "ours": folder / f"{name}-{scheme}.so",
        "kernel": folder / f"{name}-{scheme}-alone.so",
        "bf16": folder / f"{name}.so",
    }


def baselines(
    inputs: timing.Inputs, scheme: str, options: argparse.Namespace
) -> tuple[dict[str, timing.Call], dict[str, str]]:
    """Return what PyTorch has for a scheme, and why some of it is missing."""
    ready: dict[str, timing.Call] = {}
    if scheme == "e4m3":
        for one in inputs.sets:
            one["one"] = torch.ones((), device=one["q"].device)
        ready = {"scaled_mm": scaled_mm, "scaled_mm_rowwise": scaled_mm_rowwise}
    name, function = COMPILED[scheme]
    if options.no_compile:
        return ready, {name: "left out"}
    order = ("x", "w", "scale", "bias")
    try:
        args = tuple(inputs.sets[0][part] for part in order)
        made = gemm_rows.compiled(function, args, options.compile_cap)
    except Exception as e:  # whatever stops the compiler must not stop the benchmark
        return ready, {name: f"{type(e).__name__}: {e}"[:300]}
    return {**ready, name: lambda s: made(*(s[part] for part in order))}, {}


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the signal-to-noise ratio in dB."""
    noise = (got.float() - want).double().square().sum()
    return round(float(10 * torch.log10(want.double().square().sum() / noise)), 2)


def checked(calls: dict[str, timing.Call], inputs: timing.Inputs, scheme: str) -> Row:
    """Run each of ours on outputs of NaN; return errors, and the noise that 8 bits add.

    Raises AssertionError where one is wrong: ours in 8 bits against the rounded values' block, bf16
    against its own. Where a value of x lies next to the middle of two steps the layer may round it
    to the other one, which moves sums of its row by a step: few of them, so the noise stays low.
    """
    one, rounded = inputs.sets[0], inputs.reference
    exact = timing.linear_gelu(one["x"].float(), one["nk"].float(), one["b"].float())
    step = STEPS[scheme] * (one["top"].max() * one["nk"].abs().max()).item()
    limits = {
        "ours": LIMITS[scheme] + step / inputs.scale.item(),
        "kernel": LIMITS[scheme],
        "bf16": BF16_LIMIT,
    }
    errors = {}
    for name in ("ours", "kernel", "bf16"):
        inputs.poison()
        calls[name](one)
        inputs.reference = exact if name == "bf16" else rounded
        inputs.limit = limits[name]
        errors[name] = inputs.require(one["out"], name)
        if name == "ours":
            noise, rest = sqnr_db(exact, one["out"]), sqnr_db(rounded, one["out"])
    if rest < LEAST_DB[scheme]:
        raise AssertionError(f"ours is wrong: {rest} dB against the block of the rounded values")
    inputs.reference, inputs.limit = rounded, limits["ours"]
    return {"errors": errors, "sqnr_db": noise, "sqnr_of_rounded_db": rest}


def row(shape: Shape, scheme: str, options: argparse.Namespace) -> Row:
    """Measure the layer of a scheme at one shape with its libraries."""
    paths = libraries(options.folder, shape, scheme)
    libs = {name: tvmcap.load(path) for name, path in paths.items()}
    inputs = inputs_of(shape, scheme, options.seed)
    calls: dict[str, timing.Call] = {
        "ours": lambda s: libs["ours"](s["x"], s["w"], s["scale"], s["bias"], out=s["out"]),
        "kernel": lambda s: libs["kernel"](
            s["top"], s["q"], s["w"], s["scale"], s["bias"], out=s["out"]
        ),
        "bf16": lambda s: libs["bf16"](s["x"], s["nk"], s["b"], out=s["out"]),
    }
    with torch.no_grad():
        found = checked(calls, inputs, scheme)
        others, missing = baselines(inputs, scheme, options)
        stream, graphs = torch.cuda.Stream(), {}
        for name, call in {**calls, **others}.items():
            try:
                graphs[name] = timing.Graph(call, inputs, stream)
            except RuntimeError as e:
                if name in calls:
                    raise
                missing[name] = str(e)[:300]
        us = timing.interleaved(graphs, gemm_rows.TURNS, gemm_rows.SECONDS)
        inputs.poison()
        graphs["ours"].sample(1)
    found["errors"]["repeated"] = inputs.require(inputs.sets[-1]["out"], "ours, when repeated,")
    return {**found, **figures(us, inputs.flops, scheme), "refused": missing, **used(libs, shape.m)}


def figures(us: dict[str, list[float]], flops: int, scheme: str) -> Row:
    """Return what samples of microseconds come to; a ratio is another's time over ours."""
    times = {name: summarize(values) for name, values in us.items()}
    ours, kernel = times.pop("ours"), times.pop("kernel")
    ratios = {name: round(t.median / ours.median, 4) for name, t in times.items()}
    return {
        "us": round(ours.median, 3),
        "ratios": ratios,
        "speedup_vs_best": min(ratios.values()),
        "tops_alone": round(flops / kernel.median / 1e6, 1),
        "complete": COMPILED[scheme][0] in times,
        "ours_us": timed(ours),
        "kernel_us": timed(kernel),
        "baselines_us": {name: timed(value) for name, value in times.items()},
    }


def used(libs: dict[str, Any], rows: int) -> Row:
    """Say which setting of the kernel served the rows, and whether records chose it."""
    chosen = {n: gemm_rows.used(lib, rows) for n, lib in libs.items() if n != "ours"}
    return {"served": {n: {k: c[k] for k in ("knobs", "tuned")} for n, c in chosen.items()}}

"""Row-wise functions, and the one kernel that each of them becomes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tvm import tirx

from tests.libs import values
from tests.schedules.products import TARGET
from tvmcap import pipeline
from tvmcap.base.config import make_config
from tvmcap.capture.export import capture
from tvmcap.graph.rewrite import is_op, outputs_of
from tvmcap.schedules import row_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = (1, 8, 100, 768, 1000, 4096, 4104, 16384, 50257)


def layer_norm(x, r, w, b):
    return F.gelu(F.layer_norm(x + r, (x.shape[-1],), w, b))


def rms_norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def add_rms(x, r, w):
    h = x + r
    return h, F.rms_norm(h, (x.shape[-1],), w, 1e-5)


def softmax(x, r):
    return torch.softmax(x * 0.5 + r, -1)


def log_softmax(x):
    return F.log_softmax(x, -1)


def extremes(x):
    return x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)


PROGRAMS = {
    layer_norm: "rrcc",
    rms_norm: "rc",
    add_rms: "rrc",
    softmax: "rr",
    log_softmax: "r",
    extremes: "r",
}
"""Each function's arguments: r for rows by columns, c for columns."""


def arguments(fn: Any, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    shapes = [(rows, columns) if kind == "r" else (columns,) for kind in PROGRAMS[fn]]
    return [values(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(shapes)]


@dataclass(frozen=True)
class Call:
    """The one kernel of a function, and how to call it.

    ``inputs`` are the function's arguments by index, or constants; ``outputs`` say which result of
    the function each of the kernel's is.
    """

    func: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]


def fused(fn: Any, args: Any, target: Any = TARGET) -> Any:
    """Return the fused module of a function whose rows are symbolic."""
    sizes = {i: {0: "B"} for i, a in enumerate(args) if a.dim() > 1}
    config = make_config(None, target={"kind": "cuda", "arch": str(target.arch)}, dynamic=sizes)
    captured = capture(fn, args, None, config)
    return pipeline.run(captured.mod, pipeline.front(target), target, config, pipeline.Trace())


def kernels(fn: Any, args: Any) -> list[Any]:
    return [f for f in fused(fn, args).functions.values() if isinstance(f, tirx.PrimFunc)]


def call(fn: Any, args: Any, target: Any = TARGET) -> Call:
    """Return the call of a function that is one kernel."""
    mod = fused(fn, args, target)
    main = mod["main"]
    bound = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    (kernel,) = (v for v in bound.values() if is_op(v, "call_tir"))
    params = list(main.params)
    inputs = tuple(params.index(a) if a in params else a.value for a in kernel.args[1].fields)
    places = [getattr(bound[o], "index", 0) for o in outputs_of(main)]
    return Call(mod[kernel.args[0]], inputs, tuple(places.index(i) for i in range(len(places))))


@functools.cache
def kernel(fn: Any, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the PrimFunc of one of the functions, its rows symbolic."""
    return call(fn, arguments(fn, 4, columns, dtype)).func


@functools.cache
def program(fn: Any, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the row program of that."""
    return row_norm.match(kernel(fn, columns, dtype), TARGET)

"""The CPU GEMM as a template: its space of knobs, its default, and its features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx

from tvmcap.kernel.template import Template
from tvmcap.schedules.cpu_lower import lower
from tvmcap.schedules.cpu_target import pack_width, threads, vector_lanes, vector_registers
from tvmcap.schedules.cpu_tile import Knobs
from tvmcap.schedules.gemm_match import Gemm, read


def match(func: tirx.PrimFunc, target: Any) -> Gemm | None:
    """Return the matrix product that ``func`` is on llvm, or None."""
    if target.kind.name != "llvm":
        return None
    gemm = read(func, lambda dtype: pack_width(dtype, target))
    bytes_apart = gemm is not None and gemm.sums == "int32" and gemm.layout != "grouped"
    return None if bytes_apart else gemm


def tiles(target: Any) -> list[tuple[int, int]]:
    """Return the register tiles (rows, vectors) that fit with one row of B and one of A."""
    regs, most = vector_registers(target), pack_width("float32", target) // vector_lanes(target)
    widths = [w for w in (1, 2, 4) if w <= most and most % w == 0 and w > 1]
    fitting = {w: (regs - w - 1) // w for w in widths}
    return [
        (mr, w) for w, top in fitting.items() for mr in (top, top - 1, top - 2) if 2 <= mr <= 14
    ]


DEPTHS = (128, 256)
"""Steps of K in one block.

With longer sums the rounding error passes twice that of a vendor's blocked product.
"""


def space(problem: Gemm, target: Any) -> list[Knobs]:
    """Return every setting that fits: 48 to 288."""
    whole = isinstance(problem.k, int) and problem.k <= DEPTHS[0]
    deep = isinstance(problem.k, int) and problem.k >= 1024
    depths = (0,) if whole or problem.sums == "int32" else DEPTHS if deep else DEPTHS[:1]
    direct = (0, 1) if problem.layout == "kn" else (0,)
    points = itertools.product(tiles(target), (48, 192, 384), depths, (1, 4), "nm", direct)
    found = [
        Knobs(mr, nv, mc // mr * mr, kc, unroll, order, d * mr)
        for (mr, nv), mc, kc, unroll, order, d in points
    ]
    return list(dict.fromkeys(found))


def default(problem: Gemm, target: Any) -> Knobs:
    """Return the setting used without a record: the widest tile, sums of at most 128 steps."""
    mr, nv = max(tiles(target), key=lambda t: (t[1], t[0]))
    whole = isinstance(problem.k, int) and problem.k <= DEPTHS[0]
    depth = 0 if whole or problem.sums == "int32" else DEPTHS[0]
    return Knobs(mr, nv, 192 // mr * mr, depth, 4, "n", mr if problem.layout == "kn" else 0)


FEATURES = (
    "log_rows", "log_n", "log_k", "log_batch", "packed", "bytes_b", "mr", "nv", "log_mc", "log_kc",
    "unroll", "panels_outermost", "direct", "accumulators", "tile_efficiency", "tasks_a_thread",
    "panel_bytes", "b_passes", "intensity",
)  # fmt: skip


def features(
    problem: Gemm, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return one row a setting, columns as in ``FEATURES``; a symbolic extent counts as 64."""
    rows, n, k = (_number(e) for e in (problem.rows, problem.n, problem.k))
    batch = math.prod(_number(e) for e in problem.batch)
    lanes, width = vector_lanes(target), pack_width(str(problem.b.dtype), target)
    panels, bytes_b = math.ceil(n / width), tvm_ffi.dtype(str(problem.b.dtype)).itemsize
    table = []
    for c in knobs:
        depth, blocks = min(c.kc or k, k), math.ceil(rows / c.mc)
        waste = rows / (math.ceil(rows / c.mr) * c.mr) * n / (panels * width)
        table.append(
            [
                *(math.log2(max(x, 1)) for x in (rows, n, k, batch)),
                problem.layout in ("packed", "grouped"), bytes_b, c.mr, c.nv, math.log2(c.mc),
                math.log2(depth),
                c.unroll, c.order == "n", c.direct, c.mr * c.nv, waste,
                batch * panels * blocks / threads(target),
                depth * c.nv * lanes * bytes_b, math.ceil(rows / c.mr), c.mr * c.nv / (c.mr + c.nv),
            ]
        )  # fmt: skip
    return np.asarray(table, dtype=np.float32).reshape(len(knobs), len(FEATURES))


def _number(extent: Any) -> int:
    return extent if isinstance(extent, int) else 64


TEMPLATE = Template(
    name="cpu_gemm",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=features,
    feature_names=FEATURES,
    modules=tuple(
        f"tvmcap.schedules.cpu_{part}" for part in ("build", "bytes", "pack", "target", "tile")
    ),
)

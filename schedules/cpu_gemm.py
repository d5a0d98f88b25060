"""The CPU GEMM as a template: what it matches, its space of knobs, its default, and features for the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmcap.kernel.template import Template
from tvmcap.schedules.cpu_lower import Knobs, lower
from tvmcap.schedules.cpu_match import Gemm, match
from tvmcap.schedules.cpu_target import pack_width, threads, vector_lanes, vector_registers


def tiles(target: Any) -> list[tuple[int, int]]:
    """Return the register tiles (rows, vectors) whose accumulators, one row of B and one of A fit the registers."""
    regs, most = vector_registers(target), pack_width("float32", target) // vector_lanes(target)
    widths = [w for w in (1, 2, 4) if w <= most and most % w == 0 and w > 1]
    fitting = {w: (regs - w - 1) // w for w in widths}
    return [(mr, w) for w, top in fitting.items() for mr in (top, top - 1, top - 2) if 2 <= mr <= 14]


def space(problem: Gemm, target: Any) -> list[Knobs]:
    """Return every setting that fits; about a hundred."""
    k = problem.k if isinstance(problem.k, int) else 0
    depths = [0, *(kc for kc in (256, 512, 1024) if kc < k)]
    direct = (0,) if problem.layout != "kn" else (0, 4)
    points = itertools.product(tiles(target), (48, 96, 192, 384), depths, (1, 4), (0, 16), "nm", direct)
    found = [
        Knobs(mr, nv, mc // mr * mr, kc, unroll, ahead, order, min(d, mr))
        for (mr, nv), mc, kc, unroll, ahead, order, d in points
    ]
    return list(dict.fromkeys(found))


def default(problem: Gemm, target: Any) -> Knobs:
    """Return the setting used without a record."""
    mr, nv = max(tiles(target), key=lambda t: (t[1], t[0]))
    deep = isinstance(problem.k, int) and problem.k > 2048
    unroll = 4 if isinstance(problem.k, int) and problem.k % 4 == 0 else 1
    return Knobs(mr, nv, 192 // mr * mr, 1024 if deep else 0, unroll, 0, "n", mr if problem.layout == "kn" else 0)


TEMPLATE = Template(
    name="cpu_gemm",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=None,
    feature_names=(),
    variants=True,
)

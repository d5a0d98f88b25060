"""A schedule template for sums over rows on a CPU, such as ``(x * x * w).sum(-1)``.

``03_write_a_schedule_template.py`` walks through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from tvmcap.kernel.template import Template

LANES = (16, 32, 64, 128)
WIDTH = 8
"""Lanes that a vector register of any x86-64 CPU with AVX holds; lanes are folded to these."""
LONGEST = 256
"""Additions in a row after which rounding errors would show beside PyTorch's pairwise sums."""


@dataclass(frozen=True)
class Problem:
    """A sum over the columns of a matrix; ``rows`` may be symbolic."""

    rows: Any
    columns: int
    inputs: int

    def key(self) -> dict[str, Any]:
        """Return what identifies the workload but for symbolic sizes."""
        return {"op": "row_sums", "columns": self.columns, "inputs": self.inputs}

    def flops(self, sizes: Mapping[str, int]) -> float:
        """Return operations, one an element and input."""
        return float(sizes["rows"] * self.columns * self.inputs)

    def bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes of a float32 matrix that is read once, and of the sums."""
        return 4.0 * sizes["rows"] * (self.columns + 1)


@dataclass(frozen=True)
class Knobs:
    """``lanes`` sums of a row grow side by side; with ``parallel`` all cores share the rows."""

    lanes: int
    parallel: bool


def _blocks(func: tirx.PrimFunc) -> tuple[Any, list[Any]]:
    """Return a schedule of the kernel, and its blocks in order."""
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    return sch, list(sch.get_child_blocks(sch.get_sblock("root")))


def _kinds(sch: Any, block: Any) -> str:
    """Return a letter a loop of a block: S for one of a spatial axis, R for a reduction's."""
    return "".join("R" if int(v.iter_type) == 2 else "S" for v in sch.get(block).iter_vars)


def match(func: tirx.PrimFunc, target: Any) -> Problem | None:
    """Return the problem where ``func`` ends in a sum over the columns of a matrix."""
    if target.kind.name != "llvm" or "s_tir" not in (func.attrs or {}):
        return None
    sch, blocks = _blocks(func)
    *before, last = (_kinds(sch, block) for block in blocks)
    if last != "SR" or any(kinds != "SS" for kinds in before):
        return None
    rows, columns = (sch.get(loop).extent for loop in sch.get_loops(blocks[-1]))
    store = sch.get(blocks[-1]).body
    plus = isinstance(store.value, tirx.Add) and str(store.buffer.dtype) == "float32"
    if not plus or not isinstance(columns, tirx.IntImm) or not _lanes(int(columns)):
        return None
    rows = int(rows) if isinstance(rows, tirx.IntImm) else rows
    return Problem(rows, int(columns), len(func.params) - 1)


def refuse(func: tirx.PrimFunc, target: Any) -> str | None:
    """Say why a kernel with a sum over columns is not served; None for any other kernel."""
    if target.kind.name != "llvm" or "s_tir" not in (func.attrs or {}):
        return None
    sch, blocks = _blocks(func)
    sums = any(_kinds(sch, block) == "SR" for block in blocks)
    if not sums or match(func, target) is not None:
        return None
    return "it is not elementwise work and, last, a float32 sum over columns that lanes divide"


def space(problem: Problem, target: Any) -> list[Knobs]:
    """Every setting that fits."""
    lanes = _lanes(problem.columns)
    return [Knobs(n, parallel) for n in lanes for parallel in (False, True)]


def _lanes(columns: int) -> list[int]:
    """Return the lanes that divide the columns, and that leave sums short enough to be exact."""
    return [n for n in LANES if columns % n == 0 and columns // n <= LONGEST]


def estimate(problem: Problem, knobs: Sequence[Knobs], target: Any) -> list[float]:
    """Rough microseconds: additions that wait for each other, and the start of the threads."""
    rows = problem.rows if isinstance(problem.rows, int) else 256
    cores = int(target.attrs.get("num-cores", 1))
    found = []
    for k in knobs:
        # an addition takes 4 cycles, and 16 elements come from the cache in one
        cycles = max(4 * problem.columns / k.lanes, problem.columns / 16)
        cycles += 4 * (k.lanes / WIDTH + WIDTH)
        share, start = (-(-rows // cores), 5.0) if k.parallel else (rows, 0.0)
        found.append(share * cycles / 3000 + start)
    return found


def default(problem: Problem, target: Any) -> Knobs:
    """Return the setting that the estimate puts first."""
    points = space(problem, target)
    times = estimate(problem, points, target)
    return points[times.index(min(times))]


def ranges(problem: Problem, target: Any) -> list[tuple[int | None, Knobs]]:
    """Return the defaults of a symbolic number of rows: few rows stay on one core."""
    by_rows = [default(replace(problem, rows=rows), target) for rows in range(1, 257)]
    few = [rows for rows, knobs in enumerate(by_rows, 1) if not knobs.parallel]
    if not few or len(few) == len(by_rows):
        return [(None, by_rows[-1])]
    return [(few[-1], by_rows[0]), (None, by_rows[-1])]


def lower(func: tirx.PrimFunc, problem: Problem, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Write the kernel of a setting, as steps of a TVM schedule."""
    sch, (*before, total) = _blocks(func)
    for block in before:
        sch.compute_inline(block)
    sums = [_side_by_side(sch, total, lanes) for lanes in (knobs.lanes, WIDTH)]
    row = sch.get_loops(total)[0]
    for block in reversed(sums):
        sch.compute_at(block, row)
        _, lane, step = sch.get_loops(block)
        sch.reorder(step, lane)
        sch.vectorize(lane)
    if knobs.parallel:
        sch.parallel(row)
    for block in sums:
        start = sch.decompose_reduction(block, sch.get_loops(block)[1])
        sch.vectorize(sch.get_loops(start)[-1])
    # the rows are all dimensions of the result, but for the last 0
    return sch.mod["main"].with_attrs({"tirx.is_scheduled": True, "tvmcap.trailing": 0})


def _side_by_side(sch: Any, total: Any, lanes: int) -> Any:
    """Let ``lanes`` parts of a sum grow side by side, which ``total`` then adds up."""
    _, column = sch.get_loops(total)
    _, lane = sch.split(column, [None, lanes])
    return sch.rfactor(lane, 1)


FEATURES = ("rows", "columns", "lanes", "parallel", "estimate_us")


def features(
    problem: Problem, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the cost model learns from, one row a setting."""
    rows = problem.rows if isinstance(problem.rows, int) else 256
    times = estimate(problem, knobs, target)
    table = [
        (rows, problem.columns, k.lanes, k.parallel, us) for k, us in zip(knobs, times, strict=True)
    ]
    return np.asarray(table, dtype=np.float32).reshape(len(knobs), len(FEATURES))


TEMPLATE = Template(
    name="row_sums",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=features,
    feature_names=FEATURES,
    ranges=ranges,
    estimate=estimate,
    refuse=refuse,
)

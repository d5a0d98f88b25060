"""What the cost model sees of a Hopper GEMM's settings: problem, knobs, and what follows from both.

All is computed on arrays of settings; a record holds enough for it, so that records outlive a
change of this list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmcap.schedules import hopper_estimate as he
from tvmcap.schedules.hopper_columns import GROUPS, KNOBS, Columns, Sizes, sizes_of
from tvmcap.schedules.hopper_plan import SHARED_BYTES, SM_COUNT, Plan
from tvmcap.schedules.skinny_plan import skinny_bytes

_PROBLEM = ("log_rows", "log_n", "log_k", "batch", "item", "out_item", "a_km", "b_kn")
_DERIVED = (
    "tiles",
    "waves",
    "fill",
    "tail",
    "row_waste",
    "column_waste",
    "steps",
    "step_waste",
    "stage_bytes",
    "shared_bytes",
    "resident",
    "registers",
    "intensity",
    "wave_bytes",
    "wave_square",
    "mma_cycles",
    "load_cycles",
    "step_cycles",
    "bound",
    "log_floor_us",
    "log_estimate_us",
)
FEATURES = (*_PROBLEM, *KNOBS, *_DERIVED)
_OUT_BYTES = {"float32": 4}
_HBM_BYTES_A_US = 4.3e6
_FLOPS_A_US = 7.9e8


def features(
    problem: Any, knobs: Sequence[Any], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the features of settings of a problem (a Gemm, or Sizes), (settings, FEATURES)."""
    sizes, columns = sizes_of(problem), Columns.of(knobs)
    table = {**_problem(sizes), **_knobs(columns), **_derived(sizes, columns, knobs)}
    arrays = [np.broadcast_to(np.float32(table[name]), len(knobs)) for name in FEATURES]
    return np.stack(arrays, axis=1)


def _problem(sizes: Sizes) -> dict[str, Any]:
    logs = (float(np.log2(max(extent, 1))) for extent in (sizes.rows, sizes.n, sizes.k))
    out = _OUT_BYTES.get(sizes.out, 2)
    flags = (sizes.a_layout == "km", sizes.layout == "kn")
    return dict(zip(_PROBLEM, (*logs, sizes.batch, sizes.item, out, *flags), strict=True))


def _knobs(columns: Columns) -> dict[str, Any]:
    words = columns.groups
    codes = sum(i * (words == word) for i, word in enumerate(GROUPS)) if len(words) else words
    return {name: codes if name == "groups" else getattr(columns, name) for name in KNOBS}


def _derived(sizes: Sizes, c: Columns, points: Sequence[Any]) -> dict[str, Any]:
    if not points:
        return dict.fromkeys(_DERIVED, np.zeros(0))
    # of a setting with the operands exchanged, bm are columns and bn rows
    high = np.where(c.swapped, c.bn, c.bm)
    wide = np.where(c.swapped, c.bm, c.bn)
    row_tiles = he.ceil(sizes.rows, high * c.cluster_m) * c.cluster_m
    column_tiles = he.ceil(sizes.n, wide * c.cluster_n) * c.cluster_n
    tiles = sizes.batch * row_tiles * column_tiles * c.split
    shared = shared_bytes(sizes, c, points)
    resident = np.where(c.swapped, np.maximum(SHARED_BYTES // (shared + 1024), 1), 1)
    places = np.where(c.swapped, SM_COUNT * resident, he.at_once(c))
    waves = he.ceil(tiles, places)
    steps = he.ceil(he.ceil(sizes.k, c.bk), c.split)
    mma, load = he.mma_cycles(c, sizes), he.load_cycles(c, sizes)
    step = he.step_cycles(c, sizes)
    estimate = he.estimate_us(sizes, c)
    values = (
        tiles,
        waves,
        tiles / (waves * places),
        (tiles - 1) % places / places,
        row_tiles * high / sizes.rows,
        column_tiles * wide / sizes.n,
        steps,
        steps * c.bk * c.split / sizes.k,
        (c.bm + c.bn) * c.bk * sizes.item,
        shared,
        resident,
        _registers(c),
        c.bm * c.bn / (c.bm / c.cluster_n + c.bn / c.cluster_m),
        *_reuse(sizes, c, high, wide, np.minimum(tiles, places)),
        mma,
        load,
        step,
        mma / step,
        np.log(_floor_us(sizes)),
        np.log(estimate),
    )
    return dict(zip(_DERIVED, values, strict=True))


def _registers(c: Columns) -> Any:
    """Registers in which a thread of a consumer keeps its sums."""
    rows = np.where(c.groups == "rows", c.bm // 2, c.bm)
    columns = np.where(c.groups == "columns", c.bn // 2, c.bn)
    return np.where(c.swapped, c.bn // 2, rows // 64 * columns // 2)


def _reuse(sizes: Sizes, c: Columns, high: Any, wide: Any, running: Any) -> tuple[Any, Any]:
    """Reuse in the L2 cache, of the tiles that run at once as the raster orders them.

    Bytes of the operands that they read for the first time, in each k step, a tile; and how many
    rows of tiles they are high for each column.
    """
    running = np.maximum(running / c.split, 1.0)
    tall = np.minimum(np.minimum(c.group, he.ceil(sizes.rows, high)), running)
    across = np.minimum(np.maximum(running / tall, 1.0), he.ceil(sizes.n, wide))
    fresh = (tall * high + across * wide) * c.bk * sizes.item
    return fresh / running, np.log2(tall / across)


def _floor_us(sizes: Sizes) -> float:
    """Microseconds of the roofline (an H200's measured rates)."""
    flops = 2.0 * sizes.batch * sizes.rows * sizes.n * sizes.k * (sizes.item / 2)
    moved = sizes.item * sizes.k * (sizes.rows + sizes.n)
    moved += _OUT_BYTES.get(sizes.out, 2) * sizes.rows * sizes.n
    return max(flops / _FLOPS_A_US, sizes.batch * moved / _HBM_BYTES_A_US)


def shared_bytes(sizes: Sizes, c: Columns, points: Sequence[Any]) -> Any:
    """Bytes of shared memory of settings, with one result staged.

    What the ring does not hold is the same for settings that differ in other knobs.
    """
    known: dict[Any, int] = {}
    rest = []
    for p in points:
        key = (p.bm, p.bn, p.groups, p.split, p.tma_store)
        if key not in known:
            extents = (sizes.rows, sizes.n, sizes.k, 1, False, False)
            plan = Plan(*extents, sizes.dtype, p, (sizes.out,))
            known[key] = plan.shared_bytes - p.stages * plan.stage_bytes
        rest.append(known[key])
    tiled = np.array(rest) + c.stages * (c.bm + c.bn) * c.bk * sizes.item
    return np.where(c.swapped, skinny_bytes(None, c), tiled)

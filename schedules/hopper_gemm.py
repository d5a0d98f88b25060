"""Hopper GEMM: wgmma fed by TMA on sm_90a, with the fused PrimFunc's epilogue.

For bf16, fp16 and, where allowed, tf32. One producer thread fills a ring of shared-memory stages
through TMA, two consumer warp groups multiply them with wgmma and keep float32 sums in registers.
Few rows go to a kernel with the operands exchanged (skinny_kernel). Instruction shapes, descriptors
and swizzles: PTX ISA 9.0, "Asynchronous warpgroup-level matrix instructions".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from tvmcap.kernel.template import Template
from tvmcap.schedules import gemm_match, hopper_reasons, skinny_kernel
from tvmcap.schedules.gemm_match import Gemm
from tvmcap.schedules.hopper_columns import Columns, sizes_from_record, sizes_of
from tvmcap.schedules.hopper_estimate import estimate_us
from tvmcap.schedules.hopper_features import FEATURES, features
from tvmcap.schedules.hopper_kernel import gemm_kernel
from tvmcap.schedules.hopper_ops import launch_params
from tvmcap.schedules.hopper_plan import OPERANDS, SHARED_BYTES, SWIZZLE_BYTES, plan

RANGES = (16, 64, 256, 1024, 4096)
"""Rows up to which a default serves where their number is symbolic; the last serves any."""


@dataclass(frozen=True)
class Knobs:
    """Tile of ``bm`` x ``bn`` x ``bk`` a CTA, ``stages`` of it in shared memory.

    ``groups`` says how the two consumer warp groups divide the work: "rows" or "columns" of a tile,
    or "tiles" in turn (ping-pong: one's epilogue hides behind the other's main loop). ``cluster_m``
    CTAs along M share the tile of B, ``cluster_n`` along N that of A, through multicast. ``split``
    CTAs of a cluster share K and sum through distributed shared memory. Tiles are walked in groups
    of ``group`` rows, by a grid that fills the card once where ``persistent``, else by a CTA each.
    ``late`` frees a stage one k step late, so that the tensor cores never drain. ``tma_store`` lets
    results leave through TMA. A ``dependent`` kernel starts before the one before it has ended
    (programmatic dependent launch), and waits; ``warm`` lets it bring its first stages to the L2
    cache meanwhile. ``swapped`` exchanges the operands, for few rows: ``bm`` are columns then,
    ``bn`` rows.
    """

    bm: int = 128
    bn: int = 128
    bk: int = 64
    stages: int = 6
    groups: str = "tiles"
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1
    group: int = 8
    persistent: bool = True
    late: bool = True
    tma_store: bool = True
    dependent: bool = True
    warm: bool = False
    swapped: bool = False


#: Tiles worth trying, as (bm, bn, groups); the sums fill at most 144 registers of a thread.
TILES = (
    *((128, bn, "rows") for bn in (64, 96, 112, 128, 160, 192, 224, 256)),
    *((256, bn, "rows") for bn in (64, 96, 128)),
    *((64, bn, "columns") for bn in (64, 96, 128, 160, 192, 224, 256)),
    *((192, bn, "columns") for bn in (128, 160, 192)),
    *((64, bn, "tiles") for bn in (64, 128, 192, 256)),
    *((128, bn, "tiles") for bn in (64, 96, 128)),
)


SHARING = ((1, 1), (2, 1), (1, 2))
"""CTAs of a cluster along M and N that share tiles; four of them gained nothing."""


def match(func: tirx.PrimFunc, target: Any) -> Gemm | None:
    """Return the matrix product that ``func`` is, where TMA and wgmma can serve it."""
    if target.kind.name != "cuda":
        return None
    gemm = gemm_match.read(func)
    if gemm is None or hopper_reasons.refuse_product(gemm, target) is not None:
        return None
    return gemm


def stores_through_tma(gemm: Gemm) -> bool:
    """Whether the outputs can leave through shared memory: 16 bits, rows that TMA addresses."""
    outputs = gemm.fused.epilogue.outputs
    halves = all(str(o.dtype) in ("float16", "bfloat16") for o in outputs)
    return halves and gemm_match.is_multiple(gemm.n, 8)


def fits(gemm: Gemm, knobs: Knobs) -> bool:
    """Whether a setting can run: registers, shared memory, cluster, its store path."""
    if knobs.swapped:
        return _fits_swapped(gemm, knobs)
    p = plan(gemm, knobs)
    shape = (knobs.bm, knobs.bn, knobs.groups) in TILES
    # without TMA more spill
    registers = knobs.tma_store or knobs.groups == "tiles" or p.accumulators <= 96
    share = knobs.bn % (8 * knobs.cluster_m) == 0 and knobs.bm % (8 * knobs.cluster_n) == 0
    cluster = p.cluster in (1, 2, 4, 8) and share
    summed = knobs.split == 1 or (not knobs.tma_store and p.group_columns % (8 * knobs.split) == 0)
    summed = summed and (knobs.split == 1 or p.sums == "float32")
    stored = not knobs.tma_store or (stores_through_tma(gemm) and p.columns > 0)
    chunks = p.group_columns % p.atom == 0 or gemm.layout == "nk"
    chunks = chunks and knobs.bk % p.atom == 0
    narrow = not isinstance(gemm.n, int) or knobs.bn <= max(64, -(-gemm.n // 64) * 64)
    summed = summed and (not isinstance(gemm.k, int) or knobs.split <= p.k_steps)  # none idle
    memory = p.shared_bytes <= SHARED_BYTES
    early = knobs.dependent or not knobs.warm
    walked = knobs.persistent or (knobs.split == 1 and knobs.groups != "tiles")
    return all((shape, registers, cluster, summed, stored, chunks, narrow, memory, early, walked))


def _fits_swapped(gemm: Gemm, knobs: Knobs) -> bool:
    plain = gemm.a_layout == "mk" and not gemm.batch and OPERANDS[str(gemm.a.dtype)][1] == 2
    fixed = isinstance(gemm.n, int) and isinstance(gemm.k, int)
    shape = knobs.bm in (64, 128) and knobs.bn in (8, 16, 32, 64) and knobs.bn >= knobs.split
    same = _swapped_form(knobs) == knobs
    memory = skinny_kernel.skinny_bytes(gemm, knobs) <= SHARED_BYTES
    return plain and fixed and shape and same and memory


def _swapped_form(knobs: Knobs) -> Knobs:
    """Return a setting with the operands exchanged, what that kernel does not read at one value."""
    return replace(
        knobs,
        groups="columns",
        cluster_m=1,
        cluster_n=1,
        group=1,
        persistent=False,
        late=False,
        tma_store=False,
        warm=False,
        swapped=True,
    )


def deepest(gemm: Gemm, knobs: Knobs) -> Knobs | None:
    """Return a setting with as many stages as fit, two at least; None where it cannot run."""
    empty, one = (_shared_bytes(gemm, replace(knobs, stages=stages)) for stages in (0, 1))
    deep = replace(knobs, stages=min((SHARED_BYTES - empty) // (one - empty), 16))
    return deep if deep.stages >= 2 and fits(gemm, deep) else None


def _shared_bytes(gemm: Gemm, knobs: Knobs) -> int:
    return (
        skinny_kernel.skinny_bytes(gemm, knobs) if knobs.swapped else plan(gemm, knobs).shared_bytes
    )


def space(gemm: Gemm, target: Any) -> list[Knobs]:
    """Every setting that fits, its ring as deep as it can be."""
    step = _step(gemm)
    return _tiled(gemm, (step, 2 * step), (4, 8, 16), (False, True)) + _swapped(gemm)


def usual(gemm: Gemm) -> list[Knobs]:
    """Settings among which a default is chosen: all tiles, the rest as it mostly is best."""
    tiled = _tiled(gemm, (_step(gemm),), (8,), (False, True))
    points = [k for k in tiled if k.late == _drains_late(k)]
    return points + _swapped(gemm)


def _step(gemm: Gemm) -> int:
    """Return the smallest K of a stage: at least a swizzle row, 64 elements of wider types."""
    return int(max(64, SWIZZLE_BYTES // OPERANDS[str(gemm.a.dtype)][1]))


def _drains_late(knobs: Knobs) -> bool:
    return knobs.groups == "tiles"


def _tiled(
    gemm: Gemm, steps: Sequence[int], orders: Sequence[int], lates: Sequence[bool]
) -> list[Knobs]:
    tma = stores_through_tma(gemm)
    found = []
    for (bm, bn, groups), bk, (cm, cn) in itertools.product(TILES, steps, SHARING):
        for split in (1, 2, 4):
            store = tma and split == 1
            first = Knobs(bm, bn, bk, 2, groups, cm, cn, split, orders[0], True, False, store)
            deep = deepest(gemm, first)
            if deep is not None and deep.stages >= (2 if bk == steps[0] else 3):
                walks = orders if split == 1 else (8,)
                both = itertools.product(lates, walks)
                found += [replace(deep, late=late, group=order) for late, order in both]
    apart = (replace(k, persistent=False) for k in found if k.group == 8)
    return found + [k for k in apart if len(orders) > 1 and fits(gemm, k)]


def _swapped(gemm: Gemm) -> list[Knobs]:
    """Settings with the operands exchanged: rings for one to four CTAs a multiprocessor."""
    found: dict[Knobs, None] = {}
    for bm in (64, 128):
        for bn in (8, 16, 32, 64):
            for bk in (64, 128, 256):
                for split in (1, 2, 4, 8):
                    for ctas in (1, 2, 3, 4):
                        knobs = _swapped_form(Knobs(bm, bn, bk, 2, split=split))
                        fixed = skinny_kernel.skinny_bytes(gemm, replace(knobs, stages=0))
                        one = skinny_kernel.skinny_bytes(gemm, replace(knobs, stages=1)) - fixed
                        stages = min((SHARED_BYTES // ctas - 1024 - fixed) // one, 16)
                        knobs = replace(knobs, stages=stages)
                        if stages >= 2 and fits(gemm, knobs):
                            found[knobs] = found[replace(knobs, dependent=False)] = None
    return list(found)


def default(gemm: Gemm, target: Any) -> Knobs:
    """Return the setting that should be fastest by count of cycles and bytes."""
    rows = gemm.rows if isinstance(gemm.rows, int) else RANGES[-1]
    return _best(gemm, usual(gemm), rows)


def ranges(gemm: Gemm, target: Any) -> list[tuple[int | None, Knobs]]:
    """Return the defaults of a symbolic number of rows, each the best at its largest rows."""
    points = usual(gemm)
    bounds = (*RANGES[:-1], None)
    found: list[tuple[int | None, Knobs]] = []
    for rows, bound in zip(RANGES, bounds, strict=True):
        knobs = _best(gemm, points, rows)
        if found and found[-1][1] == knobs:
            found.pop()
        found.append((bound, knobs))
    return found


def _best(gemm: Gemm, points: Sequence[Knobs], rows: int) -> Knobs:
    times = estimate_us(sizes_of(gemm, rows), Columns.of(points))
    return points[int(np.argmin(times))]


def estimate(problem: Any, knobs: Sequence[Knobs], target: Any) -> list[float]:
    """Estimate the microseconds of settings of a Gemm (or Sizes), good for an order."""
    found: list[float] = estimate_us(sizes_of(problem), Columns.of(knobs)).tolist()
    return found


def lower(func: tirx.PrimFunc, gemm: Gemm, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Write the TIRx kernel of a setting, with the parameters of ``func``."""
    if knobs.swapped:
        kernel = skinny_kernel.skinny_kernel(gemm, knobs)
    else:
        kernel = gemm_kernel(gemm, knobs)
    launch = launch_params(plan(gemm, knobs).cluster, knobs.dependent)
    attrs = {"tirx.is_scheduled": True, "tirx.kernel_launch_params": launch}
    return tirx.PrimFunc(func.params, kernel.body).with_attr(attrs)


TEMPLATE = Template(
    name="hopper_gemm",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=features,
    feature_names=FEATURES,
    ranges=ranges,
    estimate=estimate,
    recall=sizes_from_record,
    refuse=hopper_reasons.refuse,
    modules=(
        "tvmcap.schedules.gpu_epilogue",
        "tvmcap.schedules.gpu_math",
        "tvmcap.schedules.hopper_epilogue",
        "tvmcap.schedules.hopper_kernel",
        "tvmcap.schedules.hopper_mainloop",
        "tvmcap.schedules.hopper_ops",
        "tvmcap.schedules.hopper_plan",
        "tvmcap.schedules.skinny_finish",
        "tvmcap.schedules.skinny_kernel",
        "tvmcap.schedules.skinny_plan",
    ),
)

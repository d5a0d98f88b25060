"""How long settings of the Hopper GEMM should take, from counted cycles and bytes.

All is computed on arrays of settings. It picks the defaults and what tuning tries first: it ranks
settings, it does not predict times. The rates are an H200's as this template meets them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmcap.schedules.hopper_columns import Columns, Sizes
from tvmcap.schedules.hopper_plan import CLUSTERS, SHARED_BYTES, SM_COUNT
from tvmcap.schedules.skinny_plan import skinny_bytes

_CYCLES_A_US = 1665.0
_FLOPS_A_CYCLE = 4096.0  # of a multiprocessor, dense, 16 bits
_L2_BYTES_A_CYCLE = 50.0  # that each multiprocessor gets when all read
_ALONE_BYTES_A_CYCLE = 90.0  # that one gets at most
_UNALIGNED = 0.66  # of that, where rows start between lines of 128 bytes
_HBM_BYTES_A_US = 3.5e6
_LOAD_CYCLES = 2150.0  # from TMA's issue to the arrival of the data
_FAR = 1.05  # what a step takes longer where the CTAs of a cluster wait for each other,
_FAR_APART = 1.26  # and where their warp groups take turns
_BARRIER_CYCLES = 120.0  # of a step, to see its data and to free it
_NARROW = 12.7  # columns of an instruction that double its cycles
_TAIL = 2.0  # of an epilogue that nothing hides
_ELEMENT_CYCLES = 13.2  # of a scheduler, for 32 elements of the epilogue
_SUM_CYCLES = 2170.0  # until the partial sums of a cluster have met, and the bytes sent a cycle
_SUM_BYTES_A_CYCLE = 14.0
_LAUNCH_US = 1.4
_SKINNY_US = 2.2
_SKINNY_HBM = 0.9  # of the time that the other kernels need to read as much
_UNUSUAL = 0.04
_FLIGHT_BYTES = 40e3  # that a multiprocessor must have asked for to get its share of HBM


_CLUSTERS = np.array([CLUSTERS.get(size, 1) for size in range(max(CLUSTERS) + 1)])


def estimate_us(sizes: Sizes, knobs: Columns) -> Any:
    """Estimate the microseconds of settings, an array of float64."""
    moved = sizes.item * sizes.k * (sizes.rows + sizes.n) + 2 * sizes.rows * sizes.n
    floor = sizes.batch * moved / _HBM_BYTES_A_US
    us = np.empty(len(knobs.bm))
    few, tiled = knobs.take(knobs.swapped), knobs.take(~knobs.swapped)
    us[knobs.swapped] = _SKINNY_US + _skinny_us(few, sizes, floor)
    us[~knobs.swapped] = _tiled_us(tiled, sizes, floor)
    return us


def _tiled_us(knobs: Columns, sizes: Sizes, floor: float) -> Any:
    us = _LAUNCH_US + np.maximum(floor, _busiest(knobs, sizes) / _CYCLES_A_US)
    # what is not counted: usual values first, so that a short list holds different tiles
    unusual = (knobs.group != 8).astype(np.int64) + (knobs.late != (knobs.groups == "tiles"))
    unusual += (knobs.bk > max(64, 128 // sizes.item)).astype(np.int64) + ~knobs.persistent
    return us * (1.0 + _UNUSUAL * unusual)


def _skinny_us(knobs: Columns, sizes: Sizes, floor: float) -> Any:
    """Microseconds of few rows: w comes from HBM once, x from the L2 cache for every tile."""
    row_tiles = ceil(sizes.rows, knobs.bn)
    ctas = ceil(sizes.n, knobs.bm) * row_tiles * knobs.split
    resident = SHARED_BYTES // (skinny_bytes(None, knobs) + 1024)
    flight = np.minimum(ceil(ctas, SM_COUNT), resident) * knobs.stages * knobs.bm * knobs.bk * 2
    starved = np.maximum(1.0, _FLIGHT_BYTES / flight)
    traffic = 2.0 * ctas / knobs.split * sizes.k * (knobs.bm + knobs.bn)
    cached = traffic / (_L2_BYTES_A_CYCLE * SM_COUNT * _CYCLES_A_US)
    waves = ctas / (resident * SM_COUNT)
    alone = np.where((resident == 1) & (ctas > SM_COUNT), 0.03, 0.0)
    early = (ctas <= SM_COUNT) & (knobs.bn > 8)
    late = np.where(knobs.dependent == early, 0.0, 0.05)
    factor = 1.0 + 0.2 * (row_tiles - 1) + 0.05 * np.maximum(waves - 1.0, 0.0) + alone + late
    sums = np.where(knobs.split > 1, 0.4 * knobs.split, 0.0)
    return np.maximum(_SKINNY_HBM * floor * starved, cached) * factor + sums


def _busiest(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of the multiprocessor with the most tiles."""
    clusters = _CLUSTERS[knobs.cluster_m * knobs.cluster_n * knobs.split]
    waves = ceil(tiles_of_clusters(knobs, sizes), clusters)
    steps = ceil(ceil(sizes.k, knobs.bk), knobs.split)
    loop = steps * step_cycles(knobs, sizes)
    # 128 threads of a group on its own, or 256 that share: elements a scheduler gets
    epilogue = knobs.bm * knobs.bn / 128 * _ELEMENT_CYCLES
    fixed = _LOAD_CYCLES + np.where(knobs.split > 1, _sum(knobs), 0.0)
    # one tile a CTA where it shares K; else warp groups take turns, or share each tile
    one = waves * (fixed + loop + epilogue)
    turns = fixed + np.maximum(waves * loop, (waves - 1) * epilogue) + _TAIL * epilogue
    shared = fixed + waves * (loop + epilogue)
    return np.where(knobs.split > 1, one, np.where(knobs.groups == "tiles", turns, shared))


def tiles_of_clusters(knobs: Columns, sizes: Sizes) -> Any:
    """Tiles of a whole cluster, of all products."""
    high = ceil(sizes.rows, knobs.bm * knobs.cluster_m)
    return sizes.batch * high * ceil(sizes.n, knobs.bn * knobs.cluster_n)


def _sum(knobs: Columns) -> Any:
    """Cycles until the partial sums of a cluster have met, each CTA sending what others own."""
    sent = 4.0 * knobs.bm * knobs.bn * (knobs.split - 1) / knobs.split
    return _SUM_CYCLES + sent / _SUM_BYTES_A_CYCLE


def mma_cycles(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of the tensor cores in a k step."""
    width = np.where(knobs.groups == "columns", knobs.bn / 2, knobs.bn)
    mma = 2.0 * knobs.bm * knobs.bn * knobs.bk * (sizes.item / 2) / _FLOPS_A_CYCLE
    return mma * (1.0 + (_NARROW / width) ** 2)  # wgmma reads its operands from shared memory


def load_cycles(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of the loads of a k step, from the L2 cache that all that are active share."""
    cluster = knobs.cluster_m * knobs.cluster_n * knobs.split
    active = np.minimum(tiles_of_clusters(knobs, sizes), _CLUSTERS[cluster]) * cluster
    rate = np.minimum(_L2_BYTES_A_CYCLE * SM_COUNT / active, _ALONE_BYTES_A_CYCLE)
    lines = all(pitch * sizes.item % 128 == 0 for pitch in (sizes.n, sizes.k))
    rate = rate * (1.0 if lines else _UNALIGNED)
    loaded = (knobs.bm / knobs.cluster_n + knobs.bn / knobs.cluster_m) * knobs.bk * sizes.item
    return loaded / rate


def step_cycles(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of a k step: the tensor cores, the loads, or their latency over the ring."""
    turns, far = knobs.groups == "tiles", knobs.cluster_m * knobs.cluster_n > 1
    barrier = np.where(turns, 0.0, _BARRIER_CYCLES)  # the other group fills it
    wait = np.where(far, np.where(turns, _FAR_APART, _FAR), 1.0)
    busy = np.maximum(mma_cycles(knobs, sizes), load_cycles(knobs, sizes))
    return (np.maximum(busy, _LOAD_CYCLES / knobs.stages) + barrier) * wait


def ceil(extent: Any, step: Any) -> Any:
    """Return how many steps cover an extent."""
    return -(-extent // step)

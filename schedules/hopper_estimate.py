"""How long settings of the Hopper GEMM should take, from counted cycles and bytes.

All is computed on arrays of settings. It picks the defaults and what tuning tries first: it ranks
settings, it does not predict times. The rates are an H200's as this template meets them, fitted to
the shipped tuning records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmcap.schedules.hopper_columns import Columns, Sizes
from tvmcap.schedules.hopper_plan import CLUSTERS, SHARED_BYTES, SM_COUNT
from tvmcap.schedules.skinny_plan import skinny_bytes

#: By CTAs of a cluster: clusters that an H200 was seen to run at once, fewer than GPCs of 16 or 18
#: multiprocessors would, and so fewer than kernels launch (CLUSTERS).
RESIDENT = {1: SM_COUNT, 2: SM_COUNT // 2, 4: 30, 8: 14}

_CYCLES_A_US = 1700.0
_FLOPS_A_CYCLE = 4096.0  # of a multiprocessor, dense, 16 bits
_NARROW = 34.0  # columns of an instruction that double its cycles
_STEP_CYCLES = 82.0  # of a k step, beside its products,
_DRAIN_CYCLES = 114.0  # and more where the tensor cores drain as no other warp group has work
_LOAD_BYTES_A_CYCLE = 60.6  # that each multiprocessor takes in when all load,
_ALONE_BYTES_A_CYCLE = 123.0  # and that one takes in at most
_UNALIGNED = 0.46  # of that it reads itself, where rows start between lines of 128 bytes
_ACROSS = 0.057  # longer a k step, where the CTAs of a cluster share rows
_LOAD_CYCLES = 973.0  # from TMA's issue to the arrival of the data
_START_CYCLES = 1970.0  # of a CTA, until its first data has come
_MEET_CYCLES = 1360.0  # and more until the CTAs of a cluster have met
_ELEMENT_CYCLES = 12.8  # of a scheduler, for 32 elements of the epilogue
_SUM_CYCLES = 1850.0  # until the partial sums of a cluster have met, and the bytes that a warp
_SUM_BYTES_A_CYCLE = 18.0  # group sends a cycle
_HBM_BYTES_A_US = 4.44e6
_AGAIN = 0.218  # of the time to read w from HBM, where a further row of tiles reads it too
_LAUNCH_US = 0.97  # before a kernel's first CTA starts
_UNUSUAL = 0.01  # longer for each knob whose value seldom is best, and which is not counted

_SKINNY_STEP_CYCLES = 144.0  # of a k step, beside its products
_SKINNY_SUM_US = 1.18  # until the partial sums of a cluster have met
_SKINNY_END_US = 0.41  # of the epilogue of 1024 elements
_QUEUED_US = 0.196  # for each further CTA that a multiprocessor gets
_RING_US = 6.5e-6  # for each byte that a multiprocessor asks for at once
_UNEVEN = 0.103  # longer where CTAs that start early crowd some multiprocessors


def estimate_us(sizes: Sizes, knobs: Columns) -> Any:
    """Estimate the microseconds of settings, an array of float64."""
    us = np.empty(len(knobs.bm))
    us[knobs.swapped] = _skinny_us(knobs.take(knobs.swapped), sizes)
    us[~knobs.swapped] = _tiled_us(knobs.take(~knobs.swapped), sizes)
    return us


def _tiled_us(knobs: Columns, sizes: Sizes) -> Any:
    turns, walked = knobs.groups == "tiles", _walked(knobs)
    waves = _waves(knobs, sizes)
    loop = ceil(ceil(sizes.k, knobs.bk), knobs.split) * step_cycles(knobs, sizes)
    # 128 threads of a group on its own, or 256 that share: elements a scheduler gets
    epilogue = knobs.bm * knobs.bn / 128 * _ELEMENT_CYCLES
    alone = knobs.cluster_m * knobs.cluster_n == 1
    start = _START_CYCLES + np.where(alone, 0.0, _MEET_CYCLES)
    # warp groups that take turns hide all epilogues but the last
    hidden = turns & walked
    body = np.where(hidden, np.maximum(waves * loop, (waves - 1) * epilogue), waves * loop)
    ends = np.where(hidden, epilogue, waves * (epilogue + _sum(knobs)))
    rest = np.where(walked, start, waves * start) + ends
    again = np.where(ceil(sizes.rows, knobs.bm * knobs.cluster_m) > 1, _AGAIN, 0.0)
    read = _moved(sizes, again) / _HBM_BYTES_A_US
    us = _LAUNCH_US + rest / _CYCLES_A_US + np.hypot(read, body / _CYCLES_A_US)
    unusual = (knobs.group != 8).astype(np.int64) + (knobs.late != turns) + ~knobs.persistent
    return us * (1.0 + _UNUSUAL * unusual)


def _skinny_us(knobs: Columns, sizes: Sizes) -> Any:
    """Microseconds of few rows: all is the stream of w from HBM, and how CTAs are spread."""
    row_tiles = ceil(sizes.rows, knobs.bn)
    ctas = ceil(sizes.n, knobs.bm) * row_tiles * knobs.split
    resident = SHARED_BYTES // (skinny_bytes(None, knobs) + 1024)
    waves, each = ceil(ctas, resident * SM_COUNT), ceil(ctas, SM_COUNT)
    steps = ceil(ceil(sizes.k, knobs.bk), knobs.split)
    busy = _SKINNY_STEP_CYCLES + 2.0 * knobs.bm * knobs.bn * knobs.bk / _FLOPS_A_CYCLE
    body = waves * steps * np.maximum(busy, (_LOAD_CYCLES + busy) / knobs.stages) / _CYCLES_A_US
    read = _moved(sizes, _AGAIN * (row_tiles - 1)) / _HBM_BYTES_A_US
    stream = np.hypot(read, body)
    # a dependent kernel's CTAs take the places that the kernel before it leaves
    spread = (ctas <= SM_COUNT // 2) | ((ctas <= SM_COUNT) & (resident > 1))
    spread = spread | (ctas > 0.95 * SM_COUNT * each)
    stream = stream * np.where(knobs.dependent & ~spread, 1.0 + _UNEVEN, 1.0)
    stage = 2.0 * (knobs.bm + knobs.bn) * knobs.bk
    ring = np.minimum(knobs.stages, steps) * np.minimum(each, resident) * stage
    ends = np.where(knobs.split > 1, _SKINNY_SUM_US, 0.0)
    ends = ends + _SKINNY_END_US * knobs.bm * knobs.bn / 1024
    us = _LAUNCH_US + stream + waves * ends
    return us + _RING_US * ring + _QUEUED_US * (each - 1)


def _moved(sizes: Sizes, again: Any) -> Any:
    """Bytes between HBM and the L2 cache, w counted ``again`` more."""
    operands = sizes.item * sizes.k * (sizes.rows + sizes.n * (1.0 + again))
    return sizes.batch * (operands + 2.0 * sizes.rows * sizes.n)


def _walked(knobs: Columns) -> Any:
    """Whether CTAs walk over tiles; else each has one, as all do that share K."""
    return knobs.persistent & (knobs.split == 1)


def _waves(knobs: Columns, sizes: Sizes) -> Any:
    """Tiles that follow each other on the busiest multiprocessor."""
    size, tiles = knobs.cluster_m * knobs.cluster_n * knobs.split, tiles_of_clusters(knobs, sizes)
    launched, fit = _LAUNCHED[size], _RESIDENT[size]
    # of the clusters launched to walk, those that do not fit start when the first have ended
    behind = ceil(np.maximum(tiles - fit, 0), launched)
    late = np.where((behind > 0) & (fit < launched), np.maximum(tiles // launched, 1) + behind, 0)
    return np.where(_walked(knobs), np.maximum(ceil(tiles, launched), late), ceil(tiles, fit))


def at_once(knobs: Columns) -> Any:
    """CTAs that run at once, in clusters as the settings have them, one a multiprocessor."""
    size = knobs.cluster_m * knobs.cluster_n * knobs.split
    return size * _RESIDENT[size]


def tiles_of_clusters(knobs: Columns, sizes: Sizes) -> Any:
    """Tiles of a whole cluster, of all products."""
    high = ceil(sizes.rows, knobs.bm * knobs.cluster_m)
    return sizes.batch * high * ceil(sizes.n, knobs.bn * knobs.cluster_n)


def _sum(knobs: Columns) -> Any:
    """Cycles until the partial sums of a cluster have met, each CTA sending what others own."""
    sent = 4.0 * knobs.bm * knobs.bn * (knobs.split - 1) / knobs.split
    senders = np.where(knobs.groups == "tiles", 1.0, 2.0)  # warp groups
    return np.where(knobs.split > 1, _SUM_CYCLES + sent / senders / _SUM_BYTES_A_CYCLE, 0.0)


def mma_cycles(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of the tensor cores in a k step."""
    width = np.where(knobs.groups == "columns", knobs.bn / 2, knobs.bn)
    mma = 2.0 * knobs.bm * knobs.bn * knobs.bk * (sizes.item / 2) / _FLOPS_A_CYCLE
    return mma * (1.0 + (_NARROW / width) ** 2)  # wgmma reads its operands from shared memory


def load_cycles(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of the loads of a k step: what a CTA takes in, what it reads of that."""
    lines = (sizes.n * sizes.item % 128 == 0) & (sizes.k * sizes.item % 128 == 0)
    read = (knobs.bm / knobs.cluster_n + knobs.bn / knobs.cluster_m) * knobs.bk * sizes.item
    read = read / np.where(lines, 1.0, _UNALIGNED)
    size = knobs.cluster_m * knobs.cluster_n * knobs.split
    active = np.minimum(tiles_of_clusters(knobs, sizes) * size, at_once(knobs))
    rate = np.minimum(_LOAD_BYTES_A_CYCLE * SM_COUNT / active, _ALONE_BYTES_A_CYCLE)
    return np.maximum(_stage_bytes(knobs, sizes), read) / rate


def _stage_bytes(knobs: Columns, sizes: Sizes) -> Any:
    return (knobs.bm + knobs.bn) * knobs.bk * sizes.item


def step_cycles(knobs: Columns, sizes: Sizes) -> Any:
    """Cycles of a k step: the products, the loads, or what the ring's depth allows."""
    drained = np.where((knobs.groups == "tiles") & ~knobs.late, _DRAIN_CYCLES, 0.0)
    busy = mma_cycles(knobs, sizes) + _STEP_CYCLES + drained
    loads = load_cycles(knobs, sizes)
    # a stage is filled, then read, and freed a step late where ``late``
    ring = (_LOAD_CYCLES + loads + busy * (1 + knobs.late)) / knobs.stages
    step = np.maximum(np.maximum(busy, loads), ring)
    return step * np.where(knobs.cluster_n > 1, 1.0 + _ACROSS, 1.0)


def ceil(extent: Any, step: Any) -> Any:
    """Return how many steps cover an extent."""
    return -(-extent // step)


def _by_size(clusters: dict[int, int]) -> Any:
    return np.array([clusters.get(size, 1) for size in range(max(clusters) + 1)])


_LAUNCHED, _RESIDENT = _by_size(CLUSTERS), _by_size(RESIDENT)

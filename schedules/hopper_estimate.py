"""How long a setting of the Hopper GEMM should take, from counted cycles and bytes.

It picks the defaults and what tuning tries first: it ranks settings, it does not predict times. The
rates are an H200's as this template meets them.
"""

from __future__ import annotations

from typing import Any

from tvmcap.schedules.hopper_plan import CLUSTERS, OPERANDS, SHARED_BYTES, SM_COUNT
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


def estimate_us(gemm: Any, knobs: Any, sizes: tuple[int, int, int, int]) -> float:
    """Estimate the microseconds of a setting; ``sizes`` are rows, columns, K and batch."""
    rows, columns, k, batch = sizes
    item = OPERANDS[str(gemm.a.dtype)][1]
    floor = batch * (item * k * (rows + columns) + 2 * rows * columns) / _HBM_BYTES_A_US
    if knobs.swapped:
        shared = skinny_bytes(gemm, knobs)
        return float(_SKINNY_US + _skinny_us(knobs, sizes, shared, floor))
    us = _LAUNCH_US + max(floor, _busiest(knobs, sizes, item) / _CYCLES_A_US)
    # what is not counted: usual values first, so that a short list holds different tiles
    unusual = (knobs.group != 8) + (knobs.late != (knobs.groups == "tiles"))
    unusual += (knobs.bk > max(64, 128 // item)) + (not knobs.persistent)
    return float(us * (1.0 + _UNUSUAL * unusual))


def _skinny_us(knobs: Any, sizes: tuple[int, int, int, int], shared: int, floor: float) -> Any:
    """Microseconds of few rows: w comes from HBM once, x from the L2 cache for every tile."""
    rows, columns, k, _ = sizes
    row_tiles = _ceil(rows, knobs.bn)
    ctas = _ceil(columns, knobs.bm) * row_tiles * knobs.split
    resident = SHARED_BYTES // (shared + 1024)
    flight = min(_ceil(ctas, SM_COUNT), resident) * knobs.stages * knobs.bm * knobs.bk * 2
    starved = max(1.0, _FLIGHT_BYTES / flight)
    traffic = 2.0 * ctas / knobs.split * k * (knobs.bm + knobs.bn)
    cached = traffic / (_L2_BYTES_A_CYCLE * SM_COUNT * _CYCLES_A_US)
    waves = ctas / (resident * SM_COUNT)
    alone = 0.03 if resident == 1 and ctas > SM_COUNT else 0.0
    late = 0.0 if knobs.dependent == (ctas <= SM_COUNT and knobs.bn > 8) else 0.05
    factor = 1.0 + 0.2 * (row_tiles - 1) + 0.05 * max(waves - 1.0, 0.0) + alone + late
    sums = 0.4 * knobs.split if knobs.split > 1 else 0.0
    return max(_SKINNY_HBM * floor * starved, cached) * factor + sums


def _busiest(knobs: Any, sizes: tuple[int, int, int, int], item: int) -> Any:
    """Cycles of the multiprocessor with the most tiles."""
    rows, columns, k, batch = sizes
    cluster = knobs.cluster_m * knobs.cluster_n * knobs.split
    tiles = _ceil(rows, knobs.bm * knobs.cluster_m) * _ceil(columns, knobs.bn * knobs.cluster_n)
    waves = _ceil(batch * tiles, CLUSTERS[cluster])
    active = min(batch * tiles, CLUSTERS[cluster]) * cluster
    steps = _ceil(_ceil(k, knobs.bk), knobs.split)
    step = _step(knobs, (columns, k), item, active)
    alone = knobs.groups == "tiles"
    # 128 threads of a group on its own, or 256 that share: elements a scheduler gets
    epilogue = knobs.bm * knobs.bn / 128 * _ELEMENT_CYCLES
    fixed = _LOAD_CYCLES + (_sum(knobs) if knobs.split > 1 else 0.0)
    if knobs.split > 1:  # one tile a CTA
        return waves * (fixed + steps * step + epilogue)
    if alone:
        return fixed + max(waves * steps * step, (waves - 1) * epilogue) + _TAIL * epilogue
    return fixed + waves * (steps * step + epilogue)


def _sum(knobs: Any) -> Any:
    """Cycles until the partial sums of a cluster have met, each CTA sending what others own."""
    sent = 4.0 * knobs.bm * knobs.bn * (knobs.split - 1) / knobs.split
    return _SUM_CYCLES + sent / _SUM_BYTES_A_CYCLE


def _step(knobs: Any, pitches: tuple[int, int], item: int, active: int) -> float:
    """Cycles of a k step: the tensor cores, the loads, or their latency over the ring."""
    width = knobs.bn / 2 if knobs.groups == "columns" else knobs.bn
    mma = 2.0 * knobs.bm * knobs.bn * knobs.bk * (item / 2) / _FLOPS_A_CYCLE
    mma *= 1.0 + (_NARROW / width) ** 2  # wgmma reads its operands from shared memory
    rate = min(_L2_BYTES_A_CYCLE * SM_COUNT / active, _ALONE_BYTES_A_CYCLE)
    rate *= 1.0 if all(pitch * item % 128 == 0 for pitch in pitches) else _UNALIGNED
    loaded = (knobs.bm / knobs.cluster_n + knobs.bn / knobs.cluster_m) * knobs.bk * item
    far = knobs.cluster_m * knobs.cluster_n > 1
    latency = _LOAD_CYCLES / knobs.stages
    barrier = 0.0 if knobs.groups == "tiles" else _BARRIER_CYCLES  # the other group fills it
    wait = 1.0 if not far else _FAR_APART if knobs.groups == "tiles" else _FAR
    return float(max(mma, loaded / rate, latency) + barrier) * wait


def _ceil(extent: int, step: int) -> int:
    return -(-extent // step)

"""The loops around a kernel's main block, by band: what decides how fast a CPU or GPU runs it.

The main block is the one that runs most often, a sum where there is one. From the inside out its
loops are a tile of spatial loops, a band of loops that sum, a tile, a band of sums, and what is
outside. The innermost tile is what registers hold, the next what the first cache does, and so on
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from tvmcap.kernel import loop_estimate
from tvmcap.kernel.cost_model import PRIOR
from tvmcap.kernel.loop_blocks import Block, Loop, blocks, total, unroll_step, unrolled
from tvmcap.kernel.loop_body import traffic

_BANDS = 5  # tile, sums, tile, sums, outside
_REGIONS = ("body", "tile", "sums", "tiles")
_KINDS = ("contiguous", "same", "apart")
_NONE = 1e-4
NAMES = (
    PRIOR,
    *loop_estimate.NAMES,
    *(f"log_band_{i}" for i in range(_BANDS)),
    "log_main_parallel",
    "lanes",
    "lane_use",
    "accumulators",
    "log_accumulators",
    "log_tile_of_both",
    "unroll_step",
    "log_unrolled_body",
    "tile_is_unrolled",
    "sums_are_unrolled",
    *(f"loads_{kind}" for kind in _KINDS),
    "stores_contiguous",
    "log_rest",
    "rest_sums",
    *(f"rest_loads_{kind}" for kind in _KINDS),
    "rest_stores_contiguous",
    *(f"log_bytes_{i}" for i in range(1, _BANDS + 1)),
    *(f"log_reuse_{i}" for i in range(1, _BANDS + 1)),
    *(f"log_loads_{region}" for region in _REGIONS),
    *(f"log_registers_{region}" for region in _REGIONS),
    "log_other_sums",
    "log_other_starts",
    "log_other_work",
    "log_other_slow",
    "log_shared",
    "log_inside",
)


def bands(func: Any, lanes: int, cores: int = 1) -> dict[str, float]:
    """Return ``NAMES`` of a function.

    ``lanes`` is how many elements a vector register holds, ``cores`` how many threads may run.
    """
    found = blocks(func.body)
    if not found:
        return dict.fromkeys(NAMES, 0.0)
    main = max(found, key=lambda block: (block.sums, block.runs))
    split = _split(main.loops, main.summed)
    return {
        **loop_estimate.estimate(found, main, lanes, cores),
        **_vectors(main, split, lanes),
        **_moves(main, main.moving(main.vector), ""),
        **_rest(main),
        **_footprints(main, split),
        **_code(main, split, lanes),
        **_others(found, main, lanes, cores),
        **_use(found, main),
    }


def _log(value: float) -> float:
    return math.log2(1 + value)


def _split(loops: Sequence[Loop], summed: frozenset[str]) -> list[list[Loop]]:
    """Return the loops by band, innermost first; loops of one iteration belong anywhere."""
    found: list[list[Loop]] = [[] for _ in range(_BANDS)]
    at = 0
    for loop in reversed(loops):
        if loop.extent > 1 and at < _BANDS - 1 and (loop.name in summed) != at % 2:
            at += 1
        found[at].append(loop)
    return found


def _vectors(main: Block, split: Sequence[Sequence[Loop]], lanes: int) -> dict[str, float]:
    """Describe the bands, the vectors, what they sum into and what TVM unrolls."""
    sizes = [total(band) for band in split]
    width, step = main.width, unroll_step(main.loops)
    tile, registers = sizes[0] / width, sizes[0] * main.each(lanes)
    return {
        **{f"log_band_{i}": _log(size) for i, size in enumerate(sizes)},
        "log_main_parallel": _log(main.parallel),
        "lanes": width / lanes,
        "lane_use": 1 / (main.each(lanes) * lanes),
        "accumulators": registers,
        "log_accumulators": _log(registers),
        "log_tile_of_both": _log(registers * sizes[2]),
        "unroll_step": step,
        "log_unrolled_body": _log(total(unrolled(main.loops)) / width),
        "tile_is_unrolled": float(tile <= step),
        "sums_are_unrolled": float(tile * sizes[1] <= step),
    }


def _moves(main: Block, moving: Collection[str], prefix: str) -> dict[str, float]:
    """Count how reads and the write move with a loop: next to each other, not at all, apart."""
    kinds, stores = dict.fromkeys(_KINDS, 0.0), 0.0
    for access in main.accesses:
        kind = access.kind(moving)
        if access.written:
            stores += kind == "contiguous"
        else:
            kinds[kind] += 1
    loads = {f"{prefix}loads_{kind}": count for kind, count in kinds.items()}
    return {**loads, f"{prefix}stores_contiguous": stores}


def _rest(main: Block) -> dict[str, float]:
    """Describe the innermost loop that is not unrolled: LLVM may make a vector of it."""
    rest = main.rest
    return {
        "log_rest": _log(1 if rest is None else rest.extent),
        "rest_sums": float(rest is not None and rest.name in main.summed),
        **_moves(main, main.moving(rest), "rest_"),
    }


def _footprints(main: Block, split: Sequence[Sequence[Loop]]) -> dict[str, float]:
    """Return the bytes that the loops up to each band touch, and how often they use each."""
    found, loops = dict[str, float](), list[Loop]()
    for i, band in enumerate(split, 1):
        loops += band
        sizes = main.sizes(loops)
        touched = sum(access.touched(sizes) for access in main.accesses)
        runs = total(loops)
        found[f"log_bytes_{i}"], found[f"log_reuse_{i}"] = _log(touched), _log(runs / touched)
    return found


def _code(main: Block, split: Sequence[Sequence[Loop]], lanes: int) -> dict[str, float]:
    """Return loads for each operation, and registers, of what is unrolled and of the bands."""
    inner = [loop for band in split[:2] for loop in band]
    regions = (unrolled(main.loops), split[0], inner, [*inner, *split[2]])
    moving, each, found = main.moving(main.vector), main.each(lanes), dict[str, float]()
    for name, loops in zip(_REGIONS, regions, strict=True):
        sizes = main.sizes([*loops, *main.loops[-1:]])
        moved, held = traffic(main.accesses, moving, sizes, each)
        runs = total(loops)
        found[f"log_loads_{name}"] = math.log2(moved / (runs * each))
        found[f"log_registers_{name}"] = _log(held)
    return found


def _others(found: Sequence[Block], main: Block, lanes: int, cores: int) -> dict[str, float]:
    """Return the work of the other blocks over the main one's."""
    shares = dict.fromkeys(("sums", "starts", "work", "slow"), _NONE)
    written = {region.source for region in main.realize.block.writes}
    for other in found:
        if other is main:
            continue
        starts = any(region.source in written for region in other.realize.block.writes)
        share = other.steps(lanes, cores) / main.steps(lanes, cores)
        shares["sums" if other.sums else "starts" if starts else "work"] += share
        shares["slow"] += share if other.width == 1 else 0.0
    return {f"log_other_{name}": math.log2(share) for name, share in shares.items()}


def _use(found: Sequence[Block], main: Block) -> dict[str, float]:
    """Return how many iterations of the main block's loops share those of what reads it."""
    written = {region.source for region in main.realize.block.writes}
    shared = len(main.loops)
    for other in found:
        reads = any(region.source in written for region in other.realize.block.reads)
        if other is not main and reads:
            pairs = zip(main.loops, other.loops, strict=False)
            shared = min(shared, sum(a is b for a, b in pairs))
    outside = total(main.loops[:shared])
    return {"log_shared": _log(outside), "log_inside": _log(main.runs / outside)}

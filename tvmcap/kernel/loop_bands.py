"""The loops around a kernel's main block, by band: what decides how fast a CPU or GPU runs it.

The main block is the one that runs most often, a sum where there is one. From the inside out its
loops are a tile of spatial loops, a band of loops that sum, a tile, a band of sums, and what is
outside. The innermost tile is what registers hold, the next what the first cache does, and so on
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

_BANDS = 5  # tile, sums, tile, sums, outside
NAMES = (
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
    "loads_contiguous",
    "loads_same",
    "loads_apart",
    "stores_contiguous",
    *(f"log_bytes_{i}" for i in range(1, _BANDS + 1)),
    *(f"log_reuse_{i}" for i in range(1, _BANDS + 1)),
)
_PARALLEL, _VECTOR = 1, 2
_REDUCTION = 2
_STEP = "pragma_auto_unroll_max_step"


@dataclass(eq=False)
class _Main:
    """A block with the loops around it, outermost first."""

    realize: Any
    loops: list[Any]
    runs: int
    sums: bool


@dataclass(eq=False)
class _Search:
    """The best main block so far, and the annotation of unrolling that holds where it is."""

    best: _Main | None = None
    loops: list[Any] = field(default_factory=list)

    def see(self, node: Any) -> None:
        """Go through statements."""
        if isinstance(node, tirx.For):
            self.loops.append(node)
            self.see(node.body)
            self.loops.pop()
        elif isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                self.see(part)
        elif isinstance(node, tvm.s_tir.SBlockRealize):
            self._block(node)

    def _block(self, realize: Any) -> None:
        block = realize.block
        if not len(block.iter_vars):  # the root, or a block of blocks
            self.see(block.body)
            return
        runs = math.prod(map(_extent, self.loops))
        sums = any(int(v.iter_type) == _REDUCTION for v in block.iter_vars)
        found = _Main(realize, list(self.loops), runs, sums)
        if self.best is None or (sums, runs) > (self.best.sums, self.best.runs):
            self.best = found


def bands(func: Any, lanes: int) -> dict[str, float]:
    """Return ``NAMES`` of a function; ``lanes`` is how many elements a vector register holds."""
    search = _Search()
    search.see(func.body)
    if search.best is None:
        return dict.fromkeys(NAMES, 0.0)
    main = search.best
    block = main.realize.block
    uses = [_variables(value) for value in main.realize.iter_values]
    summed = set[str]()
    for var, used in zip(block.iter_vars, uses, strict=True):
        if int(var.iter_type) == _REDUCTION:
            summed |= used
    split = _split(main.loops, summed)
    extents = {loop.loop_var.name: _extent(loop) for loop in main.loops}
    sizes = [math.prod(map(_extent, band)) for band in split]
    vector = next((loop for loop in main.loops if int(loop.kind) == _VECTOR), None)
    width = 1 if vector is None else _extent(vector)
    registers = sizes[0] / width * -(-width // lanes)
    parallel = [_extent(loop) for loop in main.loops if int(loop.kind) == _PARALLEL]
    step = _step(main.loops)
    body = _unrolled(main.loops, step)
    found: dict[str, float] = {f"log_band_{i}": _log(size) for i, size in enumerate(sizes)}
    found |= {
        "log_main_parallel": _log(math.prod(parallel)),
        "lanes": width / lanes,
        "lane_use": width / (-(-width // lanes) * lanes),
        "accumulators": registers,
        "log_accumulators": _log(registers),
        "log_tile_of_both": _log(registers * sizes[2]),
        "unroll_step": step,
        "log_unrolled_body": _log(body),
        "tile_is_unrolled": float(sizes[0] / width <= step),
        "sums_are_unrolled": float(sizes[0] / width * sizes[1] <= step),
    }
    name = "" if vector is None else vector.loop_var.name
    inside = {v.var.name: used for v, used in zip(block.iter_vars, uses, strict=True)}
    found |= _accesses(block, inside, name)
    return found | _footprints(block, inside, split, extents)


def _extent(loop: Any) -> int:
    return int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else 1


def _log(value: float) -> float:
    return math.log2(1 + value)


def _variables(expression: Any) -> set[str]:
    found: set[str] = set()
    tvm_ffi.structural_walk(expression, (tirx.Var, lambda var: found.add(var.name)))
    return found


def _split(loops: Sequence[Any], summed: set[str]) -> list[list[Any]]:
    """Return the loops by band, innermost first; loops of one iteration belong anywhere."""
    found: list[list[Any]] = [[] for _ in range(_BANDS)]
    at = 0
    for loop in reversed(loops):
        if _extent(loop) > 1 and at < _BANDS - 1 and (loop.loop_var.name in summed) != at % 2:
            at += 1
        found[at].append(loop)
    return found


def _step(loops: Iterable[Any]) -> int:
    """Return the steps that TVM may unroll to, as annotated on a loop."""
    return max((int(a[_STEP]) for loop in loops if _STEP in (a := loop.annotations)), default=0)


def _unrolled(loops: Sequence[Any], step: int) -> int:
    """Return the size of the body after TVM's unrolling, from the inside out."""
    body = 1
    for loop in reversed(loops):
        if int(loop.kind) == _VECTOR:
            continue
        if int(loop.kind) == _PARALLEL or body * _extent(loop) > step:
            break
        body *= _extent(loop)
    return body


def _accesses(block: Any, inside: Mapping[str, set[str]], vector: str) -> dict[str, float]:
    """Count how reads and the write move with the vector: next to each other, not at all, apart."""
    kinds = {"contiguous": 0, "same": 0, "apart": 0}
    moving = {name for name, used in inside.items() if vector in used}
    for region in block.reads:
        kinds[_kind(region, moving)] += 1
    stores = sum(_kind(region, moving) == "contiguous" for region in block.writes)
    return {**{f"loads_{k}": float(n) for k, n in kinds.items()}, "stores_contiguous": stores}


def _kind(region: Any, moving: set[str]) -> str:
    dims = [bool(_variables(r.min) & moving) for r in region.region]
    if not any(dims):
        return "same"
    return "contiguous" if dims[-1] and not any(dims[:-1]) else "apart"


def _footprints(
    block: Any,
    inside: Mapping[str, set[str]],
    split: Sequence[Sequence[Any]],
    extents: Mapping[str, int],
) -> dict[str, float]:
    """Return the bytes that the loops up to each band touch, and how often they use each."""
    buffers = {str(r.source.name): r for r in (*block.reads, *block.writes)}
    dims = [
        (int(tvm.DataType(str(r.source.dtype)).itemsize), [_variables(d.min) for d in r.region])
        for r in buffers.values()
    ]
    found, names, runs = dict[str, float](), set[str](), 1
    for i, band in enumerate(split, 1):
        names |= {loop.loop_var.name for loop in band}
        runs *= math.prod(map(_extent, band))
        sizes = {
            iterator: math.prod(extents[name] for name in used & names)
            for iterator, used in inside.items()
        }
        touched = sum(
            itemsize * math.prod(1 + sum(sizes.get(v, 1) - 1 for v in used) for used in indices)
            for itemsize, indices in dims
        )
        found[f"log_bytes_{i}"], found[f"log_reuse_{i}"] = _log(touched), _log(runs / touched)
    return found

"""The machine code that a loop nest becomes: loads and stores for each multiply-add, by region.

A region is some of the innermost loops around a block, up to those that TVM unrolls. What a region
reads and writes more than once stays in registers as far as they suffice, so each distinct element
counts once; where lanes of a vector are next to each other in memory, a register of them does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

_LINE = 64  # bytes that a processor fetches at once


@dataclass(frozen=True)
class Access:
    """How a block reads or writes a buffer.

    Attributes
    ----------
    itemsize: bytes of an element.
    dims: for each dimension, the names of the block's iterators that its index has.
    scaled: those that the last index has a multiple of.
    written: whether it is what the block writes.
    """

    itemsize: int
    dims: tuple[frozenset[str], ...]
    scaled: frozenset[str]
    written: bool

    def kind(self, moving: Collection[str]) -> str:
        """Say how it moves with iterators: ``"contiguous"``, ``"same"`` or ``"apart"``."""
        moved = [not names.isdisjoint(moving) for names in self.dims]
        if not any(moved):
            return "same"
        near = moved[-1] and not any(moved[:-1]) and self.scaled.isdisjoint(moving)
        return "contiguous" if near else "apart"

    def elements(self, sizes: Mapping[str, int]) -> int:
        """Return how many distinct elements iterators of given extents touch."""
        return math.prod(_spread(names, sizes) for names in self.dims)

    def touched(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the cache lines of those elements."""
        if not self.dims:
            return _LINE
        rows = math.prod(_spread(names, sizes) for names in self.dims[:-1])
        return rows * -(-_spread(self.dims[-1], sizes) * self.itemsize // _LINE) * _LINE


def _spread(names: Collection[str], sizes: Mapping[str, int]) -> int:
    spread = 1
    for name in names:
        spread += sizes.get(name, 1) - 1
    return spread


def accesses(block: Any) -> list[Access]:
    """Return the accesses of a block, one a buffer."""
    found: dict[str, Access] = {}
    for regions, written in ((block.reads, False), (block.writes, True)):
        for region in regions:
            source = region.source
            itemsize = int(tvm.DataType(str(source.dtype)).itemsize)
            dims = tuple(variables(d.min) for d in region.region)
            scaled = _scaled(region.region[-1].min) if dims else frozenset[str]()
            found[str(source.name)] = Access(itemsize, dims, scaled, written)
    return list(found.values())


def _scaled(index: Any) -> frozenset[str]:
    """Return the variables that an index has a multiple of."""
    if isinstance(index, tirx.Var):
        return frozenset()
    products: list[Any] = []
    tvm_ffi.structural_walk(index, (tirx.Mul, products.append))
    return frozenset[str]().union(*map(variables, products))


def variables(expression: Any) -> frozenset[str]:
    """Return the names of an expression's variables."""
    if isinstance(expression, tirx.Var):
        return frozenset((expression.name,))
    found: set[str] = set()
    tvm_ffi.structural_walk(expression, (tirx.Var, lambda var: found.add(var.name)))
    return frozenset(found)


def traffic(
    found: Sequence[Access], moving: Collection[str], sizes: Mapping[str, int], each: float
) -> tuple[float, float]:
    """Return the loads and stores of a region, and the registers that it keeps in use.

    Parameters
    ----------
    moving: iterators that move with the vector.
    sizes: extents of the block's iterators inside the region.
    each: registers for each lane of the vector.
    """
    total = held = 0.0
    for access in found:
        near = access.kind(moving) == "contiguous"
        count = access.elements(sizes) * (each if near else 1.0)
        total += count * (2 if access.written else 1)
        held += count if near else 0.0
    return total, held


def fetched(
    found: Sequence[Access],
    inside: Mapping[str, frozenset[str]],
    loops: Sequence[tuple[str, int]],
    capacity: int,
) -> float:
    """Return the bytes that come into a cache of ``capacity`` bytes.

    The largest region that fits is fetched for each of its runs, but a buffer only where a loop
    around the region moves to another part of it.

    Parameters
    ----------
    inside: by iterator of the block, the loops that it depends on.
    loops: (name, extent) of those around the block, innermost first.
    """
    fits, outside = dict.fromkeys(inside, 1), list(loops)
    for i, (name, count) in enumerate(loops):
        grown = {it: n * count if name in inside[it] else n for it, n in fits.items()}
        if count > 1 and sum(access.touched(grown) for access in found) > capacity:
            break
        fits, outside = grown, list(loops[i + 1 :])
    total = 0.0
    for access in found:
        used = frozenset[str]().union(*(inside[it] for names in access.dims for it in names))
        around, moved = 1, False
        for name, count in outside:
            moved = moved or (count > 1 and name in used)
            around *= count if moved else 1
        total += access.touched(fits) * around
    return total

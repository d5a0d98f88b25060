"""Storage: which intermediates share memory, and how much of it there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx


@dataclass
class Slot:
    """One intermediate of ``size`` x the product of ``unit`` bytes.

    It is alive from binding ``start`` to binding ``end``.
    """

    size: int
    unit: tuple[Any, ...]
    start: int
    end: int
    storage: int = 0


@dataclass
class Storage:
    """One allocation, the size of its largest slot, that slots of one factor share in turn."""

    size: int
    unit: tuple[Any, ...]
    slots: list[Slot]

    def takes(self, slot: Slot) -> bool:
        """Whether a slot grows with the same factor and is never alive beside one of these."""
        return unit_text(self.unit) == unit_text(slot.unit) and all(
            s.end < slot.start or slot.end < s.start for s in self.slots
        )

    def allocation(self) -> Any:
        """Return the Relax call that allocates it."""
        total = tirx.IntImm("int64", self.size)
        for factor in self.unit:
            total = total * factor
        return relax.op.memory.alloc_storage(relax.ShapeExpr([total]), 0, "global", "uint8")


def assign(slots: Sequence[Slot]) -> list[Storage]:
    """Share storage greedily, largest slot first.

    "Greedy by size" of Pisarchyk and Lee, arXiv 2001.03288. Tensors start at offset 0 of their
    storage: TVM's kernels refuse another one.
    """
    storages: list[Storage] = []
    for slot in sorted(slots, key=lambda s: (-s.size, s.start)):
        slot.storage = next((i for i, s in enumerate(storages) if s.takes(slot)), len(storages))
        if slot.storage == len(storages):
            storages.append(Storage(slot.size, slot.unit, []))
        storages[slot.storage].slots.append(slot)
    return storages


def unit_text(unit: tuple[Any, ...]) -> str:
    """Write symbolic factors as a size expression; "" where there are none."""
    return " * ".join(f"({size_text(factor)})" for factor in unit)


_SIGNS = {tirx.Add: "+", tirx.Sub: "-", tirx.Mul: "*", tirx.FloorDiv: "//", tirx.FloorMod: "%"}


def size_text(expr: Any) -> str:
    """Write an extent by its dimensions' names; TVM's printer renames those called T, R or I."""
    if isinstance(expr, tirx.Var | tirx.IntImm):
        return str(expr.name if isinstance(expr, tirx.Var) else int(expr))
    if type(expr) in _SIGNS:
        return f"({size_text(expr.a)} {_SIGNS[type(expr)]} {size_text(expr.b)})"
    if isinstance(expr, tirx.Min | tirx.Max):
        return f"{type(expr).__name__.lower()}({size_text(expr.a)}, {size_text(expr.b)})"
    return str(expr)


def split_bytes(shape: Sequence[Any], dtype: str) -> tuple[int, tuple[Any, ...]]:
    """Split a tensor's bytes into a constant and its symbolic factors."""
    size, unit = (tvm.DataType(dtype).bits * tvm.DataType(dtype).lanes + 7) // 8, []
    for extent in shape:
        if isinstance(extent, tirx.Mul) and isinstance(extent.b, tirx.IntImm):
            size *= int(extent.b)
            extent = extent.a
        if isinstance(extent, tirx.IntImm | int):
            size *= int(extent)
        else:
            unit.append(extent)
    return max(size, 1), tuple(sorted(unit, key=str))

"""The axes of a matrix product, read off its reduction block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from tvmcap.kernel import epilogue as ep

_FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")
GROUP = 4
"""Neighbouring steps of K that a packed int8 weight keeps together: what one 32-bit lane holds."""


@dataclass(frozen=True)
class Axes:
    """The axes of a product: C's indices (the columns last), the reduction, and C's extents."""

    spatial: list[Any]
    k: Any
    extents: tuple[Any, ...]

    def left(self, a: Any) -> tuple[str, list[int]] | None:
        """Return A's layout and which of C's leading dimensions it has, or None."""
        *lead, last = a.indices
        if _is(last, self.k):
            return self._leading("mk", lead)
        if lead and _is(lead[-1], self.k):
            found = self._leading("km", [*lead[:-1], last])
            return found if found and len(self.spatial) - 2 in found[1] else None
        return None

    def right(self, b: Any, width: int | None) -> tuple[str, list[int]] | None:
        """Return B's layout and which of C's leading dimensions it has, or None."""
        n = self.spatial[-1]
        if width is not None:
            panel = tirx.IntImm("int64", width)
            packed = [tirx.floordiv(n, panel), self.k, tirx.floormod(n, panel)]
            if _equal(b.indices, packed) and int(b.source.shape[2]) == width:
                return "packed", []
            four = tirx.IntImm("int64", GROUP)
            grouped = [
                tirx.floordiv(n, panel),
                tirx.floordiv(self.k, four),
                tirx.floormod(n, panel),
                tirx.floormod(self.k, four),
            ]
            if _equal(b.indices, grouped) and int(b.source.shape[2]) == width:
                return "grouped", []
        if len(b.indices) < 2:
            return None
        *lead, row, col = b.indices
        if _is(row, self.k) and _is(col, n):
            return self._leading("kn", lead)
        if _is(row, n) and _is(col, self.k):
            return self._leading("nk", lead)
        return None

    def _leading(self, kind: str, lead: Sequence[Any]) -> tuple[str, list[int]] | None:
        """Find which leading dimensions of C the indices are, in C's order; 0 stands for a 1."""
        places, outer = [], self.spatial[:-1]
        for index in lead:
            place = next((i for i, v in enumerate(outer) if _is(index, v)), None)
            if place is None and not (isinstance(index, tirx.IntImm) and index.value == 0):
                return None
            if place is not None:
                places.append(place)
        return (kind, places) if places == sorted(set(places)) else None

    def split(
        self, left: tuple[str, list[int]], right: tuple[str, list[int]]
    ) -> tuple[int, tuple[bool, bool]] | None:
        """Return how many dimensions of C are the batch, and whether A and B have them."""
        real = [i for i, e in enumerate(self.extents[:-1]) if not (isinstance(e, int) and e == 1)]
        in_a, in_b = ([i for i in real if i in side[1]] for side in (left, right))
        batch = in_b if in_b else in_a[:-1] if left[0] == "km" else []
        rows = real[len(batch) :]
        if real[: len(batch)] != batch or any(i not in in_a for i in rows):
            return None
        if left[0] == "km" and len(rows) > 1:
            return None  # rows with steps of K between them
        shared = [i for i in in_a if i in batch]
        if (shared and shared != batch) or (batch and not rows and not shared):
            return None
        if not batch:
            return 0, (True, True)
        return batch[-1] + 1, (bool(shared), bool(in_b))


def factors_of(block: Any) -> tuple[Any, Any] | None:
    """Return the two loads of ``C = C + X * Y``, casts taken off, or None for another reduction.

    Floats and int8 are summed in floats, int8 by int8 or uint8 in int32 too.
    """
    store, init = block.body, block.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(init, tirx.BufferStore):
        return None
    if sum(v.iter_type == tirx.IterVar.CommReduce for v in block.iter_vars) != 1 or not _is_zero(
        init.value
    ):
        return None
    value = store.value
    if not isinstance(value, tirx.Add):
        return None
    for old, term in ((value.a, value.b), (value.b, value.a)):
        if (
            isinstance(old, tvm.ir.TensorLoad)
            and old.source.same_as(store.buffer)
            and isinstance(term, tirx.Mul)
        ):
            x, y = _uncast(term.a), _uncast(term.b)
            if all(isinstance(f, tvm.ir.TensorLoad) for f in (x, y)) and _sums(store, x, y):
                return x, y
    return None


def _sums(store: Any, x: Any, y: Any) -> bool:
    """Whether a sum of products is kept in a dtype that holds it: no int8 that wraps around."""
    operands = {str(f.source.dtype) for f in (x, y)}
    if str(store.buffer.dtype) == "int32":
        return "int8" in operands and operands <= {"int8", "uint8"}
    return str(store.buffer.dtype).startswith(("float", "bfloat")) and operands <= set(_FLOATS)


def _equal(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(ep.same(x, y) for x, y in zip(left, right, strict=True))


def _uncast(expr: Any) -> Any:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _is_zero(expr: Any) -> bool:
    expr = _uncast(expr)
    return isinstance(expr, tirx.FloatImm | tirx.IntImm) and expr.value == 0


def _is(index: Any, var: Any) -> bool:
    return bool(ep.same(index, var))

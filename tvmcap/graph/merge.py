"""Merge parts of main that one kernel can serve though FuseOps keeps them apart.

FuseOps joins an operator with what follows only where one value leaves the group. A product or a
row-wise operator can write several: then an intermediate is not read again by a second kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmcap.graph.columns import sums_rows
from tvmcap.graph.group import Graph, fused

Serves = Callable[[tirx.PrimFunc], bool]
"""Whether one kernel can do what a fused PrimFunc does, several outputs included."""

_INJECTIVE, _OPAQUE = 2, 8  # of the attribute op_pattern


def merge(graph: Graph, parts: Sequence[Sequence[int]], serves: Serves) -> list[list[int]]:
    """Join products with elementwise followers, and sums and row-wise operators with neighbours.

    A joined part stays convex: nothing outside it lies between two of its kernels.
    """
    merger = _Merger(graph, parts, serves)
    for grow in (merger.products, merger.rows, merger.columns):
        for part in sorted(merger.members):
            if part in merger.members:
                grow(part)
    return sorted(merger.members.values())


_Fits = Callable[[int, set[int]], bool]
"""Whether a part, by its first kernel, can join the parts of a set."""


class _Merger:
    """A partition that grows coarser; a part is known by its first kernel."""

    def __init__(self, graph: Graph, parts: Sequence[Sequence[int]], serves: Serves) -> None:
        self.graph, self.serves = graph, serves
        self.members = {min(p): sorted(p) for p in parts}
        self.part_of = {i: p for p, members in self.members.items() for i in members}
        axes = {k.call.args[0]: reduced_axes(graph.func(i)) for i, k in enumerate(graph.kernels)}
        self.kinds = [_Kind(graph, i, *axes[k.call.args[0]]) for i, k in enumerate(graph.kernels)]

    # --- what to join

    def products(self, part: int) -> None:
        """Join a product with the elementwise parts that follow it, of its shape.

        What only those read comes along, but for the product's own operands.
        """
        anchors = [i for i in self.members[part] if self.kinds[i].is_anchor]
        if len(anchors) != 1 or self.kinds[anchors[0]].shape:
            return
        shape = list(self.graph.kernels[anchors[0]].types[0].shape.values)
        index = self.graph.index
        read = {v for v, _ in self.graph.kernels[anchors[0]].reads}
        operands = {self.part_of[index[v]] for v in read if v in index}

        def fits(part: int, joined: set[int]) -> bool:
            own = part not in operands and self._serves_only(part, joined)
            follows = self.sources(part) & joined or own
            return bool(follows) and all(
                self.kinds[i].is_elementwise and self._results_fit(i, shape, len(shape))
                for i in self.members[part]
            )

        self._grow(part, fits)

    def rows(self, part: int) -> None:
        """Join a row-wise operator with elementwise and row-wise parts over the same rows."""
        kinds = [self.kinds[i] for i in self.members[part] if self.kinds[i].is_anchor]
        if not kinds or not all(kind.shape for kind in kinds):
            return
        shape, rows = kinds[0].shape, kinds[0].rows

        def fits(part: int, joined: set[int]) -> bool:
            own = self._serves_only(part, joined) or self._exports_rows(part, shape[:rows])
            return own and all(
                (self.kinds[i].is_elementwise or self.kinds[i].shape)
                and self._results_fit(i, shape, rows)
                for i in self.members[part]
            )

        self._grow(part, fits)

    def columns(self, part: int) -> None:
        """Join a sum over rows with the elementwise parts that it reads, and those that read it.

        What it reads may be needed elsewhere as well: one pass writes it and adds it up.
        """
        anchors = [i for i in self.members[part] if self.kinds[i].is_anchor]
        matrix = self.kinds[anchors[0]].matrix if len(anchors) == 1 else None
        if matrix is None:
            return

        def fits(part: int, joined: set[int]) -> bool:
            assert matrix is not None
            shape = matrix if self.users(part) & joined else matrix[1:]
            return all(
                self.kinds[i].is_elementwise
                and all(_same_all(list(ty.shape.values), shape) for ty in self._types(i))
                for i in self.members[part]
            )

        self._grow(part, fits)

    def _types(self, i: int) -> list[Any]:
        return self.graph.kernels[i].types

    def _results_fit(self, i: int, shape: Sequence[Any], rows: int) -> bool:
        """Whether a kernel's results broadcast to a shape or are one number a row of it."""
        results = [list(ty.shape.values) for ty in self.graph.kernels[i].types]
        return all(_broadcasts(r, shape) or _same_all(r, shape[:rows]) for r in results)

    def _exports_rows(self, part: int, rows: Sequence[Any]) -> bool:
        """Whether each row has its own of every result that leaves a part."""
        types = map(self.graph.type_of, self.graph.exports(self.members[part]))
        return all(_same_all(list(ty.shape.values)[: len(rows)], rows) for ty in types)

    def _serves_only(self, part: int, others: set[int]) -> bool:
        returned = any(self.graph.kernels[i].returned for i in self.members[part])
        return not returned and self.users(part) <= others

    def _grow(self, part: int, fits: _Fits) -> None:
        """Join all that fits at once, or else what a kernel serves, one part after the other."""
        joined = self._reach(part, fits)
        if len(joined) > 1 and self._is_served(joined):
            self._join(joined)
        elif len(joined) > 2:
            refused: set[int] = set()
            while (found := self._next(part, joined - refused)) is not None:
                if self._is_served({part, found}):
                    part = self._join({part, found})
                else:
                    refused.add(found)

    def _reach(self, part: int, fits: _Fits) -> set[int]:
        """All that can be joined to a part through neighbours such that it stays convex."""
        joined = {part}
        while True:
            around = {q for p in joined for q in self._near(p)} - joined
            suits = (q for q in sorted(around) if fits(q, joined) and self._convex(joined | {q}))
            found = next(suits, None)
            if found is None:
                return joined
            joined.add(found)

    def _next(self, part: int, allowed: set[int]) -> int | None:
        around = sorted(self._near(part) & allowed - {part})
        return next((q for q in around if self._convex({part, q})), None)

    def _is_served(self, parts: set[int]) -> bool:
        return self.serves(fused(self.graph, self._kernels(parts)))

    def _join(self, parts: set[int]) -> int:
        members, part = self._kernels(parts), min(parts)
        for p in parts:
            del self.members[p]
        self.members[part] = members
        self.part_of.update(dict.fromkeys(members, part))
        return part

    def _kernels(self, parts: Iterable[int]) -> list[int]:
        return sorted(i for p in parts for i in self.members[p])

    # --- the graph of parts

    def _near(self, part: int) -> set[int]:
        return self.sources(part) | self.users(part)

    def users(self, part: int) -> set[int]:
        """Return the parts that read a result of this one."""
        readers = {u for i in self.members[part] for u in self.graph.kernels[i].users}
        return {self.part_of[u] for u in readers} - {part}

    def sources(self, part: int) -> set[int]:
        """Return the parts whose results this one reads."""
        index = self.graph.index
        read = {v for i in self.members[part] for v, _ in self.graph.kernels[i].reads}
        return {self.part_of[index[v]] for v in read if v in index} - {part}

    def _convex(self, parts: set[int]) -> bool:
        """Whether no way leads from these parts through others back to them."""
        last = max(self.members[p][-1] for p in parts)
        todo = {q for p in parts for q in self.users(p)} - parts
        seen: set[int] = set()
        while todo:
            part = todo.pop()
            seen.add(part)
            if self.members[part][0] > last:
                continue  # nothing that reads it comes before the parts' end
            after = self.users(part)
            if after & parts:
                return False
            todo |= after - seen
        return True


class _Kind:
    """What one kernel is, as far as joining goes.

    ``shape`` and ``rows`` belong to a reduction over the trailing axes of one tensor: its extents,
    and how many of them lead the reduced ones. ``matrix`` belongs to a sum over the rows of one.
    """

    def __init__(self, graph: Graph, i: int, rank: int, rows: int) -> None:
        pattern = int((graph.func(i).attrs or {}).get("op_pattern", _OPAQUE))
        self.is_elementwise = pattern < _INJECTIVE
        self.is_anchor = _INJECTIVE < pattern < _OPAQUE
        self.shape: list[Any] = []
        self.rows = rows
        self.matrix = _matrix(graph, i) if self.is_anchor else None
        for value in graph.kernels[i].reads if rank and self.is_anchor else ():
            ty = graph.type_of(value)
            if isinstance(ty, relax.TensorType) and len(ty.shape.values) == rank:
                self.shape = list(ty.shape.values)


def _matrix(graph: Graph, i: int) -> list[Any] | None:
    """Return the shape, as main has it, of the matrix whose rows a kernel adds up; else None."""
    if not sums_rows(graph.func(i)):
        return None
    types = map(graph.type_of, graph.kernels[i].reads)
    shapes = [list(ty.shape.values) for ty in types if isinstance(ty, relax.TensorType)]
    return next((shape for shape in shapes if len(shape) == 2), None)


def reduced_axes(func: tirx.PrimFunc) -> tuple[int, int]:
    """Return the rank of the tensor that a PrimFunc reduces and the number of axes that it keeps.

    The reduced axes are the trailing ones; (0, 0) where they are others, or where one reduction
    reads two tensors at different rows, as a product does.
    """
    found: set[tuple[int, int]] = set()

    def see(block: Any) -> None:
        over = [v.var for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
        own = [v.var for v in block.iter_vars if v.iter_type == tirx.IterVar.DataPar]
        loads: list[Any] = []
        tvm_ffi.structural_walk(block.body, (tvm.ir.TensorLoad, loads.append))
        for load in loads:
            if any(_uses(index, over) for index in load.indices):
                rows = len(load.indices) - len(over)
                plain = rows >= 0 and _same_all(load.indices, [*own[:rows], *over])
                found.add((len(load.indices), rows) if plain else (0, 0))

    tvm_ffi.structural_walk(func.body, (tvm.s_tir.SBlock, see))
    return max(found) if found and (0, 0) not in found else (0, 0)


def _uses(index: Any, variables: Sequence[Any]) -> bool:
    found: list[Any] = []
    tvm_ffi.structural_walk(index, (tirx.Var, found.append))
    return any(var.same_as(own) for var in found for own in variables)


def _broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> bool:
    if len(shape) > len(to):
        return False
    pairs = zip(shape, to[len(to) - len(shape) :], strict=True)
    return all(_same(a, b) or _is_one(a) for a, b in pairs)


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _same_all(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(_same, left, right))


def _same(a: Any, b: Any) -> bool:
    return bool(tvm_ffi.structural_equal(a, b))

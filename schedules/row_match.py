"""Row programs: PrimFuncs whose blocks all share one space of rows and columns.

Blocks are elementwise, or reduce the columns of a row (sum, product, maximum, minimum). They are
read into values at one point (row, column): loads of parameters, expressions of other values, and
results of reductions. A value's phase is the number of reductions, one after the other, that it
waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from tvmcap.kernel import cpu_blocks as cb
from tvmcap.kernel import epilogue as ep
from tvmcap.schedules.cpu_build import product
from tvmcap.schedules.row_program import Output, RowProgram, Value, identity

Expr = Any


def read(func: tirx.PrimFunc) -> RowProgram | None:
    """Return the row program that a PrimFunc is, or None.

    The rows may be symbolic, the columns not. Parameters that differ by row and column must hold
    the columns of a row next to each other.
    """
    blocks = cb.parse(func)
    reductions = [b for b in blocks or () if b.combine is not None]
    if not blocks or not reductions or len({b.buffer for b in blocks}) < len(blocks):
        return None
    dims = _wide(reductions[0].extents), _wide(reductions[0].reduced_extents)
    if not all(isinstance(e, tirx.IntImm) for e in dims[1]):
        return None
    try:
        return _Reader(func, blocks, *dims).program()
    except _NotRowWise:
        return None


class _NotRowWise(Exception):
    """A block has another space, or reads another row, or a reduction is no plain one."""


class _Reader:
    """Evaluates the outputs at one point."""

    def __init__(
        self, func: Any, blocks: Sequence[cb.Block], row_dims: list[Any], column_dims: list[Any]
    ) -> None:
        self.func = func
        self.blocks = {b.buffer: b for b in blocks}
        self.row_dims, self.column_dims = row_dims, column_dims
        self.columns = int(product(column_dims))
        self.row, self.column = tirx.Var("row", "int64"), tirx.Var("column", "int64")
        self.analyzer = Analyzer()
        self.axes = [tirx.Var(f"r{i}", "int64") for i in range(len(row_dims))]
        self.axes += [tirx.Var(f"c{i}", "int64") for i in range(len(column_dims))]
        for axis, extent in zip(self.axes, [*row_dims, *column_dims], strict=True):
            self.analyzer.bind(axis, tvm.ir.Range(0, extent))
        self.values: dict[Any, Value] = {}
        self.known: dict[Any, list[tuple[list[Expr], Value]]] = {}
        self.analyzer.bind(self.column, tvm.ir.Range(0, self.columns))

    def program(self) -> RowProgram:
        """Return the program; raises _NotRowWise."""
        params = tuple(p for p in self.func.params if isinstance(p.ty, tirx.BufferType))
        outputs = tuple(self._output(p) for p in params if p in self.blocks)
        reduced = any(v.combine is not None for v in self.values.values())
        if not outputs or not reduced or not any(map(self._covers, self.values.values())):
            raise _NotRowWise
        rows = product(self.row_dims)
        return RowProgram(
            self.row,
            self.column,
            int(rows) if isinstance(rows, int | tirx.IntImm) else rows,
            self.columns,
            tuple(self.values.values()),
            outputs,
            params,
            ep.digest(self.func),
        )

    def _covers(self, value: Value) -> bool:
        """Whether a load gives every row columns of its own, as no operand of a product does."""
        if value.kind != "load":
            return False
        elements = product([*self.row_dims, *self.column_dims])
        return bool(self.analyzer.can_prove_equal(product(value.buffer.shape), elements))

    def _output(self, buffer: Any) -> Output:
        """An output over rows and columns, or over rows alone, in row-major order."""
        split = len(self.row_dims)
        by_column = ep.same_all(_wide(buffer.shape), [*self.row_dims, *self.column_dims])
        if not by_column and not ep.same_all(_wide(buffer.shape), self.row_dims):
            raise _NotRowWise
        at = self._at(buffer.shape, self.axes if by_column else self.axes[:split])
        value = self._value(buffer, at)
        if value.by_column and not by_column:
            raise _NotRowWise
        index = self.row * self.columns + self.column if by_column else self.row
        return Output(buffer, index, value, by_column)

    def _at(self, shape: Sequence[Any], axes: Sequence[Any]) -> list[Expr]:
        """Return ``axes`` as an index into a shape with extra extents of one."""
        rest = iter(axes)
        return [tirx.IntImm("int64", 0) if _is_one(e) else next(rest) for e in shape]

    def _value(self, buffer: Any, at: list[Expr]) -> Value:
        at = [self.analyzer.simplify(i) for i in at]
        for seen, value in self.known.get(buffer, ()):
            if ep.same_all(seen, at):
                return value
        block = self.blocks.get(buffer)
        if block is None:
            value = self._load(buffer, at)
        elif block.combine is None:
            value = self._stage(block, at)
        else:
            value = self._reduction(block, at)
        self.known.setdefault(buffer, []).append((at, value))
        self.values[value.var] = value
        return value

    def _load(self, buffer: Any, at: list[Expr]) -> Value:
        index: Expr = tirx.IntImm("int64", 0)
        for extent, i in zip(buffer.shape, at, strict=True):
            index = index * extent + i
        value = self._make(buffer.name, str(buffer.dtype), self._flat(index), buffer=buffer)
        if value.by_column and not self._contiguous(value):
            raise _NotRowWise
        return value

    def _flat(self, index: Expr) -> Expr:
        """Write an index with the flat row and column."""
        split, places = len(self.row_dims), {}
        for axes, dims, flat in (
            (self.axes[:split], self.row_dims, self.row),
            (self.axes[split:], self.column_dims, self.column),
        ):
            if not any(cb.uses(index, axis) for axis in axes):
                continue
            whole: Expr = tirx.IntImm("int64", 0)
            for axis, extent in zip(axes, dims, strict=True):
                whole = whole * extent + axis
            places.update(self._parts(axes, dims, flat))
            # the whole row or column, as it mostly is, needs no divisions
            scale, rest = self._linear(index, axes, whole)
            if scale is not None:
                index = rest + flat * scale
        return self.analyzer.simplify(cb.substitute(index, places))

    def _linear(self, index: Expr, axes: Sequence[Any], whole: Expr) -> tuple[Any, Expr]:
        """Return (scale, rest) with index = whole * scale + rest, or (None, index)."""
        if not axes:
            return None, index
        zero = {axis: tirx.IntImm("int64", 0) for axis in axes}
        one = {**zero, axes[-1]: tirx.IntImm("int64", 1)}
        rest = self.analyzer.simplify(cb.substitute(index, zero))
        scale = self.analyzer.simplify(cb.substitute(index, one) - rest)
        if any(cb.uses(scale, axis) for axis in self.axes) or not self.analyzer.can_prove_equal(
            index, whole * scale + rest
        ):
            return None, index
        return scale, rest

    def _parts(self, axes: Sequence[Any], dims: Sequence[Any], flat: Expr) -> dict[Any, Expr]:
        parts = {}
        for axis, extent in reversed(list(zip(axes, dims, strict=True))[1:]):
            parts[axis] = tirx.floormod(flat, extent)
            flat = tirx.floordiv(flat, extent)
        return {**parts, **({axes[0]: flat} if axes else {})}

    def _contiguous(self, value: Value) -> bool:
        start = cb.substitute(value.expr, {self.column: tirx.IntImm("int64", 0)})
        return bool(self.analyzer.can_prove_equal(value.expr, start + self.column))

    def _stage(self, block: cb.Block, at: list[Expr]) -> Value:
        expr = self._evaluate(block.value, dict(zip(block.axes, at, strict=True)))
        return self._make(block.buffer.name, str(block.buffer.dtype), expr)

    def _reduction(self, block: cb.Block, at: list[Expr]) -> Value:
        split, dtype = len(self.row_dims), str(block.buffer.dtype)
        own = self._at(block.buffer.shape, self.axes[:split]) if _wide(block.extents) else []
        fits = ep.same_all(_wide(block.extents), self.row_dims) and ep.same_all(at, own or at)
        if not fits or not ep.same_all(_wide(block.reduced_extents), self.column_dims):
            raise _NotRowWise
        if not _is_identity(block.combine, block.init, dtype):
            raise _NotRowWise
        places = dict(zip(block.axes, at, strict=True))
        places |= dict(
            zip(block.reduced, self._at(block.reduced_extents, self.axes[split:]), strict=True)
        )
        expr = self._evaluate(block.value, places)
        start = identity(block.combine, dtype)
        return self._make(block.buffer.name, dtype, expr, combine=block.combine, start=start)

    def _evaluate(self, expr: Expr, axes: dict[Any, Expr]) -> Expr:
        """Return the expression at a point, its loads replaced by the variables of values."""
        expr = cb.substitute(expr, axes)
        guarded = cb.GUARD in cb.calls(expr)
        loads = cb.loads(expr)
        # all before the replacement: no exception of ours passes through TVM's walk
        values = {node: self._value(node.source, list(node.indices)) for node in loads}
        for node, value in values.items():
            if any(cb.loads(index) for index in node.indices):
                raise _NotRowWise
            if guarded and value.kind == "load" and not self._inside(node.source, node.indices):
                raise _NotRowWise  # it may only be read where the guard holds
        expr = cb.replace_loads(expr, lambda node: self._seen(node).var)
        return self._flat(expr) if any(cb.uses(expr, a) for a in self.axes) else expr

    def _seen(self, node: Any) -> Value:
        at = [self.analyzer.simplify(i) for i in node.indices]
        return next(v for seen, v in self.known[node.source] if ep.same_all(seen, at))

    def _inside(self, buffer: Any, at: Sequence[Expr]) -> bool:
        """Whether an index lies inside a parameter at every point."""
        return all(
            self.analyzer.can_prove(tirx.And(i >= 0, i < extent))
            for i, extent in zip(at, buffer.shape, strict=True)
        )

    def _make(self, name: str, dtype: str, expr: Expr, **fields: Any) -> Value:
        used: list[Any] = []
        tvm_ffi.structural_walk(expr, (tirx.Var, used.append))
        inner = [self.values[v] for v in used if v in self.values]
        reductions = [v for v in inner if v.combine is not None]
        phase = max([v.phase for v in inner] + [v.phase + 1 for v in reductions], default=0)
        by_row = any(v.same_as(self.row) for v in used) or any(v.by_row for v in inner)
        by_row = by_row or not self.row_dims  # a single row is its own
        by_column = any(v.same_as(self.column) for v in used) or any(v.by_column for v in inner)
        if fields.get("combine") is not None:
            by_column = False
        return Value(tirx.Var(name, dtype), expr, phase, by_row, by_column, **fields)


def _is_identity(combine: Any, init: Expr, dtype: str) -> bool:
    """Whether a reduction starts from its identity; TOPI's extremes start at finite bounds."""
    if not isinstance(init, tirx.IntImm | tirx.FloatImm):
        return False
    starts = [identity(combine, dtype)]
    if combine is tirx.Max:
        starts.append(tirx.min_value(dtype))
    if combine is tirx.Min:
        starts.append(tirx.max_value(dtype))
    return any(init.value == start.value for start in starts)


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and extent.value == 1


def _wide(extents: Sequence[Any]) -> list[Any]:
    """Extents other than one."""
    return [e for e in extents if not _is_one(e)]

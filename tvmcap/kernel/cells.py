"""Values that an expression names become cells of local memory.

TVM's simplifier puts bound values back where their names stand, twice where a name stands twice, so
that nested functions take exponential time, and the lowering of bfloat16 copies operands. A load
from a cell is left alone, and LLVM turns cells into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.stmt import ForKind

from tvmcap.schedules import cpu_build as b

Expr = Any
_GUARD = "prim.if_then_else"
_SIMPLE = (tirx.Var, tirx.IntImm, tirx.FloatImm, tvm.ir.TensorLoad)
_NAMING = (tirx.Let, tirx.Bind)


def settle(body: Any) -> Any:
    """Return a statement whose stores name no values: a cell before them holds each one.

    A vectorized loop becomes one loop a cell, which is the order its statements have anyway.
    """
    callbacks = ((tirx.For, _vectors), (tirx.SeqStmt, _sequence), (tirx.BufferStore, _single))
    return tvm_ffi.structural_map(body, callbacks, order="pre")


def _vectors(loop: Any) -> Any:
    stmts = _statements(loop.body)
    if (
        loop.kind == ForKind.VECTORIZED
        and isinstance(loop.body, tvm.s_tir.SBlockRealize)
        and _names(loop.body)
    ):  # a cell in a block serves one lane at a time; LLVM vectorizes the serial loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, loop.body)
    if loop.kind != ForKind.VECTORIZED or not _to_do(stmts):
        return loop
    lanes = int(loop.extent)
    cells = _Cells(lanes, loop.loop_var)

    def each(stmt: Any) -> Any:
        return b.loop("l", lanes, lambda v: _renamed(stmt, loop.loop_var, v), ForKind.VECTORIZED)

    stores = cells.take(stmts)
    return b.seq(*cells.allocations, *map(each, stores))


def _sequence(seq: Any) -> Any:
    stmts = list(seq.seq)
    if not any(_is_value(s) for s in stmts):
        return seq
    cells = _Cells(1, b.const(0))
    stores = cells.take(stmts)
    return b.seq(*cells.allocations, *stores)


def _single(store: Any) -> Any:
    if not _to_do([store]):
        return store
    cells = _Cells(1, b.const(0))
    stores = cells.take([store])
    return b.seq(*cells.allocations, *stores)


def _statements(body: Any) -> list[Any]:
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _is_value(stmt: Any) -> bool:
    return isinstance(stmt, tirx.Bind) and str(stmt.value.ty).startswith(("float", "bfloat"))


def _to_do(stmts: Sequence[Any]) -> bool:
    if not all(isinstance(s, tirx.BufferStore) or _is_value(s) for s in stmts):
        return False
    return any(_is_value(s) or _names(s.value) for s in stmts)


def _names(expr: Expr) -> bool:
    """Whether an expression names values, or has a cast that TVM would copy the operand of."""
    found: list[Any] = []

    def cast(node: Any) -> None:
        if str(node.ty).startswith("bfloat16") and not isinstance(node.value, _SIMPLE):
            found.append(node)

    tvm_ffi.structural_walk(expr, ((tirx.Let, found.append), (tirx.Cast, cast)))
    return bool(found)


def _renamed(stmt: Any, old: Any, new: Any) -> Any:
    return tvm_ffi.structural_map(stmt, (tirx.Var, lambda v: new if v.same_as(old) else v))


@dataclass
class _Cells:
    """The cells of one loop, and the statements that fill them.

    Attributes
    ----------
    lanes, at: elements of a cell, and the index into it.
    known: what stands for a name in the statements to come.
    guards: conditions under which the expression at hand is evaluated.
    """

    lanes: int
    at: Expr
    allocations: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)
    known: dict[Any, Expr] = field(default_factory=dict)
    guards: list[Expr] = field(default_factory=list)

    def take(self, stmts: Sequence[Any]) -> list[Any]:
        """Return the statements with their values settled, those that fill cells before them."""
        for stmt in stmts:
            if _is_value(stmt):
                self.known[stmt.var] = self.cell(self.value(stmt.value))
            elif isinstance(stmt, tirx.BufferStore):
                index = [self.value(i) for i in stmt.indices]
                self.stores.append(tirx.BufferStore(stmt.buffer, self.value(stmt.value), index))
            else:  # a loop or a branch: what it names has cells of its own, in it
                self.stores.append(settle(self._plain(stmt)))
        return self.stores

    def cell(self, value: Expr) -> Expr:
        """Store a value in a cell of its own; return the load of it."""
        if isinstance(value, _SIMPLE):
            return value
        cell = tirx.decl_buffer((self.lanes,), str(value.ty), "cell")
        self.allocations.append(tirx.AllocBuffer(cell))
        self.stores.append(tirx.BufferStore(cell, value, [self.at]))
        return tirx.BufferLoad(cell, [self.at])

    def value(self, expr: Expr) -> Expr:
        """Return an expression without names."""
        forms: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (tirx.Var, lambda v: self.known.get(v, v)),
            (tirx.Let, self._let),
            (tirx.Cast, self._cast),
            (tvm.ir.Call, self._guarded),
            (tvm.ir.TensorLoad, self._load),
        )
        return tvm_ffi.structural_map(expr, forms, order="pre")

    def _let(self, let: Any) -> Expr:
        self.known[let.var] = self.cell(self.value(let.value))
        return self.value(let.body)

    def _cast(self, cast: Any) -> Expr:
        if not str(cast.ty).startswith("bfloat16") or isinstance(cast.value, _SIMPLE):
            return cast
        return tirx.Cast(str(cast.ty), self.cell(self.value(cast.value)))

    def _load(self, load: Any) -> Expr:
        """Read memory only where the condition holds, so that the rest needs no condition."""
        if not self.guards or any(load.source.same_as(a.buffer) for a in self.allocations):
            return load
        index = [self._plain(i) for i in load.indices]
        value: Expr = tirx.BufferLoad(load.source, index)
        for guard in reversed(self.guards):
            value = tirx.if_then_else(guard, value, tirx.const(0, str(value.ty)))
        return self.cell(value)

    def _guarded(self, call: Any) -> Expr:
        if getattr(call.op, "name", "") != _GUARD or not any(_names(x) for x in call.args):
            return call
        condition, then, other = call.args
        condition = self.value(condition)
        return tirx.Select(
            condition, self._under(condition, then), self._under(tirx.Not(condition), other)
        )

    def _under(self, condition: Expr, expr: Expr) -> Expr:
        self.guards.append(condition)
        try:
            return self.value(expr)
        finally:
            self.guards.pop()

    def _plain(self, node: Any) -> Any:
        return tvm_ffi.structural_map(node, (tirx.Var, lambda v: self.known.get(v, v)))

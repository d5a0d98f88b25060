"""Small constructors of TIR statements that the CPU kernels are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx.stmt import ForKind

#: Alignment in bytes that a library may rely on for the tensors of its caller.
ALIGNMENT = 16
#: Bytes of a buffer of constant size and scope "global" that TVM still puts on the stack;
#: others are asked of a pool at run time, some 50 ns each.
STACK = 1023

Expr = Any
Stmt = Any


def const(value: int) -> Expr:
    """Return an int64 constant."""
    return tirx.IntImm("int64", value)


def seq(*stmts: Stmt | None) -> Stmt:
    """Return the statements one after the other; None is skipped."""
    kept = [s for s in stmts if s is not None]
    return kept[0] if len(kept) == 1 else tirx.SeqStmt(kept)


def loop(
    name: str, extent: Expr | int, body: Callable[[Expr], Stmt], kind: ForKind = ForKind.SERIAL
) -> Stmt:
    """Return ``for name in range(extent): body(name)``."""
    extent = const(extent) if isinstance(extent, int) else extent
    if isinstance(extent, tirx.IntImm) and extent.value == 1 and kind == ForKind.SERIAL:
        return body(const(0))
    var = tirx.Var(name, "int64")
    return tirx.For(var, const(0), extent, kind, body(var))


def bound(name: str, value: Expr, body: Callable[[Expr], Stmt]) -> Stmt:
    """Return ``name = value`` followed by ``body(name)``; a constant is passed on as it is.

    The value goes through a cell of memory, which LLVM turns back into a register: TVM's simplifier
    substitutes bound variables by their values everywhere, and a kernel of some thousand index
    expressions then takes half a minute to lower.
    """
    if isinstance(value, tirx.IntImm):
        return body(value)
    cell, var = (
        tirx.decl_buffer((1,), "int64", f"{name}_cell"),
        tirx.Var(name, "int64"),
    )
    return seq(
        tirx.AllocBuffer(cell),
        tirx.BufferStore(cell, value, [const(0)]),
        tirx.Bind(var, tirx.BufferLoad(cell, [const(0)])),
        body(var),
    )


def parallel(
    name: str, extent: Expr, body: Callable[[Expr], Stmt], work: Expr, serial_below: int
) -> Stmt:
    """Return a loop that runs in parallel where ``work`` is not below ``serial_below``.

    The comparison is with a cell: TVM would conclude from it on the sizes in each branch, and where
    that leaves only zero it divides by zero.
    """
    if isinstance(work, tirx.IntImm):
        kind = ForKind.SERIAL if work.value < serial_below else ForKind.PARALLEL
        return loop(name, extent, body, kind)

    def choose(work: Expr) -> Stmt:
        many = loop(name, extent, body, ForKind.PARALLEL)
        return tirx.IfThenElse(work < const(serial_below), loop(name, extent, body), many)

    return bound("work", work, choose)


def lanes(start: Expr | int, width: int) -> Expr:
    """Return the index of ``width`` neighbours from ``start``."""
    return tirx.Ramp(const(start) if isinstance(start, int) else start, const(1), width)


def ceildiv(a: Expr, b: Expr | int) -> Expr:
    """Return ``a / b`` rounded up, for ``b > 0``."""
    return tirx.truncdiv(a + (b - 1), const(b) if isinstance(b, int) else b)


def product(extents: Sequence[Any]) -> Expr:
    """Return the product of extents as an int64 expression; 1 for none."""
    result = const(1)
    for extent in extents:
        result = result * extent
    return result


def aligned(params: Sequence[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """Return parameters that promise ``ALIGNMENT`` bytes only, and old buffers to new ones."""
    fresh, new = [], {}
    for param in params:
        if tirx.is_buffer_var(param):
            new[param] = tirx.decl_buffer(
                param.shape, param.dtype, param.name, data_alignment=ALIGNMENT
            )
        fresh.append(new.get(param, param))
    return fresh, new


def flat(buffer: Any) -> tuple[Any, Stmt]:
    """Return a one-dimensional view of a contiguous buffer and the statement that declares it."""
    view = tirx.decl_buffer(
        (product(buffer.shape),),
        buffer.dtype,
        f"{buffer.name}_flat",
        data=None,
        data_alignment=ALIGNMENT,
    )
    return view, tirx.DeclBuffer(view, data=buffer.data)


def scratch(size: Expr | int, dtype: str, name: str) -> tuple[Any, Stmt]:
    """Return a buffer of the running thread and its allocation.

    It is used through a view: TVM's CompactBufferAllocation unites the regions of all accesses of
    what it can see allocated, which takes seconds for a kernel of a few hundred accesses.
    """
    size = const(size) if isinstance(size, int) else size
    memory = tirx.decl_buffer((size,), dtype, f"{name}_memory")
    view = tirx.decl_buffer((size,), dtype, name, data=None)
    return view, seq(tirx.AllocBuffer(memory), tirx.DeclBuffer(view, data=memory.data))


class Registers:
    """Vectors that LLVM keeps in registers: a few buffers on the stack, indexed by constants.

    Their elements are scalars of 32 bits: where vectors are elements, TVM's StorageRewrite lets
    buffers of both kinds share memory and then fails.
    """

    def __init__(self, count: int, lanes: int, name: str, dtype: str = "float32") -> None:
        self.lanes, self.each = lanes, STACK // (4 * lanes)
        made = [
            scratch(min(self.each, count - start) * lanes, dtype, name)
            for start in range(0, count, self.each)
        ]
        self.buffers = [buffer for buffer, _ in made]
        self.allocated = seq(*(stmt for _, stmt in made))

    def load(self, i: int) -> Expr:
        """Return vector ``i``."""
        return tirx.BufferLoad(self.buffers[i // self.each], [self._at(i)])

    def store(self, i: int, value: Expr) -> Stmt:
        """Return the statement that sets vector ``i``."""
        return tirx.BufferStore(self.buffers[i // self.each], value, [self._at(i)])

    def _at(self, i: int) -> Expr:
        return lanes(i % self.each * self.lanes, self.lanes)


def scheduled(func: tirx.PrimFunc, params: list[Any], body: Stmt) -> tirx.PrimFunc:
    """Return ``func`` with another body, marked as scheduled.

    The body stands in a root block because Relax passes (RewriteDataflowReshape) look for one in
    every PrimFunc.
    """
    root = SBlockRealize([], tirx.IntImm("bool", True), SBlock([], [], [], "root", body))
    return tirx.PrimFunc(params, root, func.ret_type, func.attrs).with_attr(
        "tirx.is_scheduled", True
    )

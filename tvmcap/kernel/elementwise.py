"""Elementwise work on a GPU that no product, row or sum carries, in whole vectors.

A thread reads two vectors of every parameter before it computes either, so that enough bytes are
under way, and writes whole vectors; what is read once for many elements is read where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from tvmcap.base import codegen
from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.features import copy_func
from tvmcap.kernel.vectors import FLOATS, VECTOR, Result, Vector, move, written
from tvmcap.schedules.gpu_epilogue import flatten, offset
from tvmcap.schedules.row_math import put

Expr = Any
Buffer = Any

THREADS, DEPTH = 256, 2
"""Threads of a block, and vectors of a thread."""
#: Functions that are written the same way for a vector's element.
_CALLS = frozenset(
    f"tirx.{name}" for name in "exp tanh sigmoid erf sqrt rsqrt log fabs floor ceil".split()
)


@dataclass(frozen=True)
class Elementwise:
    """What a PrimFunc computes at each point of ``shape``.

    Attributes
    ----------
    params: the parameters of the PrimFunc.
    shape, axes: extents, and the variables that expressions are written in.
    outputs: what is written at the point, with its value in terms of parameters.
    """

    params: tuple[Any, ...]
    shape: tuple[Expr, ...]
    axes: tuple[Expr, ...]
    outputs: tuple[tuple[Buffer, Expr], ...]

    def in_vectors(self, load: Any) -> bool:
        """Whether neighbouring elements read neighbouring ones of a parameter, whole vectors."""
        *lead, last = load.indices or [None]
        moves = [i for i in lead if not isinstance(i, tirx.Var | tirx.IntImm)]
        extent = load.source.shape[-1] if load.source.shape else None
        return (
            str(load.source.dtype) in FLOATS
            and last is not None
            and last.same_as(self.axes[-1])
            and not moves
            and not any(i.same_as(self.axes[-1]) for i in lead)
            and isinstance(extent, tirx.IntImm)
            and int(extent) % VECTOR == 0
        )


def scheduled(func: tirx.PrimFunc, target: Any) -> tirx.PrimFunc | None:
    """Write elementwise work whose last dimension is whole vectors; None for another PrimFunc."""
    found = read(func) if target.kind.name == "cuda" else None
    return None if found is None else _kernel(found, codegen.compute_capability(target))


def read(func: tirx.PrimFunc) -> Elementwise | None:
    """Take a PrimFunc apart; None where it is not such work."""
    if ep.blocks(func) is None:
        return None
    sch = Schedule(copy_func(func))
    root = sch.get_sblock("root")
    blocks, last = sch.get_child_blocks(root), sch.get_output_blocks(root)
    names = {sch.get(b).name_hint for b in last}
    if not blocks or not all(_writes_its_point(sch.get(b)) for b in blocks):
        return None
    outer = [b for b in blocks if sch.get(b).name_hint in names]
    for block in blocks:
        if block not in outer:
            sch.compute_inline(block)
    stores = [sch.get(b).body for b in outer]
    shape = tuple(stores[0].buffer.shape)
    axes = tuple(tirx.Var(f"i{d}", "int64") for d in range(len(shape)))
    outputs = []
    for store in stores:
        here = dict(zip(store.indices, axes, strict=False))
        outputs.append((store.buffer, put(store.value, here)))
    found = Elementwise(tuple(sch.mod["main"].params), shape, axes, tuple(outputs))
    return found if _fits(found) else None


def _writes_its_point(block: Any) -> bool:
    store, axes = block.body, [v.var for v in block.iter_vars]
    return (
        isinstance(store, tirx.BufferStore)
        and all(v.iter_type == tirx.IterVar.DataPar for v in block.iter_vars)
        and (not store.indices or ep.same_all(store.indices, axes))  # a number has an axis of 1
    )


def _fits(found: Elementwise) -> bool:
    """Whether all outputs are floats of one shape in vectors, and expressions are plain."""
    shape = found.shape
    if not shape or not isinstance(shape[-1], tirx.IntImm) or int(shape[-1]) % VECTOR:
        return False
    for buffer, _ in found.outputs:
        if str(buffer.dtype) not in FLOATS or not ep.same_all(buffer.shape, shape):
            return False
    values = [value for _, value in found.outputs]
    calls, loads = _parts(values, tvm.ir.Call), _parts(values, tvm.ir.TensorLoad)
    return all(map(_is_plain, calls)) and _reads_parameters(found, loads)


def _parts(values: Iterable[Expr], kind: Any) -> list[Any]:
    """Return every node of a kind in expressions."""
    found: list[Any] = []
    for value in values:
        tvm_ffi.structural_walk(value, (kind, found.append))
    return found


def _is_plain(call: Any) -> bool:
    name = getattr(call.op, "name", "")
    if name == "tirx.pow":
        return getattr(call.args[1], "value", None) in (2.0, 3.0, 4.0) and str(call.ty) == "float32"
    return name in _CALLS


def _reads_parameters(found: Elementwise, loads: list[Any]) -> bool:
    """Whether parameters are all that is read, most of it in vectors, at places known before."""
    for load in loads:
        inner = _parts(load.indices, tvm.ir.TensorLoad)
        if inner or not any(load.source.same_as(p) for p in found.params):
            return False
    return all(found.in_vectors(load) or not _moves(found, load) for load in loads)


def _moves(found: Elementwise, load: Any) -> bool:
    """Whether what is read differs between the elements of a vector."""
    return any(v.same_as(found.axes[-1]) for v in _parts(load.indices, tirx.Var))


def _kernel(e: Elementwise, capability: int) -> tirx.PrimFunc:
    writer = _Writer(e, capability)
    blocks = tirx.floordiv(writer.count + (THREADS * DEPTH - 1), THREADS * DEPTH)
    blocks = tirx.Cast("int32", T.max(blocks, 1))

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        T.device_entry()
        block = T.cta_id([blocks])
        tx = T.thread_id([THREADS])
        writer.write(block, tx)

    launch = ["blockIdx.x", "threadIdx.x"]
    return tirx.PrimFunc(e.params, kernel.body).with_attr("tirx.kernel_launch_params", launch)


class _Writer:
    """Writes one kernel into the function that is being built."""

    def __init__(self, e: Elementwise, capability: int) -> None:
        self.e, self.pairs, self.early = e, capability >= 80, capability >= 90
        self.columns = int(e.shape[-1])
        lead = reduce(mul, e.shape[:-1], tirx.IntImm("int64", 1))
        self.count = lead * (self.columns // VECTOR)
        self.loads: list[Any] = []
        loads = _parts((value for _, value in e.outputs), tvm.ir.TensorLoad)
        for load in filter(e.in_vectors, loads):
            if not any(ep.same(load, other) for other in self.loads):
                self.loads.append(load)

    def write(self, block: Any, tx: Any) -> None:
        """Write the body for a thread of a block."""
        e = self.e
        self.flat = {p: flatten(p) for p in e.params if hasattr(p, "dtype")}
        first = T.Cast("int64", block) * (THREADS * DEPTH) + tx
        with T.If(self.count > 0), T.Then():  # a dynamic size may be 0
            places = [first + u * THREADS for u in range(DEPTH)]
            points = [self._point(T.min(place, self.count - 1)) for place in places]
            homes = [self._read(point) for point in points]
            for place, point, home in zip(places, points, homes, strict=True):
                results = [
                    (Result(b, self.flat[b], self.pairs), value, b) for b, value in e.outputs
                ]
                for result, value, buffer in results:
                    result.compute(partial(self._at, value, buffer, point, home))
                with T.If(place < self.count), T.Then():
                    for result, _, _ in results:
                        result.write(place * VECTOR)
        if self.early:  # the next kernel may start, and waits for what is written
            T.evaluate(T.ptx.griddepcontrol.launch_dependents())

    def _point(self, place: Expr) -> dict[Any, Expr]:
        """Return the indices of a vector's first element by its number."""
        vectors = self.columns // VECTOR
        row, axes = tirx.floordiv(place, vectors), list(zip(self.e.axes, self.e.shape, strict=True))
        found = {axes[-1][0]: tirx.floormod(place, vectors) * VECTOR}
        for axis, extent in axes[-2:0:-1]:
            found[axis] = tirx.floormod(row, extent)
            row = tirx.floordiv(row, extent)
        return {axes[0][0]: row, **found}

    def _read(self, point: dict[Any, Expr]) -> list[Vector]:
        """Read the vectors of a point."""
        homes = []
        for load in self.loads:
            homes.append(Vector(load.source, self.pairs))
            where = offset(load.source, [put(i, point) for i in load.indices])
            move(homes[-1].values, 0, self.flat[load.source], where)
        return homes

    def _at(
        self,
        value: Expr,
        target: Buffer,
        point: dict[Any, Expr],
        homes: list[Vector],
        pair: Any,
        c: int,
    ) -> Expr:
        """Return an expression at element ``2 * pair + c`` of a vector."""

        def load(node: Any) -> Any:
            for known, home in zip(self.loads, homes, strict=True):
                if ep.same(node, known):
                    return home.at(pair, c)
            where = offset(node.source, list(node.indices))
            return tirx.BufferLoad(self.flat[node.source], [where])

        last = self.e.axes[-1]
        here = {**point, last: point[last] + T.Cast("int64", pair * 2 + c)}
        value = tvm_ffi.structural_map(value, (tvm.ir.TensorLoad, load))
        return written(put(value, here), target)

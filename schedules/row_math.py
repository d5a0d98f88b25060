"""Arithmetic inside row kernels: reductions, powers, bfloat16 in pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules.gpu_math import legal, quick
from tvmcap.schedules.row_plan import WARP
from tvmcap.schedules.row_program import RowProgram, Value, identity

Expr = Any

_HALF = ("float16", "bfloat16")
_POW = tvm.ir.Op.get("tirx.pow")


def written(expr: Expr, program: RowProgram) -> Expr:
    """Write an expression in what TIRx lowers; in quick forms where all outputs have 16 bits."""
    expr = legal(_powers(expr))
    return quick(expr) if all(str(o.buffer.dtype) in _HALF for o in program.outputs) else expr


def float_of(word: Expr, half: int) -> Expr:
    """Return one of two bfloat16 in a word, the upper bits of a float32."""
    bits = tirx.bitwise_and(word, T.uint32(0xFFFF0000)) if half else word << T.uint32(16)
    return tirx.reinterpret("float32", bits)


def accumulator(dtype: str) -> str:
    """Return the type that a reduction's result is accumulated in."""
    return "float32" if dtype in _HALF else dtype


def combine(value: Value, a: Expr, b: Expr) -> Expr:
    """Combine two partial results; a NaN wins over every number, as in PyTorch."""
    if value.combine in (tirx.Max, tirx.Min) and str(a.ty) == "float64":
        wins = b > a if value.combine is tirx.Max else b < a
        return tirx.Select(tirx.Or(wins, tirx.isnan(b)), b, a)
    return legal(value.combine(a, b))


@dataclass(frozen=True)
class Element:
    """Where an element lies in a vector, and whether that is even (0) or odd (1)."""

    at: Any
    half: int


def each(vector: int, write: Callable[[Element], None]) -> None:
    """Write something for every element of a vector, the even ones first."""
    for half in range(min(vector, 2)):
        with T.unroll(max(vector // 2, 1)) as pair:
            write(Element(pair * 2 + half, half))


def start(value: Value, vector: int) -> Any:
    """Return accumulators of a reduction, one for each element of a vector, at its identity."""
    wide = accumulator(value.dtype)
    total = T.alloc_buffer((vector,), wide, scope="local")
    with T.unroll(vector) as i:
        T.buffer_store(total, identity(value.combine, wide), [i])
    return total


def fold(value: Value, total: Any, vector: int) -> None:
    """Combine a thread's accumulators into the first of them."""
    while vector > 1:
        vector //= 2
        with T.unroll(vector) as i:
            T.buffer_store(total, combine(value, total[i], total[i + vector]), [i])


def shuffle(value: Value, total: Any, width: int) -> None:
    """Combine the first accumulators of ``width`` neighbouring threads; each gets the result."""
    if width == 1:
        return
    other = T.alloc_buffer((1,), str(total.dtype), scope="local")
    while width > 1:
        width //= 2
        moved = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], width, WARP, WARP)
        T.buffer_store(other, moved, [0])
        T.buffer_store(total, combine(value, total[0], other[0]), [0])


def put(expr: Expr, values: dict[Any, Expr]) -> Expr:
    """Return an expression with variables replaced."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda v: values.get(v, v)))


def _powers(expr: Expr) -> Expr:
    """Write powers such that a base may be negative, which the fast pow does not take."""

    def power(call: Any) -> Expr:
        if not call.op.same_as(_POW) or "float" not in str(call.ty):
            return call
        base, exponent = call.args
        if isinstance(exponent, tirx.FloatImm) and exponent.value in (1.0, 2.0, 3.0, 4.0):
            result = base
            for _ in range(int(exponent.value) - 1):
                result = result * base
            return result
        zero, dtype = tirx.const(0, str(call.ty)), str(call.ty)
        size = tirx.pow(tirx.abs(base), exponent)
        even = tirx.floor(exponent * tirx.const(0.5, dtype)) * tirx.const(2, dtype) == exponent
        signed = tirx.Select(even, size, zero - size)
        whole = tirx.floor(exponent) == exponent
        wrong = tirx.FloatImm(dtype, float("nan"))
        return tirx.Select(base < zero, tirx.Select(whole, signed, wrong), size)

    return tvm_ffi.structural_map(expr, (tvm.ir.Call, power))

"""Casts from float32 to e4m3 for llvm as straight-line arithmetic, which LLVM vectorizes.

TVM's own form branches, which cannot be vectorized. The format is that of Micikevicius et al.,
"FP8 formats for deep learning" (2022): bias 7, three bits of mantissa, no infinities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

Expr = Any
Let = Callable[[Expr, Callable[[Expr], Expr]], Expr]

E4M3 = "float8_e4m3fn"
_LEAST_NORMAL = 2.0**-6
_OVERFLOW = 464.0  # half a step above the largest value, 448
#: Neighbours at this size are one subnormal step, 2**-9, apart.
_STEPS, _STEPS_BITS = 16384.0, 0x46800000
_LARGEST, _NAN = 0x7E, 0x7F


def encode(value: Expr, let: Let) -> Expr:
    """Return a float32 value as e4m3, to nearest, ties to even; 448 beyond the range, as torch."""
    dtype = str(value.ty)
    lanes = dtype.removeprefix("float32")

    def i(number: int) -> Expr:
        return _const("int32", number, lanes)

    def f(number: float) -> Expr:
        return _const("float32", number, lanes)

    def code(bits: Expr) -> Expr:
        size = tirx.bitwise_and(bits, i(0x7FFFFFFF))
        sign = tirx.bitwise_and(tirx.shift_right(bits, i(24)), i(0x80))

        def magnitude(size: Expr) -> Expr:
            wide = tirx.reinterpret(dtype, size)
            even = tirx.bitwise_and(tirx.shift_right(size, i(20)), i(1))
            normal = tirx.shift_right(size + i(0x7FFFF) + even, i(20)) - i((127 - 7) << 3)
            small = tirx.reinterpret(f"int32{lanes}", wide + f(_STEPS)) - i(_STEPS_BITS)
            finite = tirx.Select(wide < f(_LEAST_NORMAL), small, normal)
            number = tirx.Select(wide > f(_OVERFLOW), i(_LARGEST), finite)
            return tirx.Select(tirx.isnan(wide), i(_NAN), number)

        return tirx.bitwise_or(let(size, magnitude), sign)

    bits = let(tirx.reinterpret(f"int32{lanes}", value), code)
    return tirx.reinterpret(E4M3 + lanes, tirx.Cast(f"uint8{lanes}", bits))


def _const(dtype: str, number: float, lanes: str) -> Expr:
    one = tirx.IntImm(dtype, int(number)) if dtype == "int32" else tirx.FloatImm(dtype, number)
    return tirx.Broadcast(one, int(lanes[1:])) if lanes else one

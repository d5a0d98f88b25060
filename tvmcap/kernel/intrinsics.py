"""Elementary functions for llvm as straight-line arithmetic, so that LLVM vectorizes the loops they stand in.

LLVM turns a vector ``exp``, ``tanh`` or ``erf`` into one library call a lane. The forms here are polynomials
and rational functions with selects, right over the whole range: NaN and infinities come out as in PyTorch.
``sqrt`` and ``rsqrt`` are instructions already; trigonometric functions keep the library call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

Expr = Any

# Cephes expf (S. Moshier, netlib.org/cephes): exp(r) on |r| <= ln(2)/2, relative error below 1 ulp.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_MAX, _EXP_MIN = 89.0, -104.0
# Adding 1.5 * 2**23 leaves the nearest integer in the low bits of a float32.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000

# Eigen 3.4, generic_fast_tanh_float (MathFunctionsImpl.h): odd / even polynomials in x on the clamped range.
_TANH_MAX, _TANH_LINEAR = 7.90531110763549805, 0.0004
_TANH_NUMERATOR = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

# XLA, ErfImpl32 (xla/client/lib/math.cc): x * P(x*x) / Q(x*x); beyond the clamp erf rounds to one.
_ERF_MAX = 3.7439211627767994
_ERF_NUMERATOR = (
    0.00022905065861350646,
    0.0034082910107109506,
    0.050955695062380861,
    0.18520832239976145,
    1.128379143519084,
)
_ERF_DENOMINATOR = (
    -1.1791602954361697e-7,
    0.000023547966471313185,
    0.0010179625278914885,
    0.014070470171167667,
    0.11098505178285362,
    0.49746925110067538,
    1.0,
)

# Cephes logf: log(1 + r) on sqrt(1/2) <= 1 + r < sqrt(2).
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def expand(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with its float elementary functions written out; 16-bit ones compute in float32."""
    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, _rewrite)))


def expand_module(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures that no PrimFunc calls a float elementary function that LLVM would leave to the C library."""
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod = mod.clone()
            mod.update_func(name, expand(func))
    return mod


def _rewrite(call: Any) -> Expr:
    form = _FORMS.get(getattr(call.op, "name", ""))
    dtype = str(call.ty)
    if form is None or dtype not in ("float32", "float16", "bfloat16"):
        return call
    args = [a if dtype == "float32" else tirx.Cast("float32", a) for a in call.args]
    result = form(*args)
    if result is None:
        return call
    return result if dtype == "float32" else tirx.Cast(dtype, result)


def _f(value: float) -> Expr:
    return tirx.FloatImm("float32", value)


def _i(value: int) -> Expr:
    return tirx.IntImm("int32", value)


def _let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    var = tirx.Var("v", str(value.ty))
    return tirx.Let(var, value, body(var))


def _poly(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule, highest power first."""
    result = _f(coefficients[0])
    for c in coefficients[1:]:
        result = result * x + _f(c)
    return result


def _clamp(x: Expr, low: float, high: float) -> Expr:
    """Clamp; comparisons with NaN are false, so that NaN stays."""
    return tirx.Select(x > _f(high), _f(high), tirx.Select(x < _f(low), _f(low), x))


def _power_of_two(n: Expr) -> Expr:
    return tirx.reinterpret("float32", tirx.shift_left(n + _i(127), _i(23)))


def _exp(x: Expr) -> Expr:
    def scale(p: Expr, t: Expr) -> Expr:
        """Multiply by 2**n in two steps, so that subnormal results are rounded once."""
        bits = tirx.reinterpret("int32", t) - _i(_ROUND_BITS)
        return _let(
            bits,
            lambda n: _let(
                tirx.shift_right(n, _i(1)), lambda half: p * _power_of_two(half) * _power_of_two(n - half)
            ),
        )

    def reduced(x: Expr, t: Expr) -> Expr:
        rest = _let(t - _f(_ROUND), lambda n: x - n * _f(_LN2_HIGH) - n * _f(_LN2_LOW))
        return _let(rest, lambda r: scale(_poly(r, _EXP) * r * r + r + _f(1.0), t))

    clamped = _clamp(x, _EXP_MIN, _EXP_MAX)
    return _let(clamped, lambda x: _let(x * _f(1.44269504088896341) + _f(_ROUND), lambda t: reduced(x, t)))


def _sigmoid(x: Expr) -> Expr:
    return _f(1.0) / (_f(1.0) + _exp(_f(0.0) - x))


def _tanh(x: Expr) -> Expr:
    def rational(x: Expr) -> Expr:
        return _let(x * x, lambda s: x * _poly(s, _TANH_NUMERATOR) / _poly(s, _TANH_DENOMINATOR))

    def whole(x: Expr) -> Expr:
        small = tirx.And(x < _f(_TANH_LINEAR), x > _f(-_TANH_LINEAR))
        return tirx.Select(small, x, _let(_clamp(x, -_TANH_MAX, _TANH_MAX), rational))

    return _let(x, whole)


def _erf(x: Expr) -> Expr:
    def rational(x: Expr) -> Expr:
        return _let(x * x, lambda s: x * _poly(s, _ERF_NUMERATOR) / _poly(s, _ERF_DENOMINATOR))

    return _let(x, lambda x: _let(_clamp(x, -_ERF_MAX, _ERF_MAX), rational))


def _log(x: Expr) -> Expr:
    def whole(x: Expr) -> Expr:
        tiny = x < _f(1.17549435e-38)
        return _let(tirx.Select(tiny, x * _f(8388608.0), x), lambda y: special(x, finite(y, tiny)))

    def finite(y: Expr, tiny: Expr) -> Expr:
        """Split into 2**e * m with sqrt(1/2) <= m < sqrt(2)."""
        offset = tirx.reinterpret("int32", y) - _i(0x3F3504F3)
        shift = tirx.Select(tiny, _f(-23.0), _f(0.0))

        def parts(o: Expr) -> Expr:
            mantissa = tirx.bitwise_and(o, _i(0x007FFFFF)) + _i(0x3F3504F3)
            exponent = tirx.Cast("float32", tirx.shift_right(o, _i(23))) + shift
            return _let(exponent, lambda e: _let(tirx.reinterpret("float32", mantissa) - _f(1.0), lambda r: sum_up(r, e)))

        return _let(offset, parts)

    def sum_up(r: Expr, e: Expr) -> Expr:
        tail = _let(r * r, lambda s: _poly(r, _LOG) * r * s + e * _f(_LN2_LOW) - _f(0.5) * s)
        return tail + r + e * _f(_LN2_HIGH)

    def special(x: Expr, value: Expr) -> Expr:
        inf = _f(float("inf"))
        value = tirx.Select(x < inf, value, x)
        value = tirx.Select(tirx.EQ(x, _f(0.0)), _f(float("-inf")), value)
        return tirx.Select(x < _f(0.0), _f(float("nan")), value)

    return _let(x, whole)


def _pow(x: Expr, y: Expr) -> Expr | None:
    """Powers by a small whole constant are products; others keep the library call."""
    if not isinstance(y, tirx.FloatImm) or y.value not in (1.0, 2.0, 3.0, 4.0):
        return None
    if y.value == 1.0:
        return x
    if y.value == 4.0:
        return _let(x, lambda x: _let(x * x, lambda s: s * s))
    return _let(x, lambda x: x * x if y.value == 2.0 else x * x * x)


_FORMS: dict[str, Callable[..., Expr | None]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.erf": _erf,
    "tirx.log": _log,
    "tirx.pow": _pow,
}

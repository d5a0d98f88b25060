"""Elementary functions of float32 as straight-line arithmetic, right over the whole range.

NaN and infinities come out as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx

from tvmcap.kernel.epilogue import named

Expr = Any

# Cephes expf (S. Moshier, netlib.org/cephes): exp(r) on |r| <= ln(2)/2, relative error below 1 ulp.
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_MAX, _EXP_MIN = 89.0, -104.0
# Adding 1.5 * 2**23 leaves the nearest integer in the low bits of a float32.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000

# Cephes tanhf: x + x**3 * P(x*x) below 0.625, else 1 - 2 / (exp(2x) + 1), which is one beyond 9.02.
_TANH_SMALL, _TANH_MAX = 0.625, 10.0
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)

# N. Juffa, "Efficient faithful erff" (forums.developer.nvidia.com, 2011, and
# stackoverflow.com/a/35148199): x + x * P(x*x) below 475/512, else 1 - exp(-t - t * Q(t)) with t =
# |x|; one beyond 3.92. Below 1 ulp.
_ERF_SMALL, _ERF_MAX = 0.927734375, 4.0
_ERF = (
    -5.96761703e-4,
    4.99119423e-3,
    -2.67681349e-2,
    1.12819925e-1,
    -3.76125336e-1,
    1.28379166e-1,
)
_ERF_TAIL = (
    -1.72853470e-5,
    3.83197126e-4,
    -3.88396438e-3,
    2.42546219e-2,
    -1.06777877e-1,
    -6.34846687e-1,
    -1.28717512e-1,
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


def _f(value: float) -> Expr:
    return tirx.FloatImm("float32", value)


def _i(value: int) -> Expr:
    return tirx.IntImm("int32", value)


def let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """Name a value that is used more than once; a load is its own name."""
    if isinstance(value, (tirx.Var, tirx.FloatImm, tvm.ir.TensorLoad)):
        return body(value)
    var, bound, use = named("v", str(value.ty), value)
    return tirx.Let(var, bound, body(use))


def _poly(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule, highest power first."""

    def horner(x: Expr) -> Expr:
        result = _f(coefficients[0])
        for c in coefficients[1:]:
            result = result * x + _f(c)
        return result

    return let(x, horner)


def _clamp(x: Expr, low: float, high: float) -> Expr:
    """Clamp; comparisons with NaN are false, so that NaN stays."""
    return tirx.Select(x > _f(high), _f(high), tirx.Select(x < _f(low), _f(low), x))


def _power_of_two(n: Expr) -> Expr:
    return tirx.reinterpret("float32", tirx.shift_left(n + _i(127), _i(23)))


def _exp(x: Expr) -> Expr:
    """Over the whole range: 2**n in two steps, so that subnormals are rounded once."""

    def scale(p: Expr, n: Expr) -> Expr:
        return let(
            tirx.shift_right(n, _i(1)),
            lambda half: p * _power_of_two(half) * _power_of_two(n - half),
        )

    return let(x, lambda x: _exp_reduced(_clamp(x, _EXP_MIN, _EXP_MAX), scale))


def _exp_near(x: Expr) -> Expr:
    """Return exp(x) for -87 < x < 88."""
    return _exp_reduced(x, lambda p, n: p * _power_of_two(n))


def _exp_reduced(x: Expr, scale: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return ``scale(exp(r), n)`` with x = n * ln(2) + r and |r| <= ln(2) / 2."""

    def reduced(x: Expr, t: Expr) -> Expr:
        rest = let(t - _f(_ROUND), lambda n: x - n * _f(_LN2_HIGH) - n * _f(_LN2_LOW))
        bits = tirx.reinterpret("int32", t) - _i(_ROUND_BITS)
        return let(
            bits, lambda n: let(rest, lambda r: scale(_poly(r, _EXP) * (r * r) + r + _f(1.0), n))
        )

    return let(x, lambda x: let(x * _f(1.44269504088896341) + _f(_ROUND), lambda t: reduced(x, t)))


def _sigmoid(x: Expr) -> Expr:
    return _f(1.0) / (_f(1.0) + _exp(_f(0.0) - x))


def _odd(x: Expr, split: float, near: Callable[[Expr], Expr], far: Callable[[Expr], Expr]) -> Expr:
    """Return ``near(x)`` where |x| <= split, else ``far(|x|)`` with the sign of x."""

    def whole(x: Expr) -> Expr:
        size = tirx.Select(x < _f(0.0), _f(0.0) - x, x)
        return let(size, lambda t: tirx.Select(t > _f(split), signed(x, far(t)), near(x)))

    def signed(x: Expr, value: Expr) -> Expr:
        return let(value, lambda v: tirx.Select(x < _f(0.0), _f(0.0) - v, v))

    return let(x, whole)


def _tanh(x: Expr) -> Expr:
    def near(x: Expr) -> Expr:
        return let(x * x, lambda s: _poly(s, _TANH) * s * x + x)

    def far(t: Expr) -> Expr:
        t = tirx.Select(t > _f(_TANH_MAX), _f(_TANH_MAX), t)
        return _f(1.0) - _f(2.0) / (_exp_near(t + t) + _f(1.0))

    return _odd(x, _TANH_SMALL, near, far)


def _erf(x: Expr) -> Expr:
    def near(x: Expr) -> Expr:
        return _poly(x * x, _ERF) * x + x

    def far(t: Expr) -> Expr:
        t = tirx.Select(t > _f(_ERF_MAX), _f(_ERF_MAX), t)
        return let(t, lambda t: _f(1.0) - _exp_near(_poly(t, _ERF_TAIL) * t - t))

    return _odd(x, _ERF_SMALL, near, far)


def _log(x: Expr) -> Expr:
    def whole(x: Expr) -> Expr:
        tiny = x < _f(1.17549435e-38)
        return let(tirx.Select(tiny, x * _f(8388608.0), x), lambda y: special(x, finite(y, tiny)))

    def finite(y: Expr, tiny: Expr) -> Expr:
        """Split into 2**e * m with sqrt(1/2) <= m < sqrt(2)."""
        offset = tirx.reinterpret("int32", y) - _i(0x3F3504F3)
        shift = tirx.Select(tiny, _f(-23.0), _f(0.0))

        def parts(o: Expr) -> Expr:
            mantissa = tirx.bitwise_and(o, _i(0x007FFFFF)) + _i(0x3F3504F3)
            exponent = tirx.Cast("float32", tirx.shift_right(o, _i(23))) + shift
            return let(
                exponent,
                lambda e: let(
                    tirx.reinterpret("float32", mantissa) - _f(1.0), lambda r: sum_up(r, e)
                ),
            )

        return let(offset, parts)

    def sum_up(r: Expr, e: Expr) -> Expr:
        tail = let(r * r, lambda s: _poly(r, _LOG) * r * s + e * _f(_LN2_LOW) - _f(0.5) * s)
        return tail + r + e * _f(_LN2_HIGH)

    def special(x: Expr, value: Expr) -> Expr:
        inf = _f(float("inf"))
        value = tirx.Select(x < inf, value, x)
        value = tirx.Select(tirx.EQ(x, _f(0.0)), _f(float("-inf")), value)
        return tirx.Select(x < _f(0.0), _f(float("nan")), value)

    return let(x, whole)


def _pow(x: Expr, y: Expr) -> Expr | None:
    """Powers by a small whole constant are products; others keep the library call."""
    if not isinstance(y, tirx.FloatImm) or y.value not in (1.0, 2.0, 3.0, 4.0):
        return None
    if y.value == 1.0:
        return x
    if y.value == 4.0:
        return let(x, lambda x: let(x * x, lambda s: s * s))
    return let(x, lambda x: x * x if y.value == 2.0 else x * x * x)


#: By operator: the form of its float32 result, or None to keep the call.
FORMS: dict[str, Callable[..., Expr | None]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.erf": _erf,
    "tirx.log": _log,
    "tirx.pow": _pow,
    # which LLVM knows for no vectors, or not at all: one call of the C library a lane
    "tirx.sinh": lambda x: tirx.call_pure_extern("float32", "sinhf", x),
    "tirx.cosh": lambda x: tirx.call_pure_extern("float32", "coshf", x),
    "tirx.fmod": lambda x, y: tirx.call_pure_extern("float32", "fmodf", x, y),
}

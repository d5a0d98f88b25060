"""Every elementwise operator of TIR, tamed to be well-conditioned, and the same in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tvm import tirx

Array = Any


@dataclass(frozen=True)
class Op:
    """One elementwise operator.

    ``tir`` makes a PrimExpr of PrimExprs, ``numpy`` the same of arrays; ``jump`` gives how near
    arguments are to a discontinuity.
    """

    tir: Callable[..., Any]
    numpy: Callable[..., Array]
    arity: int = 1
    jump: Callable[..., Array] | None = None


def _f(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def _whole(x: Array, *_: Array) -> Array:
    return np.abs(x - np.rint(x))


def _half(x: Array) -> Array:
    return np.abs(x - np.floor(x) - 0.5)


def _gap(a: Array, b: Array, *_: Array) -> Array:
    return np.abs(a - b)


def _clip(x: Any, low: float, high: float) -> Any:
    return tirx.max(tirx.min(x, _f(high)), _f(low))


def _erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(x)).numpy()


def _float(x: Any) -> Any:
    return tirx.Cast("float32", x)


def _int(x: Any) -> Any:
    return tirx.Cast("int32", x)


def _mod(a: Array, b: Array) -> Array:
    return np.fmod(a, np.abs(b) + b.dtype.type(0.5))


_SMOOTH = {
    "tanh": (tirx.tanh, np.tanh),
    "erf": (tirx.erf, _erf),
    "sigmoid": (tirx.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "sin": (tirx.sin, np.sin),
    "cos": (tirx.cos, np.cos),
    "atan": (tirx.atan, np.arctan),
    "asinh": (tirx.asinh, np.arcsinh),
    "abs": (tirx.abs, np.abs),
}
_TAME = {  # of arguments between -1 and 1
    "tan": (tirx.tan, np.tan),
    "sinh": (tirx.sinh, np.sinh),
    "cosh": (tirx.cosh, np.cosh),
    "exp": (tirx.exp, np.exp),
    "exp2": (tirx.exp2, np.exp2),
    "exp10": (tirx.exp10, lambda x: np.power(x.dtype.type(10), x)),
}
_INNER = {  # of arguments between -0.9 and 0.9
    "asin": (tirx.asin, np.arcsin),
    "acos": (tirx.acos, np.arccos),
    "atanh": (tirx.atanh, np.arctanh),
}
_POSITIVE = {
    "log": (tirx.log, np.log),
    "log2": (tirx.log2, np.log2),
    "log10": (tirx.log10, np.log10),
    "log1p": (tirx.log1p, np.log1p),
    "sqrt": (tirx.sqrt, np.sqrt),
    "rsqrt": (tirx.rsqrt, lambda x: 1 / np.sqrt(x)),
}
_STEPS = {
    "floor": (tirx.floor, np.floor, _whole),
    "ceil": (tirx.ceil, np.ceil, _whole),
    "trunc": (tirx.trunc, np.trunc, _whole),
    "nearbyint": (tirx.nearbyint, np.rint, _half),
    "round": (tirx.round, np.rint, _half),
    "int": (lambda x: _float(_int(x)), np.trunc, _whole),
    "int_arithmetic": (
        lambda x: _float(tirx.floormod(_int(x) * 3, tirx.IntImm("int32", 5))),
        lambda x: np.trunc(x) * 3 % 5,
        _whole,
    ),
    "bool": (
        lambda x: _float(tirx.Cast("bool", _int(x))),
        lambda x: (np.trunc(x) != 0).astype(x.dtype),
        _whole,
    ),
    "int8": (lambda x: _float(tirx.Cast("int8", _clip(x, -99, 99))), np.trunc, _whole),
    "sign": (
        lambda x: tirx.Select(x > _f(0), _f(1), tirx.Select(x < _f(0), _f(-1), _f(0))),
        np.sign,
        np.abs,
    ),
}
_WHERE = {
    "less": (lambda a, b: a < b, np.less),
    "less_equal": (lambda a, b: a <= b, np.less_equal),
    "greater": (lambda a, b: a > b, np.greater),
    "greater_equal": (lambda a, b: a >= b, np.greater_equal),
    "equal": (tirx.EQ, np.equal),
    "not_equal": (tirx.NE, np.not_equal),
}


def _operators() -> dict[str, Op]:
    ops = {name: Op(*forms) for name, forms in _SMOOTH.items()}
    for name, (t, n) in _TAME.items():
        ops[name] = Op(lambda x, t=t: t(_clip(x, -1, 1)), lambda x, n=n: n(np.clip(x, -1, 1)))
    for name, (t, n) in _INNER.items():
        ops[name] = Op(
            lambda x, t=t: t(_clip(x, -0.9, 0.9)),
            lambda x, n=n: n(np.clip(x, x.dtype.type(-0.9), x.dtype.type(0.9))),
        )
    for name, (t, n) in _POSITIVE.items():
        ops[name] = Op(
            lambda x, t=t: t(tirx.abs(x) + _f(0.5)), lambda x, n=n: n(np.abs(x) + x.dtype.type(0.5))
        )
    for name, (t, n, jump) in _STEPS.items():
        ops[name] = Op(t, n, 1, jump)
    for name, (t, n) in _WHERE.items():
        ops[name] = Op(
            lambda a, b, c, t=t: tirx.Select(t(a, b), c, a),
            lambda a, b, c, n=n: np.where(n(a, b), c, a),
            3,
            _gap,
        )
    return ops


OPS: dict[str, Op] = {
    **_operators(),
    "acosh": Op(lambda x: tirx.acosh(tirx.abs(x) + _f(1.5)), lambda x: np.arccosh(np.abs(x) + 1.5)),
    "add": Op(lambda a, b: a + b, np.add, 2),
    "subtract": Op(lambda a, b: a - b, np.subtract, 2),
    "multiply": Op(lambda a, b: a * b, np.multiply, 2),
    "divide": Op(lambda a, b: a / (tirx.abs(b) + _f(0.5)), lambda a, b: a / (np.abs(b) + 0.5), 2),
    "scale": Op(lambda a: a * _f(0.375) + _f(1.25), lambda a: a * 0.375 + 1.25),
    "negative": Op(lambda a: _f(0) - a, np.negative),
    "max": Op(tirx.max, np.maximum, 2),
    "min": Op(tirx.min, np.minimum, 2),
    "relu": Op(lambda a: tirx.max(a, _f(0)), lambda a: np.maximum(a, 0)),
    "clip": Op(lambda a: _clip(a, -0.5, 1.5), lambda a: np.clip(a, -0.5, 1.5)),
    "hypot": Op(lambda a, b: tirx.sqrt(a * a + b * b), np.hypot, 2),
    "pow": Op(
        lambda a, b: tirx.pow(tirx.abs(a) + _f(0.5), _clip(b, -2, 2)),
        lambda a, b: np.power(np.abs(a) + a.dtype.type(0.5), np.clip(b, -2, 2)),
        2,
    ),
    "square": Op(lambda a: tirx.pow(a, _f(2)), np.square),
    "atan2": Op(
        lambda a, b: tirx.atan2(a, tirx.abs(b) + _f(0.5)),
        lambda a, b: np.arctan2(a, np.abs(b) + b.dtype.type(0.5)),
        2,
    ),
    "copysign": Op(tirx.copysign, np.copysign, 2, lambda a, b: np.abs(b)),
    "fmod": Op(
        lambda a, b: tirx.fmod(a, tirx.abs(b) + _f(0.5)),
        _mod,
        2,
        lambda a, b: _whole(a / (np.abs(b) + 0.5)),
    ),
    "if_then_else": Op(
        lambda a, b, c: tirx.if_then_else(a < b, c, b),
        lambda a, b, c: np.where(a < b, c, b),
        3,
        _gap,
    ),
    "logical": Op(
        lambda a, b, c: tirx.Select(tirx.Or(tirx.And(a < b, b < c), tirx.Not(a < c)), a, c - b),
        lambda a, b, c: np.where((a < b) & (b < c) | ~(a < c), a, c - b),
        3,
        lambda a, b, c: np.minimum(_gap(a, b), np.minimum(_gap(b, c), _gap(a, c))),
    ),
    "isnan": Op(
        lambda a: tirx.Select(tirx.isnan(tirx.sqrt(a)), _f(3), a),
        lambda a: np.where(a < 0, a.dtype.type(3), a),
        1,
        np.abs,
    ),
    "isinf": Op(lambda a: tirx.Select(tirx.isinf(a), _f(3), a), lambda a: a),
    "isfinite": Op(lambda a: tirx.Select(tirx.isfinite(a), a, _f(3)), lambda a: a),
    "gelu": Op(
        lambda a: a * (_f(0.5) + tirx.erf(a * _f(0.5**0.5)) * _f(0.5)),
        lambda a: a * (1 + _erf(a * a.dtype.type(0.5**0.5))) / 2,
    ),
    "gelu_tanh": Op(
        lambda a: (
            _f(0.5) * a * (_f(1) + tirx.tanh(_f(0.79788456) * (a + _f(0.044715) * a * a * a)))
        ),
        lambda a: 0.5 * a * (1 + np.tanh(0.79788456 * (a + 0.044715 * a * a * a))),
    ),
    "silu": Op(lambda a: a * tirx.sigmoid(a), lambda a: a / (1 + np.exp(-a))),
}

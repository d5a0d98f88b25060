"""Shorter forms of what differentiation leaves, for results that are stored in 16 bits."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmcap.kernel.epilogue import same

Expr = Any


def shortened(value: Expr) -> Expr:
    """Write the slope of tanh as a logistic's, and ``x + x * q`` as ``x * (1 + q)``."""
    return tvm_ffi.structural_map(value, ((tirx.Sub, _slope), (tirx.Add, _factored)))


def _slope(node: Any) -> Expr:
    """Match ``1 - tanh(u) * tanh(u)``, which is ``4 s (1 - s)`` with the logistic s of ``2 u``."""
    whole, square = node.a, node.b
    if not _is_one(whole) or not isinstance(square, tirx.Mul) or not same(square.a, square.b):
        return node
    if getattr(getattr(square.a, "op", None), "name", "") != "tirx.tanh":
        return node
    argument, dtype = square.a.args[0], str(node.ty)
    logistic = tirx.sigmoid(argument * tirx.const(2, dtype))
    return logistic * tirx.const(4, dtype) * (tirx.const(1, dtype) - logistic)


def _factored(node: Any) -> Expr:
    for x, product in ((node.a, node.b), (node.b, node.a)):
        factors = _factors(product)
        shared = next((i for i, factor in enumerate(factors) if same(factor, x)), None)
        if len(factors) > 1 and shared is not None and _is_read(x):
            rest = [factor for i, factor in enumerate(factors) if i != shared]
            total = rest[0]
            for factor in rest[1:]:
                total = total * factor
            return x * (tirx.const(1, str(node.ty)) + total)
    return node


def _factors(value: Expr) -> list[Expr]:
    if not isinstance(value, tirx.Mul) or not str(value.ty).startswith("float"):
        return [value]
    return [*_factors(value.a), *_factors(value.b)]


def _is_read(value: Expr) -> bool:
    """Whether a value is read from memory, widened or not: cheap to write down twice."""
    value = value.value if isinstance(value, tirx.Cast) else value
    return isinstance(value, tvm.ir.TensorLoad)


def _is_one(value: Expr) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value == 1.0

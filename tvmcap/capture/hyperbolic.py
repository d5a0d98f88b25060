"""Converters for sinh and cosh of float64, for which TVM has no code on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmcap.capture.emitting import Converter, arguments_of, cast, emit, out_dtype

#: Divisors of x * x in the nested series of sinh(x) / x, from the innermost; below 0.5 it is exact
#: to float64.
_SERIES = (156.0, 110.0, 72.0, 42.0, 20.0, 6.0)


def _hyperbolic(node: fx.Node, importer: Any) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    name, x = node.target.__name__, arguments_of(node, importer)["self"]
    if out_dtype(node) != "float64":
        return importer.convert_map[name](node)

    def do(op: Callable[..., relax.Expr], *values: Any) -> Any:
        made = [relax.const(v, "float64") if isinstance(v, float) else v for v in values]
        return emit(importer, op(*made))

    multiply, divide, add = relax.op.multiply, relax.op.divide, relax.op.add
    x = cast(importer, x, "float64")
    size = do(relax.op.abs, x)
    root = do(relax.op.exp, do(multiply, size, 0.5))  # exp of it all overflows before cosh does
    large, small = do(multiply, do(multiply, root, 0.5), root), do(divide, 0.5, root)
    small = do(divide, small, root)
    if name == "cosh.default":
        return do(add, large, small)
    square, series = do(multiply, x, x), 1.0
    for divisor in _SERIES:
        series = do(add, do(multiply, do(divide, square, divisor), series), 1.0)
    far = do(multiply, do(relax.op.sign, x), do(relax.op.subtract, large, small))
    return do(relax.op.where, do(relax.op.less, size, 0.5), do(multiply, x, series), far)


HYPERBOLIC: dict[str, Converter] = {
    "sinh.default": _hyperbolic,
    "cosh.default": _hyperbolic,
}

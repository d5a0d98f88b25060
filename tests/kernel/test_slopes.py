"""Shorter forms of what differentiation leaves: the same values, fewer instructions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.kernel.slopes import shortened

X = tirx.decl_buffer((8,), "float32", "x")
Y = tirx.decl_buffer((8,), "float32", "y")
x, y = X[0], Y[0]
ONE, TWO, FOUR = (T.float32(n) for n in (1, 2, 4))


def logistic(u: Any) -> Any:
    return tirx.sigmoid(u * TWO)


CASES = {
    "slope of tanh": (ONE - T.tanh(x) * T.tanh(x), logistic(x) * FOUR * (ONE - logistic(x))),
    "not of one argument": (ONE - T.tanh(x) * T.tanh(y), None),
    "not from one": (TWO - T.tanh(x) * T.tanh(x), None),
    "not of tanh": (ONE - T.exp(x) * T.exp(x), None),
    "a factor on the right": (x + x * x * x * TWO, x * (ONE + x * x * TWO)),
    "a factor on the left": (y * x + x, x * (ONE + y)),
    "no factor in common": (x + y * TWO, None),
    "twice the same": (x + x, None),
    "what is computed stays": (T.exp(x) + T.exp(x) * y, None),
}


@pytest.mark.parametrize("name", CASES)
def test_forms(name: str) -> None:
    before, after = CASES[name]
    tvm.ir.assert_structural_equal(shortened(before), before if after is None else after)


def evaluate(value: Any, known: dict[Any, Any]) -> Any:
    """Compute an expression of numbers, the two buffers and functions, in float64."""
    if isinstance(value, tirx.FloatImm):
        return value.value
    if isinstance(value, tvm.ir.TensorLoad):
        return known[value.source.name]
    if isinstance(value, tvm.ir.Call):
        functions: dict[str, Callable[[Any], Any]] = {
            "tirx.tanh": np.tanh,
            "tirx.sigmoid": lambda u: 1 / (1 + np.exp(-u)),
        }
        return functions[value.op.name](evaluate(value.args[0], known))
    a, b = evaluate(value.a, known), evaluate(value.b, known)
    kinds = {tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply}
    return kinds[type(value)](a, b)


def test_the_slope_of_gelu_has_the_same_values() -> None:
    """As PyTorch decomposes it (gelu_backward, tanh)."""
    root = T.float32(math.sqrt(2 / math.pi))
    inner = (x + x * x * x * T.float32(0.044715)) * root
    tanh = T.tanh(inner)
    slope = (x * x * T.float32(3 * 0.044715) + ONE) * root
    half = T.float32(0.5)
    before = y * ((tanh + ONE) * half + x * half * (ONE - tanh * tanh) * slope)
    after = shortened(before)
    assert not tvm_ffi.structural_equal(before, after)
    known = {"x": np.linspace(-12, 12, 4001), "y": np.linspace(-3, 3, 4001)}
    np.testing.assert_allclose(evaluate(after, known), evaluate(before, known), atol=1e-12)

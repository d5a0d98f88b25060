"""Numbers that are made of sizes and are no whole numbers, such as 1 / B, as scalar tensors."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvmcap.capture.emitting import emit, operand

_WIDE = "float64"


def scalar(importer: Any, expr: Any) -> Any:
    """Return the Relax scalar, of float64, of a sympy expression of sizes.

    Raises ValueError for an expression that has no such form.
    """
    if expr.is_Integer or expr.is_symbol or type(expr).__name__ in _WHOLE:
        return operand(importer, importer.symbols.whole(expr), _WIDE)
    if expr.is_number:
        return relax.const(float(expr), _WIDE)
    kind = type(expr).__name__
    if kind == "Pow" and expr.args[1].is_Integer and int(expr.args[1]) == -1:
        one = relax.const(1.0, _WIDE)
        return emit(importer, relax.op.divide(one, scalar(importer, expr.args[0])))
    if kind not in _OPERATORS:
        raise ValueError(f"a number is {expr}; known are sums, products and quotients of sizes")
    parts = [scalar(importer, arg) for arg in expr.args]
    total = parts[0]
    for part in parts[1:]:
        total = emit(importer, _OPERATORS[kind](total, part))
    return total


_WHOLE = ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "Min", "Max")
_OPERATORS = {
    "Add": relax.op.add,
    "Mul": relax.op.multiply,
    "FloatTrueDiv": relax.op.divide,
    "IntTrueDiv": relax.op.divide,
    "ToFloat": relax.op.add,
}

"""The symbols of an exported graph: their names for the user, and their Relax variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import tvm
from tvm import tirx

from tvmcap.base.errors import CaptureError
from tvmcap.base.signature import DimSpec, Size
from tvmcap.capture.shapes import Free

_TRIED = 1024
"""Sizes from the least on among which the first that suffices is sought."""


class Symbols:
    """The symbols of an exported graph: their names for the user, and their Relax variables."""

    def __init__(self, free: Free, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Match torch's symbols with the names through the shapes of the graph's inputs.

        Raises CaptureError where a dynamic dimension came out fixed.
        """
        self.names: dict[str, str] = {}
        self.bounds = {name: (dim.min, dim.max) for name, dim in free.dims.items()}
        self.vars = {name: tirx.Var(name, "int64") for name in free.dims}
        self._needed: set[tuple[Any, int]] = set()
        self.analyzer = tvm.sym.Analyzer()
        for name, (low, high) in self.bounds.items():
            bound = tvm.sym.ConstIntBound(
                low, tvm.sym.ConstIntBound.POS_INF if high is None else high
            )
            self.analyzer.update(self.vars[name], bound)
        for (leaf, axis), name in free.where.items():
            size = inputs[leaf].shape[axis]
            if not isinstance(size, torch.SymInt) or not size.node.expr.is_symbol:
                raise CaptureError(
                    f"dimension {name!r} ({names[leaf]}.shape[{axis}]) came out as {size}: the"
                    " code fixes it. Make it"
                    " static, or remove what depends on its value"
                )
            self.names[str(size.node.expr)] = name

    def text(self, size: int | torch.SymInt) -> Size:
        """Return a size as an int, or as arithmetic on dimension names."""
        return size if isinstance(size, int) else self._fold(size.node.expr, _Text(self.names))

    def expr(self, size: int | torch.SymInt) -> Any:
        """Return a size as an int or as a TIR expression."""
        return size if isinstance(size, int) else self.whole(size.node.expr)

    def whole(self, expr: Any) -> Any:
        """Return a sympy expression of symbols as an int or as a TIR expression."""
        values = {symbol: self.vars[name] for symbol, name in self.names.items()}
        return self.simplify(self._fold(expr, _Expr(values)))

    def simplify(self, expr: Any) -> Any:
        """Simplify a size within the bounds of the dimensions; a known one becomes an int."""
        if isinstance(expr, int):
            return expr
        expr = self.analyzer.simplify(expr)
        return int(expr) if isinstance(expr, tirx.IntImm) else expr

    def dims(self) -> tuple[DimSpec, ...]:
        """Return the dimensions with the bounds that hold by now."""
        return tuple(DimSpec(name, *bounds) for name, bounds in self.bounds.items())

    def need(self, size: int | torch.SymInt, least: int) -> None:
        """Bound a dimension from below so that ``size`` is at least ``least``.

        The size that was traced is. Sizes of several dimensions, but for products that may not be
        0, bound none.
        """
        if not isinstance(size, int) and (size.node.expr, least) not in self._needed:
            self._needed.add((size.node.expr, least))
            self._need(size.node.expr, least)

    def _need(self, expr: Any, least: int) -> None:
        if expr.is_Mul and least == 1 and len(expr.free_symbols) > 1:
            for factor in expr.args:
                self._need(factor, 1)
        symbols = list(expr.free_symbols)
        name = self.names.get(str(symbols[0])) if len(symbols) == 1 else None
        if name is None:
            return
        low, high = self.bounds[name]
        tried = range(low, low + _TRIED) if expr != symbols[0] else (max(low, least),)
        first = next((n for n in tried if _holds(expr, symbols[0], n, least)), low)
        self.bounds[name] = (first, high)

    def is_true(self, condition: Any) -> bool:
        """Whether a condition on sizes holds for all that the dimensions admit."""
        return bool(self.analyzer.can_prove(condition))

    def _fold(self, expr: Any, out: _Text | _Expr) -> Any:
        if expr.is_Integer:
            return out.number(int(expr))
        if expr.is_symbol:
            if str(expr) not in self.names:
                raise KeyError(str(expr))
            return out.symbol(str(expr))
        kind = type(expr).__name__
        if kind == "Pow" and expr.args[1].is_Integer and int(expr.args[1]) > 0:
            args = [self._fold(expr.args[0], out)] * int(expr.args[1])
            kind = "Mul"
        else:
            args = [self._fold(arg, out) for arg in expr.args]
        if kind not in _OPERATORS:
            raise CaptureError(
                f"a size is {expr}, which the library cannot express; known: + - * // % min max"
            )
        total = args[0]
        for arg in args[1:]:
            total = out.binary(_OPERATORS[kind], total, arg)
        return total


def _holds(expr: Any, symbol: Any, value: int, least: int) -> bool:
    try:
        return bool(expr.subs(symbol, value) >= least)
    except ZeroDivisionError:
        return False


_OPERATORS = {
    "Add": "+",
    "Mul": "*",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Min": "min",
    "Max": "max",
}


class _Text:
    """Writes a size as text."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def number(self, value: int) -> str:
        return str(value) if value >= 0 else f"({value})"

    def symbol(self, name: str) -> str:
        return self.names[name]

    def binary(self, op: str, a: str, b: str) -> str:
        if op in ("min", "max"):
            return f"{op}({a}, {b})"
        return " ".join((_wrap(a), op, _wrap(b))) if op != "+" else f"{a} + {b}"


def _wrap(text: str) -> str:
    return text if re.fullmatch(r"\w+|\(.*\)", text) and text.count("(") < 2 else f"({text})"


class _Expr:
    """Writes a size as a TIR expression."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, value: int) -> Any:
        return tirx.IntImm("int64", value)

    def symbol(self, name: str) -> Any:
        return self.values[name]

    def binary(self, op: str, a: Any, b: Any) -> Any:
        if op in ("+", "*"):
            return a + b if op == "+" else a * b
        return {"//": tirx.floordiv, "%": tirx.floormod, "min": tirx.min, "max": tirx.max}[op](a, b)

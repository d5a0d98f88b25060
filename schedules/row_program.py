"""Row programs: what a PrimFunc computes whose blocks share one space of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmcap.schedules.cpu_build import product
from tvmcap.schedules.gemm_match import evaluate

Expr = Any


@dataclass(frozen=True, eq=False)
class Value:
    """One value at a point (row, column).

    Attributes
    ----------
    var: stands for the value in the expressions of others.
    expr: of a load the flat index into ``buffer``; of a reduction what is combined; else the value.
        It is made of the program's row and column and of the variables of earlier values.
    phase: number of reductions in turn that the expression waits for.
    by_row, by_column: whether it differs between rows, between columns.
    buffer: of a load the parameter.
    combine, start: of a reduction the node class (Add, Mul, Max, Min) and its identity.
    """

    var: Any
    expr: Expr
    phase: int
    by_row: bool
    by_column: bool
    buffer: Any = None
    combine: Any = None
    start: Expr = None

    @property
    def dtype(self) -> str:
        """Element type."""
        return str(self.var.ty)

    @property
    def kind(self) -> str:
        """What it is: "load", "reduction" or "stage"."""
        if self.combine is not None:
            return "reduction"
        return "stage" if self.buffer is None else "load"


@dataclass(frozen=True, eq=False)
class Output:
    """``buffer.flat[index] = value``; ``by_column`` where a row has more than one element of it."""

    buffer: Any
    index: Expr
    value: Value
    by_column: bool


@dataclass(frozen=True, eq=False)
class RowProgram:
    """What a row-wise PrimFunc computes.

    Attributes
    ----------
    row, column: variables of the flat row and the flat column.
    rows: number of rows: an int, or an expression of symbolic dimensions.
    columns: number of columns.
    values: in an order in which they can be computed.
    outputs: parameters written, in the order of parameters.
    params: tensor parameters.
    digest: hash of the whole computation.
    """

    row: Any
    column: Any
    rows: Any
    columns: int
    values: tuple[Value, ...]
    outputs: tuple[Output, ...]
    params: tuple[Any, ...]
    digest: str

    @property
    def trailing(self) -> int:
        """Last dimensions of the first output that are columns, not rows."""
        output, columns, count = self.outputs[0], 1, 0
        while output.by_column and columns < self.columns:
            count += 1
            columns *= int(output.buffer.shape[-count])
        return count

    def key(self) -> dict[str, Any]:
        """Return plain JSON that identifies the workload but for symbolic sizes."""
        return {
            "op": "row",
            "dtypes": [str(p.dtype) for p in self.params],
            "rows": self.rows if isinstance(self.rows, int) else "any",
            "columns": self.columns,
            "digest": self.digest,
        }

    def flops(self, sizes: Mapping[str, int]) -> float:
        """Return the arithmetic nodes of all expressions, once a point that they differ at."""
        rows = evaluate(self.rows, sizes)
        each = 0.0
        for value in self.values:
            if value.kind != "load" and (value.by_column or value.combine is not None):
                each += _operations(value.expr) + (value.combine is not None)
        return rows * self.columns * each

    def bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes of every tensor read or written once."""
        sizes_of = ((evaluate(product(p.shape), sizes), p.dtype) for p in self.params)
        return float(sum(n * tvm.DataType(str(d)).itemsize for n, d in sizes_of))


def identity(combine: Any, dtype: str) -> Expr:
    """Return what leaves every other value as it is: infinities for extremes of floats."""
    if combine in (tirx.Add, tirx.Mul):
        return tirx.const(0 if combine is tirx.Add else 1, dtype)
    if "float" in dtype:
        return tirx.FloatImm(dtype, float("-inf" if combine is tirx.Max else "inf"))
    return tirx.min_value(dtype) if combine is tirx.Max else tirx.max_value(dtype)


def _operations(expr: Expr) -> int:
    found = 0

    def count(node: Any) -> None:
        nonlocal found
        found += 1

    kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tvm.ir.Call)
    tvm_ffi.structural_walk(expr, (kinds, count))
    return found

"""Canonicalize: one form for what means the same, so that later patterns match."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.graph.rewrite import is_op, rebuild, values_of


def canonicalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures common subexpressions are shared and dead code is gone."""
    return _run(
        without_empty(mod),
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
    )


def without_empty(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures no product has a size of 0, for which kernels have no tiles: it is zeros."""

    def emit(_: Any, value: Any) -> Any:
        if not is_op(value, "matmul"):
            return None
        sizes = [*value.args[0].ty.shape.values, *value.args[1].ty.shape.values]
        if not any(isinstance(size, tirx.IntImm) and size.value == 0 for size in sizes):
            return None
        return relax.op.zeros(value.ty.shape, str(value.ty.dtype.dtype))

    values = values_of(mod["main"]).values()
    return mod if all(emit(None, value) is None for value in values) else rebuild(mod, emit)


def fold(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures what depends on constants alone is a constant, parts of a split one too."""
    folded = _run(mod, relax.transform.FoldConstant())
    values = values_of(folded["main"])
    parts = [v for v in values.values() if isinstance(v, relax.TupleGetItem)]
    if not any(isinstance(values.get(part.tuple_value), relax.Tuple) for part in parts):
        return folded
    return fold(relax.transform.CanonicalizeBindings()(folded))  # sees through the tuple


def _run(mod: tvm.IRModule, *steps: tvm.transform.Pass) -> tvm.IRModule:
    for step in (*steps, relax.transform.DeadCodeElimination(["main"])):
        mod = step(mod)
    return mod

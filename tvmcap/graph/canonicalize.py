"""Canonicalize: one form for what means the same, so that later patterns match."""

from __future__ import annotations

import tvm
from tvm import relax


def canonicalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures common subexpressions are shared and dead code is gone."""
    return _run(
        mod, relax.transform.CanonicalizeBindings(), relax.transform.EliminateCommonSubexpr()
    )


def fold(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures what depends on constants alone is a constant."""
    return _run(mod, relax.transform.FoldConstant())


def _run(mod: tvm.IRModule, *steps: tvm.transform.Pass) -> tvm.IRModule:
    for step in (*steps, relax.transform.DeadCodeElimination(["main"])):
        mod = step(mod)
    return mod

"""Canonicalize: one form for what means the same, so that later patterns match."""

from __future__ import annotations

import tvm
from tvm import relax


def canonicalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures constants are folded, common subexpressions shared, and dead code is gone."""
    for step in (
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(["main"]),
    ):
        mod = step(mod)
    return mod

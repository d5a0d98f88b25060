"""Legalize and fuse: one PrimFunc for each group of operators that can share a kernel; main only calls."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, topi

from tvmcap.graph.rewrite import is_op, outputs_of, rebuild


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures main holds only call_tir, one PrimFunc an operator, and each output is a tensor of its own."""
    mod = own_outputs(mod)
    for step in (
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(["main"]),
    ):
        mod = step(mod)
    return mod


def fuse(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures elementwise work sits in the kernel of its producer: one PrimFunc for each fused group."""
    for step in (
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(["main"]),
    ):
        mod = step(mod)
    return mod


def own_outputs(mod: tvm.IRModule) -> tvm.IRModule:
    """Copy each output of main that is an argument, a constant, a view of an argument, or a tensor returned before.

    A library writes its outputs into tensors of the caller, so each needs a kernel that writes it.
    """
    main = mod["main"]
    values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    params, seen, copied = set(main.params), set(), set()
    for i, output in enumerate(outputs_of(main)):
        source = output
        while isinstance(values.get(source), relax.Var) or is_op(values.get(source), "reshape", "flatten"):
            value = values[source]
            source = value if isinstance(value, relax.Var) else value.args[0]
        computed = isinstance(values.get(source), relax.Call)
        if not computed or source in params or source in seen:
            copied.add(i)
        seen.add(source)

    def finish(builder: Any, i: int, output: Any) -> Any:
        return builder.emit_te(topi.identity, output, primfunc_name_hint="copy") if i in copied else output

    return rebuild(mod, lambda builder, value: None, finish) if copied else mod

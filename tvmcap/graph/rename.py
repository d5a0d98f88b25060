"""Names of kernels, and of a module's entry: so that two modules can share a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.graph.rewrite import is_op, rebuild


def prefix_kernels(mod: tvm.IRModule, prefix: str) -> tvm.IRModule:
    """Ensures the name of every PrimFunc starts with ``prefix``; main is in call_tir form."""
    if not prefix:
        return mod
    new: dict[Any, Any] = {}
    for gvar, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc):
            renamed = tvm.ir.GlobalVar(prefix + gvar.name_hint)
            relax.expr._update_type(renamed, gvar.ty)
            new[gvar] = renamed

    def rename(builder: Any, value: Any) -> Any:
        if not is_op(value, "call_tir"):
            return None
        return relax.Call(
            value.op, [new[value.args[0]], *value.args[1:]], value.attrs, value.ty_args
        )

    main = rebuild(mod, rename)["main"]
    kernels = {
        new[g]: f.with_attr("global_symbol", new[g].name_hint)
        for g, f in mod.functions.items()
        if g in new
    }
    return tvm.IRModule({**kernels, tvm.ir.GlobalVar("main"): main}, attrs=mod.attrs)


def join(entries: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Ensures one module holds the ``main`` of each under its name, and all kernels.

    The kernels' names must differ.
    """
    functions: dict[Any, Any] = {}
    for name, mod in entries.items():
        for gvar, func in mod.functions.items():
            if gvar.name_hint == "main":
                functions[tvm.ir.GlobalVar(name)] = func
            else:
                functions[gvar] = func
    return tvm.IRModule(functions)

"""Plain lowering: a module of any stage becomes code without passes of ours."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmcap.kernel import fallback


def plain(mod: tvm.IRModule, target: Any) -> Any:
    """Lower with TVM's passes alone: operators to loops as they come, one allocation a tensor."""
    t = relax.transform
    with target, tvm.transform.PassContext(opt_level=3):
        mod = t.LegalizeOps()(mod)
        if target.kind.name == "cuda":
            mod = _schedule(mod, target)
        for step in (
            t.ToNonDataflow(),
            t.RemovePurityChecking(),
            t.CallTIRRewrite(),
            t.LowerAllocTensor(),
            t.KillAfterLastUse(),
            t.LowerRuntimeBuiltin(),
            t.ComputePrimValue(),
            t.VMShapeLower(),
            t.AttachGlobalSymbol(),
        ):
            mod = step(mod)
        return relax.build(mod, target, relax_pipeline=None)


def _schedule(mod: tvm.IRModule, target: Any) -> tvm.IRModule:
    """Bind loops to threads, without which nothing runs on a GPU."""
    functions = dict(mod.functions.items())
    for gvar, func in functions.items():
        loose = isinstance(func, tvm.tirx.PrimFunc) and "tirx.is_scheduled" not in func.attrs
        functions[gvar] = fallback.schedule(func, target)[0] if loose else func
    return tvm.IRModule(functions, attrs=mod.attrs)

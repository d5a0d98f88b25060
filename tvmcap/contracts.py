"""What each pass ensures, as a check of its result (``TVMCAP_CHECK=1``, and in every test)."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from tvmcap.base.errors import ContractError
from tvmcap.graph.rewrite import is_op


def check(mod: tvm.IRModule, name: str) -> None:
    """Raise ContractError where the module after pass ``name`` breaks the pass's promise."""
    try:
        relax.analysis.well_formed(mod)
    except Exception as e:
        raise ContractError(f"the module after pass {name!r} is not well-formed: {e}") from e
    main = mod["main"]
    calls = [
        b.value
        for block in main.body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
    ]
    if name in ("legalize", "fuse", "schedule"):
        for call in calls:
            if not is_op(call, "call_tir"):
                raise ContractError(
                    f"after pass {name!r} main still calls {getattr(call.op, 'name', call.op)}; "
                    "only call_tir is allowed"
                )
    kernels = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    if name == "schedule":
        for func in kernels:
            if not (func.attrs or {}).get("tirx.is_scheduled", False):
                raise ContractError(
                    "after pass 'schedule' a PrimFunc is not scheduled; "
                    "this is a bug in kernel.apply"
                )
    if name == "plan" and any(is_op(c, "call_tir", "builtin.alloc_tensor") for c in calls):
        raise ContractError("after pass 'plan' main still allocates tensors without a plan")

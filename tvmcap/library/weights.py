"""Weights too large for the library itself become arguments, bound from a file beside it."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax
from tvm.ir import GenericConst

LIMIT = 512 << 20
"""Bytes of weights that a library holds; beyond it linking takes minutes and much memory."""


def constants(main: Any) -> list[Any]:
    """List the distinct tensors that main holds, in order of first use."""
    found: dict[Any, None] = {}

    def see(expr: Any) -> None:
        if isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType):
            found[expr] = None

    relax.analysis.post_order_visit(main, see)
    return list(found)


def nbytes(main: Any) -> int:
    """Sum the bytes of the tensors that main holds."""
    return sum(_bytes(c) for c in constants(main))


def lift(mod: tvm.IRModule, limit: int = LIMIT) -> tuple[tvm.IRModule, dict[str, Any] | None]:
    """Ensures main holds at most ``limit`` bytes of weights: above it all become parameters.

    They stand between the inputs and the outputs. Returns the module, and the weights by name in
    calling order or None where they stay inside.
    """
    main = mod["main"]
    found = constants(main)
    if sum(map(_bytes, found)) <= limit:
        return mod, None
    params = {c: relax.Var(f"weight{i}", c.ty) for i, c in enumerate(found)}
    body = _Lift(params).visit_expr(main.body)
    outputs = int(main.attrs["tvmcap.outputs"])
    inputs, outs = list(main.params)[:-outputs], list(main.params)[-outputs:]
    lifted = relax.Function(
        [*inputs, *params.values(), *outs], body, main.ret_ty, main.is_pure, main.attrs
    )
    functions = {**dict(mod.functions.items()), mod.get_global_var("main"): lifted}
    return tvm.IRModule(functions, attrs=mod.attrs), {v.name: c.value for c, v in params.items()}


def _bytes(constant: Any) -> int:
    count = math.prod(int(extent) for extent in constant.value.shape)
    return count * int(tvm.DataType(str(constant.value.dtype)).itemsize)


@relax.expr_functor.mutator
class _Lift(relax.PyExprMutator):  # type: ignore[misc]
    """Replaces constants by parameters."""

    def __init__(self, params: dict[Any, Any]) -> None:
        super().__init__()
        self.params = params

    def visit_generic_const_(self, op: Any) -> Any:
        return self.params.get(op, op)

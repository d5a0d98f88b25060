"""Vendor: matrix products left to torch's own kernels, where the user wants that."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx

from tvmcap.graph.rewrite import is_op, rebuild

MATMUL = "tvmcap.torch.matmul"
"""The global function that a kernel calls: ``(a, b, out, dtype, transpose a, transpose b)``."""
CALLS = "tvmcap.vendor"
"""Attribute of a PrimFunc that only calls a global function: its name."""
_OPAQUE = 8


def leave_matmuls(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures each matmul is a kernel of its own that calls torch, in its operands' dtype."""
    walk = _Leave()
    return relax.transform.DeadCodeElimination(["main"])(rebuild(mod, walk.emit))


class _Leave:
    """Emits main anew; ``stored`` maps a product in the dtype of its sums to torch's result."""

    def __init__(self) -> None:
        self.stored: dict[Any, Any] = {}

    def emit(self, builder: Any, value: Any) -> Any:
        """Return what to bind instead of a value, or None."""
        if is_op(value, "astype"):
            result = self.stored.get(value.args[0])
            same = result is not None and result.ty.dtype == value.ty.dtype
            return result if same else None
        if not is_op(value, "matmul"):
            return None
        (a, trans_a), (b, trans_b) = (_untransposed(builder, x) for x in value.args)
        if a.ty.dtype != b.ty.dtype:
            return None
        dtype = str(a.ty.dtype.dtype)
        expression = _call(value.ty.shape.values, dtype, trans_a, trans_b)
        attrs = {"op_pattern": _OPAQUE, "tirx.is_scheduled": True, CALLS: MATMUL}
        call = builder.call_te(
            expression, a, b, primfunc_name_hint="torch_matmul", primfunc_attrs=attrs
        )
        if value.ty.dtype == a.ty.dtype:
            return call
        result = builder.emit(call)
        wide = builder.emit(relax.op.astype(result, str(value.ty.dtype.dtype)))
        self.stored[wide] = result
        return wide


def _untransposed(builder: Any, operand: Any) -> tuple[Any, bool]:
    """Return what an operand is the transpose of, and whether it is one."""
    source: Any = None
    if isinstance(operand, relax.Var):
        source = builder.lookup_binding(operand)
    if not is_op(source, "permute_dims"):
        return operand, False
    last = operand.ty.ndim - 1
    axes = source.attrs.axes
    order = list(range(last, -1, -1)) if axes is None else [int(axis) for axis in axes]
    swapped = last > 0 and order == [*range(last - 1), last, last - 1]
    return (source.args[0], True) if swapped else (operand, False)


def _call(shape: Any, dtype: str, trans_a: bool, trans_b: bool) -> Any:
    """Tensor expression of a call of torch's matmul on tensors that are stored as said.

    The dtype goes by name: lowered, tensors of bfloat16 are described as of another.
    """

    def torch_matmul(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        return te.extern(
            [list(shape)],
            [a, b],
            lambda ins, outs: tirx.call_packed(MATMUL, *ins, outs[0], dtype, trans_a, trans_b),
            name="torch_matmul",
            dtype=dtype,
        )

    return torch_matmul


def calls(func: Any) -> str | None:
    """Name the global function that a kernel only calls; None for a kernel of its own."""
    name = (func.attrs or {}).get(CALLS)
    return None if name is None else str(name)

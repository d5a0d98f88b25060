"""Layout: data stands the way its kernel reads it, so that no kernel only moves data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.ir import GenericConst

from tvmcap.graph.rewrite import is_op, rebuild

Pack = Callable[[Any, Any, str], "tuple[np.ndarray[Any, Any], Callable[..., te.Tensor]] | None"]
"""(weight [K, N] as a TVM tensor, type of the left operand, result dtype) -> (packed weight, f).

``f(lhs, packed)`` is the tensor expression of the same matmul. None: no kernel wants it packed.
"""


def layout(mod: tvm.IRModule, pack: Pack) -> tvm.IRModule:
    """Ensures constant matmul weights are packed for their kernel, transposes read in place."""

    def emit(builder: Any, value: Any) -> Any:
        if is_op(value, "strided_slice"):
            return _slice_of_own_transpose(builder, value)
        if not is_op(value, "matmul") or value.args[0].ty.ndim < 2:
            return None
        lhs, rhs = value.args
        dtype = str(value.ty.dtype)
        if isinstance(rhs, GenericConst) and rhs.ty.ndim == 2:
            packed = pack(rhs.value, lhs.ty, dtype)
            if packed is None:
                return None
            weight, expression = packed
            return builder.call_te(
                expression, lhs, relax.const(weight), primfunc_name_hint="matmul"
            )
        source = _transposed(builder, rhs)
        if source is None:
            return None
        return builder.call_te(matmul_nt(dtype), lhs, source, primfunc_name_hint="matmul")

    return relax.transform.DeadCodeElimination(["main"])(rebuild(mod, emit))


def _slice_of_own_transpose(builder: Any, value: Any) -> Any:
    """Give each slice of a transposed tensor (q, k and v of one product) a transpose of its own.

    The two fuse, and one kernel moves just the slice; shared, the transpose would be a kernel that
    moves everything once more.
    """
    source: Any = None
    if isinstance(value.args[0], relax.Var):
        source = builder.lookup_binding(value.args[0])
    if not is_op(source, "permute_dims"):
        return None
    own = builder.emit(relax.op.permute_dims(source.args[0], source.attrs.axes))
    return relax.Call(value.op, [own, *value.args[1:]], value.attrs, value.ty_args)


def _transposed(builder: Any, var: Any) -> Any:
    """Return what ``var`` is the transpose of (the last two axes swapped), or None."""
    value: Any = builder.lookup_binding(var) if isinstance(var, relax.Var) else None
    if not is_op(value, "permute_dims"):
        return None
    ndim = value.args[0].ty.ndim
    axes = (
        [int(a) for a in value.attrs.axes]
        if value.attrs.axes is not None
        else list(range(ndim))[::-1]
    )
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    return value.args[0] if ndim >= 2 and axes == swapped else None


def matmul_nt(dtype: str) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Tensor expression of ``a @ b.swapaxes(-1, -2)``, accumulated in ``dtype``.

    The operands are a [..., M, K] and b [..., N, K].
    """

    def matmul(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, a.shape[-1]), name="k")
        batch = max(len(a.shape), len(b.shape)) - 2
        lead = [_broadcast(a, b, batch, i) for i in range(batch)]

        def cell(*index: Any) -> Any:
            left = (*_batch_index(a, index, batch), index[-2], k)
            right = (*_batch_index(b, index, batch), index[-1], k)
            return te.sum(a[left].astype(dtype) * b[right].astype(dtype), axis=k)

        return te.compute((*lead, a.shape[-2], b.shape[-2]), cell, name="matmul")

    return matmul


def _broadcast(a: te.Tensor, b: te.Tensor, batch: int, axis: int) -> Any:
    extents = [
        t.shape[axis - batch + len(t.shape) - 2]
        for t in (a, b)
        if axis - batch + len(t.shape) - 2 >= 0
    ]
    wide = [e for e in extents if not (isinstance(e, tvm.tirx.IntImm) and int(e) == 1)]
    return wide[0] if wide else extents[0]


def _batch_index(t: te.Tensor, index: tuple[Any, ...], batch: int) -> list[Any]:
    own = len(t.shape) - 2
    return [
        0
        if isinstance(t.shape[i], tvm.tirx.IntImm) and int(t.shape[i]) == 1
        else index[batch - own + i]
        for i in range(own)
    ]

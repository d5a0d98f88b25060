"""Layout: data stands the way its kernel reads it, so that no kernel only moves data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.ir import GenericConst

from tvmcap.graph import views
from tvmcap.graph.rewrite import is_op, outputs_of, rebuild, reshape
from tvmcap.graph.views import VIEWS, Operand, View

Product = Callable[[te.Tensor, te.Tensor], te.Tensor]
Pack = Callable[[Any, Any, str], "tuple[np.ndarray[Any, Any], Callable[[str], Product]] | None"]
"""(weight [K, N] as a TVM tensor, type of the left operand, result dtype) -> (packed weight, f).

``f(layout)(lhs, packed)`` is the tensor expression of the same matmul on a left operand of that
layout (see ``matmul``). None: no kernel wants it packed.
"""


def layout(mod: tvm.IRModule, pack: Pack) -> tvm.IRModule:
    """Ensures constant matmul weights are packed for their kernel, transposes read in place."""
    walk = _Layout(mod["main"], pack)
    return relax.transform.DeadCodeElimination(["main"])(rebuild(mod, walk.emit, enter=walk.enter))


class _Layout:
    """Emits main anew.

    Attributes
    ----------
    views: of the new main's tensors, those that are reshapes and transposes of others, seen from
        the first of a chain.
    near: the same, seen from the last of the chain that a kernel has to write.
    reshaped: products that were given another shape than main gives them, and their casts.
    free: variables of the old main whose shape does not matter.
    made: of each constant weight, the packed ones; products that pack it alike share one.
    """

    def __init__(self, main: Any, pack: Pack) -> None:
        self.pack = pack
        self.views: dict[Any, View] = {}
        self.near: dict[Any, View] = {}
        self.reshaped: set[Any] = set()
        self.free = _only_viewed(main)
        self.is_free = False
        self.made: dict[Any, list[Any]] = {}

    def enter(self, var: Any) -> None:
        """Note which binding of the old main comes next."""
        self.is_free = var in self.free

    def emit(self, builder: Any, value: Any) -> Any:
        """Return what to bind instead of a value, or None."""
        if is_op(value, "strided_slice"):
            return _slice_of_own_transpose(builder, value)
        if is_op(value, *VIEWS) and isinstance(value.args[0], relax.Var):
            return self._view(builder, value)
        if is_op(value, "astype") and value.args[0] in self.views:
            return self._cast(builder, value)
        if is_op(value, "matmul") and all(arg.ty.ndim >= 2 for arg in value.args):
            return self._product(builder, value)
        return None

    def _seen(self, tensor: Any) -> View:
        return self.views.get(tensor) or views.whole(tensor)

    def _all_seen(self, tensor: Any) -> list[View]:
        whole = views.whole(tensor)
        return [self.views.get(tensor, whole), self.near.get(tensor, whole), whole]

    def _view(self, builder: Any, value: Any) -> Any:
        """Read a chain of views as one: as nothing, as one reshape, or as the last of the chain."""
        view = views.apply(self._seen(value.args[0]), value)
        if view is None:
            return None
        shape = value.ty.shape.values
        if not view.moved() and views.same_shape(shape, view.source.ty.shape.values):
            return view.source
        var = builder.emit(value if view.moved() else reshape(view.source, shape))
        source = value.args[0]
        written = source in self.views and self.views[source].moved()
        near = views.whole(source) if written else self.near.get(source) or views.whole(source)
        self.views[var], self.near[var] = view, views.apply(near, value) or views.whole(var)
        return var

    def _cast(self, builder: Any, value: Any) -> Any:
        """Cast a product before it is reshaped, so that its kernel can do it."""
        view = self.views[value.args[0]]
        if view.source not in self.reshaped or view.moved():
            return None
        cast = builder.emit(relax.op.astype(view.source, value.attrs.dtype))
        return self._reshape(builder, View(cast, view.dims), value.ty.shape.values)

    def _reshape(self, builder: Any, view: View, shape: Any) -> Any:
        self.reshaped.add(view.source)
        var = builder.emit(reshape(view.source, shape))
        self.views[var] = view
        return var

    def _product(self, builder: Any, value: Any) -> Any:
        lhs, rhs = value.args
        dtype, extents = str(value.ty.dtype.dtype), value.ty.shape.values
        if views.plain(lhs.ty.shape.values[-1]) == 0:
            return None  # an empty sum
        a, b = (Operand.of(*self._all_seen(x)) for x in (lhs, rhs))
        packed, weight = None, _constant(builder, rhs)
        if weight is not None and weight.ty.ndim == 2:
            packed = self.pack(weight.value, lhs.ty, dtype)
            if packed is None and weight is not rhs:
                b = Operand.of(views.whole(weight))
        shapes = views.unfolded(a, b) if self.is_free else None
        stays = shapes is None and not (a.transposed or b.transposed)
        if packed is None and stays and weight in (None, rhs):
            return None
        left, right = shapes or (a.stored, b.stored)
        if packed is None:
            product = matmul(dtype, a.layout("mk"), b.layout("kn"))
            other = b.emit(builder, right)
        else:
            product, other = packed[1](a.layout("mk")), self._packed(weight, relax.const(packed[0]))
        call = builder.call_te(product, a.emit(builder, left), other, primfunc_name_hint="matmul")
        if shapes is None:
            return call
        var = builder.emit(call)
        view = View(var, views.reshape(views.whole(var).dims, extents) or ())
        same = views.same_shape(var.ty.shape.values, extents)
        return var if same else self._reshape(builder, view, extents)

    def _packed(self, weight: Any, new: Any) -> Any:
        """Return a packed weight, the one that another product has where it is the same."""
        made = self.made.setdefault(weight, [])
        for one in made:
            if np.array_equal(one.value.numpy(), new.value.numpy()):
                return one
        made.append(new)
        return new


def _constant(builder: Any, value: Any) -> Any:
    """Return the constant that a value is, or is a cast of; None for another value.

    A quantized weight is a cast constant: its kernel reads it in few bits and widens it itself.
    """
    if isinstance(value, relax.Var):
        bound = builder.lookup_binding(value)
        value = bound.args[0] if is_op(bound, "astype") else None
    return value if isinstance(value, GenericConst) else None


def _only_viewed(main: Any) -> set[Any]:
    """Find the variables that nothing but reshapes and transposes reads, after casts at most."""
    users: dict[Any, list[Any]] = {}
    for block in main.body.blocks:
        for b in block.bindings:
            for var in relax.analysis.free_vars(b.value):
                users.setdefault(var, []).append(b)
    returned = set(outputs_of(main))

    def only_viewed(var: Any) -> bool:
        return var not in returned and all(
            is_op(b.value, *VIEWS) or (is_op(b.value, "astype") and only_viewed(b.var))
            for b in users.get(var, ())
        )

    return {var for var in users if only_viewed(var)}


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


def matmul(dtype: str, left: str = "mk", right: str = "kn") -> Product:
    """Tensor expression of ``a @ b``, accumulated in ``dtype``, on operands stored as said.

    Parameters
    ----------
    dtype: of the result.
    left: "mk" for a stored as [..., M, K], "km" for [..., K, M].
    right: "kn" for b stored as [..., K, N], "nk" for [..., N, K].
    """

    def matmul(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        rows, depth = (-2, -1) if left == "mk" else (-1, -2)
        columns = -1 if right == "kn" else -2
        k = te.reduce_axis((0, a.shape[depth]), name="k")
        batch = max(len(a.shape), len(b.shape)) - 2
        lead = [_broadcast(a, b, batch, i) for i in range(batch)]

        def cell(*index: Any) -> Any:
            row, column = index[-2:]
            x = (*_batch_index(a, index, batch), *((row, k) if left == "mk" else (k, row)))
            y = (*_batch_index(b, index, batch), *((k, column) if right == "kn" else (column, k)))
            return te.sum(a[x].astype(dtype) * b[y].astype(dtype), axis=k)

        return te.compute((*lead, a.shape[rows], b.shape[columns]), cell, name="matmul")

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

"""Quantize: products and convolutions in 8 bits, with scales that fusion draws into kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax
from tvm.ir import GenericConst

from tvmcap.base.quantization import LARGEST
from tvmcap.graph import convolution
from tvmcap.graph.layers import Layer
from tvmcap.graph.rewrite import is_op, outputs_of, rebuild

Array = npt.NDArray[Any]

_TINY = 1e-30
"""Least magnitude that a scale is made of: rows of zeros stay zeros."""


@dataclass(frozen=True)
class Plan:
    """How one layer is quantized.

    Attributes
    ----------
    dtype: ``"int8"`` or ``"float8_e4m3fn"``.
    weight_only: the input keeps its dtype.
    clip: static magnitude that the input's largest quantized value stands for; None for each row's
        own largest, found at run time, or each sample's of a convolution.
    smooth: what each channel of the input is divided by, and of the weight multiplied by; layers of
        one input share it.
    offset: int8 inputs are stored as unsigned bytes, 128 more, which is what dot products of bytes
        on CPUs multiply int8 weights by; the sums are corrected by a constant of each column.
    """

    dtype: str
    weight_only: bool = False
    clip: float | None = None
    smooth: tuple[float, ...] = ()
    offset: bool = False


def quantize(
    mod: tvm.IRModule,
    plans: Mapping[str, Plan],
    found: Sequence[Layer],
    extra: Sequence[Any] = (),
) -> tvm.IRModule:
    """Ensures the planned layers hold 8-bit data and scales; their results keep their dtype.

    Parameters
    ----------
    plans: by the name of a layer; layers without one stay as they are.
    found: what ``layers`` gave for this module.
    extra: variables of main whose values the new main returns after its own outputs.
    """
    walk = _Quantize(mod, {x.y: (x, plans[x.name]) for x in found if x.name in plans})
    new = rebuild(mod, walk.emit, enter=walk.enter, extra=extra)
    return relax.transform.DeadCodeElimination(["main"])(new)


class _Quantize:
    """Emits main anew.

    Attributes
    ----------
    planned: variable of a product in the old main to its layer and plan.
    users: how many bindings and outputs of the old main read a variable.
    inputs: (input, plan, whether channels are last, axes that share a scale) to the quantized input
        and its scale, shared by the layers that read it.
    weights: the constants of 8-bit data, one for the layers that have a weight in common.
    """

    def __init__(self, mod: tvm.IRModule, planned: Mapping[Any, tuple[Layer, Plan]]) -> None:
        self.planned = planned
        self.users = _count_users(mod["main"])
        self.readers: dict[Any, int] = {}
        for layer, plan in planned.values():
            if plan.smooth and not plan.weight_only:
                self.readers[layer.x] = self.readers.get(layer.x, 0) + 1
        self.inputs: dict[tuple[Any, Plan, bool, tuple[int, ...]], tuple[Any, Any]] = {}
        self.smoothed: dict[Any, Any] = {}
        self.weights: dict[tuple[Any, ...], Any] = {}
        self.current: tuple[Layer, Plan] | None = None

    def enter(self, var: Any) -> None:
        """Note which binding of the old main comes next."""
        self.current = self.planned.get(var)

    def emit(self, builder: Any, value: Any) -> Any:
        """Return the quantized layer, or None for what stays."""
        if self.current is None:
            return None
        layer, plan = self.current
        x, out = value.args[0], str(value.ty.dtype.dtype)
        data, scale = quantized_weight(layer.values(), plan)
        if plan.weight_only:
            x = self._smooth(builder, layer, plan, x)
            y = self._mixed(builder, layer, plan, x, data, out)
            y = builder.emit(relax.op.multiply(y, _of_columns(layer, plan, scale)))
            return _cast(builder, y, out)
        q, row = self._input(builder, layer, plan, x)
        y = _cast(builder, self._sums(builder, layer, plan, q, data), "float32")
        if row is None:
            scale = scale * np.float32((plan.clip or 0.0) / LARGEST[plan.dtype])
        else:
            y = builder.emit(relax.op.multiply(y, row))
        y = builder.emit(relax.op.multiply(y, _of_columns(layer, plan, scale)))
        if layer.conv is not None and _is_product(layer, plan):
            y = convolution.channels_first(builder, y)
        return _cast(builder, y, out)

    def _sums(self, builder: Any, layer: Layer, plan: Plan, q: Any, data: Array) -> Any:
        """Return the sums of products in 32 bits."""
        dtype, conv = "int32" if plan.dtype == "int8" else "float32", layer.conv
        if conv is not None and not _is_product(layer, plan):
            return convolution.nest(builder, conv, q, self._weight(layer, plan, data), dtype)
        if conv is not None:
            q = convolution.rows(builder, conv, q, 128 if plan.offset else 0)
        y = builder.emit(relax.op.matmul(q, self._weight(layer, plan, data), out_dtype=dtype))
        if not plan.offset:
            return y
        start = np.int32(-128) * data.sum(axis=0, dtype=np.int32)
        return builder.emit(relax.op.add(y, relax.const(start)))

    def _mixed(self, builder: Any, layer: Layer, plan: Plan, x: Any, data: Array, out: str) -> Any:
        """Multiply by a weight that the kernel widens as it reads it."""
        held = self._weight(layer, plan, data)
        if layer.conv is not None:
            return convolution.nest(builder, layer.conv, x, held, "float32")
        weight = builder.emit(relax.op.astype(held, x.ty.dtype.dtype))
        return _cast(builder, builder.emit(relax.op.matmul(x, weight, out_dtype=out)), "float32")

    def _weight(self, layer: Layer, plan: Plan, data: Array) -> Any:
        """Return the 8-bit weight as what computes the layer takes it."""
        conv = None if _is_product(layer, plan) else layer.conv
        key = layer.weight, plan.dtype, plan.smooth, conv is None
        if key not in self.weights:
            self.weights[key] = relax.const(data if conv is None else conv.weight(data))
        return self.weights[key]

    def _input(self, builder: Any, layer: Layer, plan: Plan, x: Any) -> tuple[Any, Any]:
        """Return the quantized input and the scale of each row, None where it is static."""
        plan, last = _plan_of_input(layer, plan)
        key = x, plan, last, _axes_of_scale(layer, plan, x)
        if key not in self.inputs:
            smooth = self._smooth(builder, layer, plan, x)
            q, row = _quantized_input(builder, smooth, plan, key[-1])
            self.inputs[key] = convolution.channels_last(builder, q) if last else q, row
        return self.inputs[key]

    def _smooth(self, builder: Any, layer: Layer, plan: Plan, x: Any) -> Any:
        """Divide the channels of the input, in the norm that makes it where that is possible."""
        if not plan.smooth:
            return x
        if (x, plan.smooth) not in self.smoothed:
            factor = 1 / np.asarray(plan.smooth, np.float32)
            own = self.users.get(layer.x) == self.readers.get(layer.x)
            folded = _into_norm(builder, x, factor) if own else None
            if folded is None:
                wide = _cast(builder, x, "float32")
                scaled = builder.emit(relax.op.multiply(wide, relax.const(factor)))
                folded = _cast(builder, scaled, str(x.ty.dtype.dtype))
            self.smoothed[x, plan.smooth] = folded
        return self.smoothed[x, plan.smooth]


def _is_product(layer: Layer, plan: Plan) -> bool:
    """Whether a product of matrices computes the layer."""
    return layer.conv is None or (layer.conv.is_product and not plan.weight_only)


def _plan_of_input(layer: Layer, plan: Plan) -> tuple[Plan, bool]:
    """Return how the layer's input is quantized, and whether its channels are to be last.

    Only products of bytes want an offset.
    """
    if _is_product(layer, plan):
        return plan, layer.conv is not None
    return replace(plan, offset=False), False


def _axes_of_scale(layer: Layer, plan: Plan, x: Any) -> tuple[int, ...]:
    """Return the axes whose values share a scale that is found at run time."""
    if plan.clip is not None:
        return ()
    return (-1,) if layer.conv is None else tuple(range(1, x.ty.ndim))


def _of_columns(layer: Layer, plan: Plan, scale: Array) -> Any:
    """Return the scale of each column in the shape that the layer's sums have."""
    if layer.conv is None or _is_product(layer, plan):
        return relax.const(scale)
    return relax.const(scale.reshape(-1, *[1] * len(layer.conv.kernel)))


def quantized_weight(weight: Array, plan: Plan) -> tuple[Array, Array]:
    """Return a float32 weight [K, N] in 8 bits, and the scale [N] of its columns."""
    if plan.smooth:
        weight = weight * np.asarray(plan.smooth, np.float32)[:, None]
    largest = LARGEST[plan.dtype]
    scale = np.maximum(np.abs(weight).max(axis=0), _TINY) / np.float32(largest)
    return rounded(weight / scale, plan.dtype), scale.astype(np.float32)


def rounded(values: Array, dtype: str) -> Array:
    """Round to the nearest value of ``dtype``, within its symmetric range."""
    bound = np.clip(values, -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        whole: Array = np.rint(bound).astype(np.int8)
        return whole
    import ml_dtypes

    narrow: Array = bound.astype(ml_dtypes.float8_e4m3fn)
    return narrow


def _quantized_input(builder: Any, x: Any, plan: Plan, axes: Sequence[int]) -> tuple[Any, Any]:
    """Emit elementwise operators and a maximum over ``axes``, which fuse with what makes ``x``.

    The maximum and the rounding widen a 16-bit ``x`` on their own: were that shared, a product that
    makes ``x`` would take it in and store 32 bits.
    """
    largest = LARGEST[plan.dtype]
    emit = builder.emit

    def const(value: float) -> Any:
        return relax.const(value, "float32")

    made = builder.lookup_binding(x)
    if plan.clip is not None and is_op(made, "reshape") and isinstance(made.args[0], relax.Var):
        q, row = _quantized_input(builder, made.args[0], plan, axes)  # in what makes the source
        return emit(relax.op.reshape(q, made.args[1])), row
    if plan.clip is not None:
        row, inverse = None, const(largest / plan.clip)
    else:
        size = emit(relax.op.abs(_cast(builder, x, "float32")))
        top = emit(relax.op.max(size, axis=list(axes), keepdims=True))
        top = emit(relax.op.maximum(top, const(_TINY)))
        row = emit(relax.op.multiply(top, const(1 / largest)))
        inverse = emit(relax.op.divide(const(largest), top))
    q = emit(relax.op.multiply(_cast(builder, x, "float32"), inverse))
    if plan.dtype == "int8":
        q = emit(relax.op.round(q))
    q = emit(relax.op.clip(q, -largest, largest))
    if plan.offset:
        return emit(relax.op.astype(emit(relax.op.add(q, const(128.0))), "uint8")), row
    return emit(relax.op.astype(q, plan.dtype)), row


def _into_norm(builder: Any, x: Any, factor: Array) -> Any:
    """Multiply the constant weight and bias of the norm that makes ``x``; None for no such norm."""
    norm = builder.lookup_binding(x)
    if not is_op(norm, "nn.layer_norm", "nn.rms_norm"):
        return None
    affine = norm.args[1:]
    last = [int(a) for a in norm.attrs.axes] in ([-1], [x.ty.ndim - 1])
    if not last or not all(
        isinstance(a, GenericConst) and list(a.value.shape) == list(factor.shape) for a in affine
    ):
        return None
    scaled = [relax.const(a.value.numpy() * factor) for a in affine]
    return builder.emit(relax.Call(norm.op, [norm.args[0], *scaled], norm.attrs, norm.ty_args))


def _cast(builder: Any, x: Any, dtype: str) -> Any:
    if not dtype or str(x.ty.dtype.dtype) == dtype:
        return x
    return builder.emit(relax.op.astype(x, dtype))


def _count_users(main: Any) -> dict[Any, int]:
    users: dict[Any, int] = {}
    read = [relax.analysis.free_vars(b.value) for x in main.body.blocks for b in x.bindings]
    for var in [*(v for found in read for v in found), *outputs_of(main)]:
        users[var] = users.get(var, 0) + 1
    return users

"""Converters for normalizations by a tensor's own statistics.

TVM's rules for layer norm and group norm know no float64: there they are written out.
"""

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax

from tvmcap.capture.emitting import HALF, Converter, arguments_of, cast, dtype_of, emit


def _layer_norm(node: fx.Node, importer: Any) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    a = arguments_of(node, importer)
    x = a["input"]
    if dtype_of(x) != "float64":
        return importer.convert_map[node.target.__name__](node)
    rank = len(x.ty.shape)
    axes = list(range(rank - len(a["normalized_shape"]), rank))
    y = _normalized(importer, x, axes, a["eps"])
    y = y if a["weight"] is None else emit(importer, relax.op.multiply(y, a["weight"]))
    y = y if a["bias"] is None else emit(importer, relax.op.add(y, a["bias"]))
    return [y, None, None]


def _group_norm(node: fx.Node, importer: Any) -> Any:
    """Group norm with or without weights; Relax types it for float32 but not for bfloat16."""
    a = arguments_of(node, importer)
    wide = "float32" if dtype_of(a["input"]) in HALF else dtype_of(a["input"])
    x, channels = cast(importer, a["input"], wide), int(a["input"].ty.shape[1])
    weight = cast(importer, _filled(1, channels, x) if a["weight"] is None else a["weight"], wide)
    bias = cast(importer, _filled(0, channels, x) if a["bias"] is None else a["bias"], wide)
    axes = list(range(2, len(x.ty.shape)))
    if wide == "float64":
        return [_group_norm_of_doubles(importer, x, weight, bias, a), None, None]
    norm = relax.op.nn.group_norm(x, weight, bias, int(a["group"]), 1, axes, a["eps"])
    return [cast(importer, emit(importer, norm), dtype_of(a["input"])), None, None]


def _group_norm_of_doubles(
    importer: Any, x: relax.Expr, weight: relax.Expr, bias: relax.Expr, a: dict[str, Any]
) -> Any:
    shape, groups = list(x.ty.shape), int(a["group"])
    parts = relax.op.reshape(x, [shape[0], groups, int(shape[1]) // groups, *shape[2:]])
    parts = emit(importer, parts)
    y = _normalized(importer, parts, list(range(2, len(shape) + 1)), a["eps"])
    y = emit(importer, relax.op.reshape(y, shape))
    along = [int(shape[1]), *[1] * (len(shape) - 2)]
    weight, bias = (emit(importer, relax.op.reshape(part, along)) for part in (weight, bias))
    return emit(importer, relax.op.add(emit(importer, relax.op.multiply(y, weight)), bias))


def _norm_of_itself(node: fx.Node, importer: Any) -> Any:
    """Batch norm by the statistics of ``x`` itself, which instance norm is made of."""
    a = arguments_of(node, importer)
    wide = "float32" if dtype_of(a["input"]) in HALF else dtype_of(a["input"])
    x = cast(importer, a["input"], wide)
    axes = [axis for axis in range(len(x.ty.shape)) if axis != 1]
    y = _normalized(importer, x, axes, a["eps"])
    for name, op in (("weight", relax.op.multiply), ("bias", relax.op.add)):
        if a[name] is not None:
            part = cast(importer, a[name], wide)
            part = emit(importer, relax.op.expand_dims(part, axes))
            y = emit(importer, op(y, part))
    return [cast(importer, y, dtype_of(a["input"])), None, None]


def _normalized(importer: Any, x: relax.Expr, axes: list[int], eps: float) -> Any:
    """Return x of mean 0 and variance 1 over ``axes``.

    Subtracts the mean twice: what is left after once is the rounding of the mean, which torch
    avoids by summing in float64.
    """
    centred = x
    for _ in range(2):
        mean = emit(importer, relax.op.mean(centred, axes, keepdims=True))
        centred = emit(importer, relax.op.subtract(centred, mean))
    square = emit(importer, relax.op.multiply(centred, centred))
    variance = emit(importer, relax.op.mean(square, axes, keepdims=True))
    variance = emit(importer, relax.op.add(variance, relax.const(eps, dtype_of(x))))
    scale = emit(importer, relax.op.rsqrt(variance))
    return emit(importer, relax.op.multiply(centred, scale))


def _filled(value: int, size: int, like: relax.Expr) -> Any:
    full = torch.full((size,), value, dtype=getattr(torch, dtype_of(like)))
    return relax.const(tvm.runtime.from_dlpack(full))


NORMS: dict[str, Converter] = {
    "native_layer_norm.default": _layer_norm,
    "native_group_norm.default": _group_norm,
    "_native_batch_norm_legit.no_stats": _norm_of_itself,
}

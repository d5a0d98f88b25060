"""Converters of ours, where TVM's importer is wrong or loses precision; tests/capture/test_converters.py says how.

Products accumulate in float32 and come out in the input's dtype: a 16-bit ``x @ w`` is ``matmul(out_dtype="float32")``
with a cast behind it, which fusion draws into the kernel. TVM's own converters return float32 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmcap.capture.structure import dtype_name

Converter = Callable[[fx.Node, Any], Any]
HALF = ("float16", "bfloat16")


def dtype_of(x: relax.Expr) -> str:
    """Element type of a Relax tensor as text."""
    return str(x.ty.dtype.dtype)


def _emit(importer: Any, expr: relax.Expr) -> Any:
    return importer.block_builder.emit(expr)


def _cast(importer: Any, x: relax.Expr, dtype: str) -> Any:
    return x if dtype_of(x) == dtype else _emit(importer, relax.op.astype(x, dtype))


def _arguments(node: fx.Node, importer: Any) -> dict[str, Any]:
    """Name every argument of the node, defaults included, with tensors as Relax values."""
    assert isinstance(node.target, torch._ops.OpOverload)
    named = {}
    for i, argument in enumerate(node.target._schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        named[argument.name] = importer._retrieve_args(value)
    return named


def _out_dtype(node: fx.Node) -> str:
    return dtype_name(node.meta["val"].dtype)


def _product(importer: Any, a: relax.Expr, b: relax.Expr) -> Any:
    """``a @ b``, accumulated in float32 where the inputs have 16 bits; the result keeps its 32 bits."""
    wide = "float32" if dtype_of(a) in HALF else None
    return _emit(importer, relax.op.matmul(a, b, out_dtype=wide))


def _matmul(node: fx.Node, importer: Any) -> Any:
    a, b = importer.retrieve_args(node)[:2]
    return _cast(importer, _product(importer, a, b), _out_dtype(node))


def _linear(node: fx.Node, importer: Any) -> Any:
    x, weight, bias = (*importer.retrieve_args(node), None)[:3]
    if len(weight.ty.shape) == 2:
        weight = _emit(importer, relax.op.permute_dims(weight))
    y = _cast(importer, _product(importer, x, weight), _out_dtype(node))
    return y if bias is None else _emit(importer, relax.op.add(y, bias))


def _addmm(node: fx.Node, importer: Any) -> Any:
    a = _arguments(node, importer)
    left, right = (a["mat1"], a["mat2"]) if "mat1" in a else (a["batch1"], a["batch2"])
    y = _cast(importer, _product(importer, left, right), _out_dtype(node))
    if a["alpha"] != 1:
        y = _emit(importer, relax.op.multiply(y, relax.const(a["alpha"], dtype_of(y))))
    if a["beta"] == 0:
        return y
    bias = a["self"]
    if a["beta"] != 1:
        bias = _emit(importer, relax.op.multiply(bias, relax.const(a["beta"], dtype_of(bias))))
    return _emit(importer, relax.op.add(y, bias))


def _convolution(node: fx.Node, importer: Any) -> Any:
    a = _arguments(node, importer)
    x, weight, bias = a["input"], a["weight"], a["bias"]
    rank = len(x.ty.shape) - 2
    common = (x, weight, None, a["stride"], a["padding"], a["dilation"], a["groups"])
    if a["transposed"]:
        convert = getattr(importer, f"_conv_transpose{rank}d_impl")
        y = convert(*common, a["output_padding"])
    else:
        y = getattr(importer, f"_conv{rank}d_impl")(*common)
    y = _cast(importer, y, _out_dtype(node))
    if bias is None:
        return y
    return _emit(importer, relax.op.add(y, _emit(importer, relax.op.reshape(bias, (1, -1, *[1] * rank)))))


def _attention(node: fx.Node, importer: Any) -> Any:
    """softmax(q k^T * scale + mask) v; scores stay in float32, as in torch's fused kernels."""
    a = _arguments(node, importer)
    q, k, v = a["query"], a["key"], a["value"]
    if a["enable_gqa"]:
        repeats = int(q.ty.shape[-3]) // int(k.ty.shape[-3])
        k, v = (_emit(importer, relax.op.repeat(t, repeats, axis=-3)) for t in (k, v))
    rank = len(k.ty.shape)
    axes = [*range(rank - 2), rank - 1, rank - 2]
    scores = _product(importer, q, _emit(importer, relax.op.permute_dims(k, axes)))
    wide = dtype_of(scores)
    scale = a["scale"] if a["scale"] is not None else int(q.ty.shape[-1]) ** -0.5
    scores = _emit(importer, relax.op.multiply(scores, relax.const(scale, wide)))
    mask = a["attn_mask"]
    if a["is_causal"]:
        mask = _causal(importer, scores.ty.shape[-2], scores.ty.shape[-1])
    if mask is not None and dtype_of(mask) == "bool":
        scores = _emit(importer, relax.op.where(mask, scores, relax.const(float("-inf"), wide)))
    elif mask is not None:
        scores = _emit(importer, relax.op.add(scores, _cast(importer, mask, wide)))
    weights = _cast(importer, _emit(importer, relax.op.nn.softmax(scores, axis=-1)), dtype_of(v))
    return _cast(importer, _product(importer, weights, v), _out_dtype(node))


def _causal(importer: Any, rows: Any, columns: Any) -> Any:
    row = _emit(importer, relax.op.expand_dims(_emit(importer, relax.op.arange(rows, dtype="int64")), 1))
    column = _emit(importer, relax.op.arange(columns, dtype="int64"))
    return _emit(importer, relax.op.greater_equal(row, column))


def _batch_norm(node: fx.Node, importer: Any) -> Any:
    """``x * scale + shift`` with scale and shift of the running statistics, which fold into constants."""
    a = _arguments(node, importer)
    x = a["input"]
    statistics = a["running_mean"], a["running_var"]
    mean, variance = (_cast(importer, t, "float32") for t in statistics)
    eps = relax.const(a["eps"], "float32")
    scale = _emit(importer, relax.op.rsqrt(_emit(importer, relax.op.add(variance, eps))))
    if a["weight"] is not None:
        scale = _emit(importer, relax.op.multiply(scale, _cast(importer, a["weight"], "float32")))
    shift = _emit(importer, relax.op.negative(_emit(importer, relax.op.multiply(mean, scale))))
    if a["bias"] is not None:
        shift = _emit(importer, relax.op.add(shift, _cast(importer, a["bias"], "float32")))
    shape = (1, -1, *[1] * (len(x.ty.shape) - 2))
    scale, shift = (_emit(importer, relax.op.reshape(t, shape)) for t in (scale, shift))
    y = _emit(importer, relax.op.multiply(_cast(importer, x, "float32"), scale))
    return [_cast(importer, _emit(importer, relax.op.add(y, shift)), dtype_of(x)), None, None]


def _binary(op: Callable[..., relax.Expr]) -> Converter:
    """Elementwise operator on torch's promoted dtype, with ``alpha``; TVM's casts a scalar to the tensor's dtype."""

    def convert(node: fx.Node, importer: Any) -> Any:
        metas = [n.meta["val"] if isinstance(n, fx.Node) else n for n in node.args[:2]]
        dtype = dtype_name(torch.result_type(*metas))
        if op is relax.op.divide:
            dtype = _out_dtype(node)
        a, b = (_operand(importer, v, dtype) for v in importer.retrieve_args(node)[:2])
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if alpha != 1:
            b = _emit(importer, relax.op.multiply(b, relax.const(alpha, dtype)))
        return _emit(importer, op(a, b))

    return convert


def _operand(importer: Any, value: Any, dtype: str) -> Any:
    if isinstance(value, bool | int | float):
        return relax.const(value, dtype)
    if not isinstance(value.ty, relax.TensorType):  # a symbolic size
        value = _emit(importer, relax.op.shape_to_tensor(relax.ShapeExpr([value])))
        value = _emit(importer, relax.op.reshape(value, ()))
    return _cast(importer, value, dtype)


def _reversed_subtract(node: fx.Node, importer: Any) -> Any:
    a = _arguments(node, importer)
    dtype = _out_dtype(node)
    x = _operand(importer, a["self"], dtype)
    if a["alpha"] != 1:
        x = _emit(importer, relax.op.multiply(x, relax.const(a["alpha"], dtype)))
    return _emit(importer, relax.op.subtract(_operand(importer, a["other"], dtype), x))


def _softmax(op: Callable[..., relax.Expr]) -> Converter:
    def convert(node: fx.Node, importer: Any) -> Any:
        x, axis = importer.retrieve_args(node)[:2]
        return _emit(importer, op(_cast(importer, x, _out_dtype(node)), axis=axis))

    return convert


def _variance(node: fx.Node, importer: Any) -> Any:
    """Variance with torch's ``correction``, which TVM's converter ignores."""
    a = _arguments(node, importer)
    x, axes = a["self"], a["dim"]
    axes = list(range(len(x.ty.shape))) if not axes else [int(d) % len(x.ty.shape) for d in axes]
    count = 1
    for axis in axes:
        count *= int(x.ty.shape[axis])
    y = _emit(importer, relax.op.variance(x, axes, keepdims=bool(a["keepdim"])))
    correction = 1 if a["correction"] is None else a["correction"]
    factor = count / (count - correction) if count > correction else float("nan")
    return y if factor == 1 else _emit(importer, relax.op.multiply(y, relax.const(factor, dtype_of(y))))


def _embedding(node: fx.Node, importer: Any) -> Any:
    """Rows of a table; an index outside reads the nearest row, where TVM's converter reads outside memory."""
    weight, index = importer.retrieve_args(node)[:2]
    return _emit(importer, relax.op.take(weight, index, axis=0, mode="clip"))


def _index_select(node: fx.Node, importer: Any) -> Any:
    x, axis, index = importer.retrieve_args(node)[:3]
    return _emit(importer, relax.op.take(x, index, axis=axis, mode="clip"))


def _select(node: fx.Node, importer: Any) -> Any:
    """One index of an axis as a slice; TVM's converter reads outside memory at a negative index."""
    x, axis, index = importer.retrieve_args(node)[:3]
    axis %= len(x.ty.shape)
    start = index + x.ty.shape[axis] if isinstance(index, int) and index < 0 else index
    part = _emit(importer, relax.op.strided_slice(x, [axis], [start], [start + 1]))
    return _emit(importer, relax.op.squeeze(part, [axis]))


def _index(node: fx.Node, importer: Any) -> Any:
    """Advanced indexing; a single index wraps around, so that negative ones count from the end."""
    x, indices = importer.retrieve_args(node)[:2]
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(used) == 1 and dtype_of(used[0][1]) not in ("bool", "uint8"):
        return _emit(importer, relax.op.take(x, used[0][1], axis=used[0][0], mode="wrap"))
    return importer._index_tensor(node)


CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _matmul),
    **dict.fromkeys(("addmm.default", "baddbmm.default"), _addmm),
    "linear.default": _linear,
    "convolution.default": _convolution,
    "scaled_dot_product_attention.default": _attention,
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    **{f"add.{kind}": _binary(relax.op.add) for kind in ("Tensor", "Scalar")},
    **{f"sub.{kind}": _binary(relax.op.subtract) for kind in ("Tensor", "Scalar")},
    **{f"mul.{kind}": _binary(relax.op.multiply) for kind in ("Tensor", "Scalar")},
    **{f"div.{kind}": _binary(relax.op.divide) for kind in ("Tensor", "Scalar")},
    **{f"eq.{kind}": _binary(relax.op.equal) for kind in ("Tensor", "Scalar")},
    **{f"ne.{kind}": _binary(relax.op.not_equal) for kind in ("Tensor", "Scalar")},
    **{f"lt.{kind}": _binary(relax.op.less) for kind in ("Tensor", "Scalar")},
    **{f"le.{kind}": _binary(relax.op.less_equal) for kind in ("Tensor", "Scalar")},
    **{f"gt.{kind}": _binary(relax.op.greater) for kind in ("Tensor", "Scalar")},
    **{f"ge.{kind}": _binary(relax.op.greater_equal) for kind in ("Tensor", "Scalar")},
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _reversed_subtract),
    "_softmax.default": _softmax(relax.op.nn.softmax),
    "_log_softmax.default": _softmax(relax.op.nn.log_softmax),
    "var.correction": _variance,
    "embedding.default": _embedding,
    "index_select.default": _index_select,
    "select.int": _select,
    "index.Tensor": _index,
}

"""Converters of matmul, linear, convolution, attention and batch norm.

Products accumulate in float32 and come out in the input's dtype: a 16-bit ``x @ w`` is
``matmul(out_dtype="float32")`` with a cast behind it, which fusion draws into the kernel. TVM's own
converters return float32 there.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from tvm import relax

from tvmcap.capture.emitting import HALF, Converter, arguments_of, cast, dtype_of, emit, out_dtype


def _product(importer: Any, a: relax.Expr, b: relax.Expr) -> Any:
    """Multiply ``a @ b``, in float32 where the inputs have 16 bits."""
    wide = "float32" if dtype_of(a) in HALF else None
    return emit(importer, relax.op.matmul(a, b, out_dtype=wide))


def _matmul(node: fx.Node, importer: Any) -> Any:
    a, b = importer.retrieve_args(node)[:2]
    return cast(importer, _product(importer, a, b), out_dtype(node))


def _linear(node: fx.Node, importer: Any) -> Any:
    x, weight, bias = (*importer.retrieve_args(node), None)[:3]
    if len(weight.ty.shape) == 2:
        weight = emit(importer, relax.op.permute_dims(weight))
    y = cast(importer, _product(importer, x, weight), out_dtype(node))
    return y if bias is None else emit(importer, relax.op.add(y, bias))


def _addmm(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    left, right = (a["mat1"], a["mat2"]) if "mat1" in a else (a["batch1"], a["batch2"])
    y = cast(importer, _product(importer, left, right), out_dtype(node))
    if a["alpha"] != 1:
        y = emit(importer, relax.op.multiply(y, relax.const(a["alpha"], dtype_of(y))))
    if a["beta"] == 0:
        return y
    bias = a["self"]
    if a["beta"] != 1:
        bias = emit(importer, relax.op.multiply(bias, relax.const(a["beta"], dtype_of(bias))))
    return emit(importer, relax.op.add(y, bias))


_WINDOW = {
    "strides": "stride",
    "padding": "padding",
    "dilation": "dilation",
    "groups": "groups",
}
"""Arguments of Relax's convolutions by those of torch's."""


def _wide(x: relax.Expr) -> str:
    """Element type to accumulate ``x`` in."""
    return "float64" if dtype_of(x) == "float64" else "float32"


def _convolution(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    x, weight, bias = a["input"], a["weight"], a["bias"]
    rank = len(x.ty.shape) - 2
    axes = "DHW"[-rank:]
    options = {name: a[key] for name, key in _WINDOW.items()}
    options |= {"data_layout": f"NC{axes}", "out_dtype": _wide(x)}
    if a["transposed"]:
        op = getattr(relax.op.nn, f"conv{rank}d_transpose")
        more = {"kernel_layout": f"IO{axes}", "output_padding": a["output_padding"]}
    else:
        op, more = getattr(relax.op.nn, f"conv{rank}d"), {"kernel_layout": f"OI{axes}"}
    y = cast(importer, emit(importer, op(x, weight, **options, **more)), out_dtype(node))
    if bias is None:
        return y
    return emit(
        importer, relax.op.add(y, emit(importer, relax.op.reshape(bias, (1, -1, *[1] * rank))))
    )


def _attention(node: fx.Node, importer: Any) -> Any:
    """softmax(q k^T * scale + mask) v; scores stay in float32, as in torch's fused kernels.

    A query that the given mask keeps from every key comes to 0, as in PyTorch.
    """
    a = arguments_of(node, importer)
    q, k, v = a["query"], a["key"], a["value"]
    if a["enable_gqa"]:
        repeats = int(q.ty.shape[-3]) // int(k.ty.shape[-3])
        k, v = (emit(importer, relax.op.repeat(t, repeats, axis=-3)) for t in (k, v))
    rank = len(k.ty.shape)
    axes = [*range(rank - 2), rank - 1, rank - 2]
    scores = _product(importer, q, emit(importer, relax.op.permute_dims(k, axes)))
    wide = dtype_of(scores)
    scale = a["scale"] if a["scale"] is not None else int(q.ty.shape[-1]) ** -0.5
    scores = emit(importer, relax.op.multiply(scores, relax.const(scale, wide)))
    given, mask = a["attn_mask"], a["attn_mask"]
    if a["is_causal"]:
        mask = _causal(importer, scores.ty.shape[-2], scores.ty.shape[-1])
    if mask is not None and dtype_of(mask) == "bool":
        scores = emit(importer, relax.op.where(mask, scores, relax.const(float("-inf"), wide)))
    elif mask is not None:
        scores = emit(importer, relax.op.add(scores, cast(importer, mask, wide)))
    weights = emit(importer, relax.op.nn.softmax(scores, axis=-1))
    if given is not None:  # the softmax of nothing but -inf is NaN
        blind = _blind(importer, given)
        weights = emit(importer, relax.op.where(blind, relax.const(0.0, wide), weights))
    weights = cast(importer, weights, dtype_of(v))
    return cast(importer, _product(importer, weights, v), out_dtype(node))


def _blind(importer: Any, mask: relax.Expr) -> Any:
    """Tell, for a mask [..., queries, keys], which queries see no key, as [..., queries, 1]."""
    if dtype_of(mask) == "bool":
        hidden = emit(importer, relax.op.logical_not(mask))
    else:
        hidden = emit(importer, relax.op.equal(mask, relax.const(float("-inf"), dtype_of(mask))))
    keys = emit(importer, relax.op.astype(hidden, "int8"))
    least = emit(importer, relax.op.min(keys, axis=-1, keepdims=True))
    return emit(importer, relax.op.greater(least, relax.const(0, "int8")))


def _causal(importer: Any, rows: Any, columns: Any) -> Any:
    row = emit(
        importer, relax.op.expand_dims(emit(importer, relax.op.arange(rows, dtype="int64")), 1)
    )
    column = emit(importer, relax.op.arange(columns, dtype="int64"))
    return emit(importer, relax.op.greater_equal(row, column))


def _batch_norm(node: fx.Node, importer: Any) -> Any:
    """Make ``x * scale + shift`` of the running statistics, which fold into constants."""
    a = arguments_of(node, importer)
    x = a["input"]
    wide = _wide(x)
    statistics = a["running_mean"], a["running_var"]
    mean, variance = (cast(importer, t, wide) for t in statistics)
    eps = relax.const(a["eps"], wide)
    scale = emit(importer, relax.op.rsqrt(emit(importer, relax.op.add(variance, eps))))
    if a["weight"] is not None:
        scale = emit(importer, relax.op.multiply(scale, cast(importer, a["weight"], wide)))
    shift = emit(importer, relax.op.negative(emit(importer, relax.op.multiply(mean, scale))))
    if a["bias"] is not None:
        shift = emit(importer, relax.op.add(shift, cast(importer, a["bias"], wide)))
    shape = (1, -1, *[1] * (len(x.ty.shape) - 2))
    scale, shift = (emit(importer, relax.op.reshape(t, shape)) for t in (scale, shift))
    y = emit(importer, relax.op.multiply(cast(importer, x, wide), scale))
    return [cast(importer, emit(importer, relax.op.add(y, shift)), dtype_of(x)), None, None]


PRODUCTS: dict[str, Converter] = {
    **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _matmul),
    **dict.fromkeys(("addmm.default", "baddbmm.default"), _addmm),
    "linear.default": _linear,
    "convolution.default": _convolution,
    "scaled_dot_product_attention.default": _attention,
    "_native_batch_norm_legit_no_training.default": _batch_norm,
}

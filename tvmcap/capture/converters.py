"""Converters for operators that TVM's importer lacks or gets wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmcap.capture.emitting import (
    HALF,
    Converter,
    arguments_of,
    cast,
    dtype_of,
    emit,
    operand,
    out_dtype,
)
from tvmcap.capture.hyperbolic import HYPERBOLIC
from tvmcap.capture.norms import NORMS
from tvmcap.capture.products import PRODUCTS
from tvmcap.capture.promotions import PROMOTIONS, between
from tvmcap.capture.reductions import REDUCTIONS
from tvmcap.capture.sizes import SIZES
from tvmcap.capture.structure import dtype_name


def _binary(op: Callable[..., relax.Expr]) -> Converter:
    """Elementwise operator on torch's promoted dtype, with ``alpha``.

    TVM's casts a scalar to the tensor's dtype.
    """

    def convert(node: fx.Node, importer: Any) -> Any:
        metas = [n.meta["val"] if isinstance(n, fx.Node) else n for n in node.args[:2]]
        metas = [1.0 if isinstance(m, torch.SymFloat) else m for m in metas]
        dtype = dtype_name(torch.result_type(*metas))
        if op is relax.op.divide:
            dtype = out_dtype(node)
        a, b = importer.retrieve_args(node)[:2]
        if op is relax.op.subtract and isinstance(b, int | float) and "float" in dtype:
            minus, b = relax.op.add, -b  # TVM takes (x + c) - c for x, which drops a rounding
        else:
            minus = op
        a, b = (operand(importer, v, dtype) for v in (a, b))
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if alpha != 1:
            b = emit(importer, relax.op.multiply(b, relax.const(alpha, dtype)))
        if dtype == "bool" and op in _ON_BOOL:
            return emit(importer, _ON_BOOL[op](a, b))
        return emit(importer, minus(a, b))

    return convert


_POOLS = tuple(f"max_pool{rank}d_with_indices.default" for rank in (2, 3))
_ON_BOOL = {relax.op.add: relax.op.logical_or, relax.op.multiply: relax.op.logical_and}


def _reversed_subtract(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    dtype = out_dtype(node)
    x = operand(importer, a["self"], dtype)
    if a["alpha"] != 1:
        x = emit(importer, relax.op.multiply(x, relax.const(a["alpha"], dtype)))
    return emit(importer, relax.op.subtract(operand(importer, a["other"], dtype), x))


def _softmax(op: Callable[..., relax.Expr]) -> Converter:
    def convert(node: fx.Node, importer: Any) -> Any:
        x, axis = importer.retrieve_args(node)[:2]
        return emit(importer, op(cast(importer, x, out_dtype(node)), axis=axis))

    return convert


def _embedding(node: fx.Node, importer: Any) -> Any:
    """Rows of a table.

    An index outside reads the nearest row, where TVM's converter reads outside memory.
    """
    weight, index = importer.retrieve_args(node)[:2]
    return emit(importer, relax.op.take(weight, index, axis=0, mode="clip"))


def _index_select(node: fx.Node, importer: Any) -> Any:
    x, axis, index = importer.retrieve_args(node)[:3]
    return emit(importer, relax.op.take(x, index, axis=axis, mode="clip"))


def _index(node: fx.Node, importer: Any) -> Any:
    """Advanced indexing with negative indices and with untouched axes in any place."""
    x, indices = importer.retrieve_args(node)[:2]
    used = {axis: index for axis, index in enumerate(indices) if index is not None}
    if any(dtype_of(index) in ("bool", "uint8") for index in used.values()):
        raise ValueError("an index is a mask, so the size of the result depends on values")
    found = [_from_start(importer, index, x.ty.shape[axis]) for axis, index in used.items()]
    if len(used) == 1:
        return emit(importer, relax.op.take(x, found[0], axis=next(iter(used)), mode="clip"))
    rank, axes = len(x.ty.shape), list(used)
    rest = [axis for axis in range(rank) if axis not in used]
    if axes != list(range(len(axes))):
        x = emit(importer, relax.op.permute_dims(x, axes + rest))
    result = emit(importer, relax.op.index_tensor(x, found))
    size = max(len(index.ty.shape) for index in found)
    if axes == list(range(axes[0], axes[-1] + 1)) and axes[0] > 0:
        order = [size + i for i in range(axes[0])] + list(range(size))
        order += range(size + axes[0], size + len(rest))
        result = emit(importer, relax.op.permute_dims(result, order))
    return result


def _from_start(importer: Any, index: relax.Expr, extent: Any) -> Any:
    """Count negative indices from the start."""
    dtype = dtype_of(index)
    size = operand(importer, extent, dtype)
    is_negative = emit(importer, relax.op.less(index, relax.const(0, dtype)))
    return emit(
        importer, relax.op.where(is_negative, emit(importer, relax.op.add(index, size)), index)
    )


def _divide_rounding(node: fx.Node, importer: Any) -> Any:
    """Divide with ``rounding_mode`` "floor", "trunc" or None, integers included."""
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return _binary(relax.op.floor_divide)(node, importer)
    dtype = out_dtype(node)
    a, b = (operand(importer, v, dtype) for v in importer.retrieve_args(node)[:2])
    if mode is None or "float" in dtype:
        quotient = emit(importer, relax.op.divide(a, b))
        return quotient if mode is None else emit(importer, relax.op.trunc(quotient))
    sizes = [emit(importer, relax.op.abs(v)) for v in (a, b)]
    sign = emit(importer, relax.op.multiply(*(emit(importer, relax.op.sign(v)) for v in (a, b))))
    return emit(importer, relax.op.multiply(emit(importer, relax.op.floor_divide(*sizes)), sign))


def _expm1(node: fx.Node, importer: Any) -> Any:
    """``exp(x) - 1``, by its series near 0, where the difference cancels."""
    x = cast(importer, importer.retrieve_args(node)[0], out_dtype(node))
    dtype = dtype_of(x)
    far = emit(importer, relax.op.subtract(emit(importer, relax.op.exp(x)), relax.const(1, dtype)))
    terms = 11 if dtype == "float64" else 6  # what is left out is below the rounding
    near: Any = relax.const(1 / math.factorial(terms), dtype)
    for term in reversed(range(1, terms)):
        product = emit(importer, relax.op.multiply(near, x))
        near = emit(importer, relax.op.add(product, relax.const(1 / math.factorial(term), dtype)))
    near = emit(importer, relax.op.multiply(near, x))
    size = emit(importer, relax.op.abs(x))
    is_near = emit(importer, relax.op.less(size, relax.const(0.1, dtype)))
    return emit(importer, relax.op.where(is_near, near, far))


def _log1p(node: fx.Node, importer: Any) -> Any:
    """``log(1 + x)`` with the rounding of ``1 + x`` divided out (Kahan)."""
    x = cast(importer, importer.retrieve_args(node)[0], out_dtype(node))
    one = relax.const(1, dtype_of(x))
    if dtype_of(x) in HALF:
        wide = _log1p_of(importer, cast(importer, x, "float32"), relax.const(1, "float32"))
        return cast(importer, wide, dtype_of(x))
    return _log1p_of(importer, x, one)


def _log1p_of(importer: Any, x: relax.Expr, one: relax.Expr) -> Any:
    shifted = emit(importer, relax.op.add(x, one))
    minus_one = relax.const(-1, dtype_of(one))  # TVM would take (x + 1) - 1 for x
    kept = emit(importer, relax.op.add(shifted, minus_one))
    ratio = emit(importer, relax.op.divide(x, kept))
    result = emit(importer, relax.op.multiply(emit(importer, relax.op.log(shifted)), ratio))
    is_same = emit(importer, relax.op.equal(shifted, one))
    is_infinite = emit(importer, relax.op.isinf(x))
    plain = emit(importer, relax.op.log(shifted))
    return emit(
        importer,
        relax.op.where(is_same, x, emit(importer, relax.op.where(is_infinite, plain, result))),
    )


def _judged(node: fx.Node, importer: Any) -> Any:
    """Whether a number is NaN or infinite; TVM has no such rule for bfloat16."""
    assert isinstance(node.target, torch._ops.OpOverload)
    op = {"isnan": relax.op.isnan, "isinf": relax.op.isinf}[node.target.__name__.split(".")[0]]
    x = importer.retrieve_args(node)[0]
    if "float" not in dtype_of(x):
        return importer.convert_map[node.target.__name__](node)
    return emit(importer, op(cast(importer, x, "float32") if dtype_of(x) in HALF else x))


def _clamp(node: fx.Node, importer: Any) -> Any:
    """Bound by numbers; TVM's own makes infinity of a bound that is left out, also for integers."""
    whole = "int" in out_dtype(node)
    return between(node, importer) if whole else importer.convert_map["clamp.default"](node)


def _first_of(name: str) -> Converter:
    """Take the first result of TVM's converter, whose others are placeholders."""

    def convert(node: fx.Node, importer: Any) -> Any:
        found = importer.convert_map[name](node)
        first = found[0] if isinstance(found, tuple | list | relax.Tuple) else found
        if not isinstance(first.ty, relax.TensorType):
            first = emit(importer, relax.TupleGetItem(first, 0))
        return [first, *[None] * (len(node.meta["val"]) - 1)]

    return convert


def _convert(node: fx.Node, importer: Any) -> Any:
    """Elements of another dtype: what PyTorch puts after a number that is an argument."""
    return cast(importer, importer.retrieve_args(node)[0], out_dtype(node))


CONVERTERS: dict[str, Converter] = {
    **HYPERBOLIC,
    **dict.fromkeys(("isnan.default", "isinf.default"), _judged),
    **PRODUCTS,
    **PROMOTIONS,
    **REDUCTIONS,
    **NORMS,
    **SIZES,
    **{f"add.{kind}": _binary(relax.op.add) for kind in ("Tensor", "Scalar")},
    **{f"sub.{kind}": _binary(relax.op.subtract) for kind in ("Tensor", "Scalar")},
    **{f"mul.{kind}": _binary(relax.op.multiply) for kind in ("Tensor", "Scalar")},
    **{f"div.{kind}": _binary(relax.op.divide) for kind in ("Tensor", "Scalar")},
    "true_divide.Tensor": _binary(relax.op.divide),
    **{f"eq.{kind}": _binary(relax.op.equal) for kind in ("Tensor", "Scalar")},
    **{f"ne.{kind}": _binary(relax.op.not_equal) for kind in ("Tensor", "Scalar")},
    **{f"lt.{kind}": _binary(relax.op.less) for kind in ("Tensor", "Scalar")},
    **{f"le.{kind}": _binary(relax.op.less_equal) for kind in ("Tensor", "Scalar")},
    **{f"gt.{kind}": _binary(relax.op.greater) for kind in ("Tensor", "Scalar")},
    **{f"ge.{kind}": _binary(relax.op.greater_equal) for kind in ("Tensor", "Scalar")},
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _reversed_subtract),
    "clamp.default": _clamp,
    **{name: _first_of(name) for name in _POOLS},
    "_softmax.default": _softmax(relax.op.nn.softmax),
    "_log_softmax.default": _softmax(relax.op.nn.log_softmax),
    "div.Tensor_mode": _divide_rounding,
    "div.Scalar_mode": _divide_rounding,
    "convert_element_type.default": _convert,
    "expm1.default": _expm1,
    "log1p.default": _log1p,
    "embedding.default": _embedding,
    "index_select.default": _index_select,
    "index.Tensor": _index,
}

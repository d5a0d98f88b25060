"""Converters for reductions and sorting that TVM's importer lacks or gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax, tirx

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


def _reduction(op: Callable[..., relax.Expr]) -> Converter:
    def convert(node: fx.Node, importer: Any) -> Any:
        a = arguments_of(node, importer)
        axes = a["dim"] if isinstance(a["dim"], int) else list(a["dim"]) or None
        x = _counted(importer, cast(importer, a["self"], out_dtype(node)))
        return emit(importer, op(x, axes, keepdims=bool(a["keepdim"])))

    return convert


def _overall(op: Callable[..., relax.Expr]) -> Converter:
    def convert(node: fx.Node, importer: Any) -> Any:
        return emit(importer, op(_counted(importer, importer.retrieve_args(node)[0])))

    return convert


def _counted(importer: Any, x: relax.Expr) -> Any:
    """Return truth values as numbers: TVM finds no least of them."""
    return cast(importer, x, "int8") if dtype_of(x) == "bool" else x


def _any(node: fx.Node, importer: Any) -> Any:
    """Whether an element is not zero; TVM's converter takes the greatest for that, also of none."""
    a = arguments_of(node, importer)
    x, axes = a["self"], a["dim"]
    if dtype_of(x) != "bool":
        x = emit(importer, relax.op.not_equal(x, relax.const(0, dtype_of(x))))
    if axes == []:
        return x
    found = relax.op.max(cast(importer, x, "uint8"), axes, keepdims=bool(a["keepdim"]))
    return emit(importer, found)


def _running(op: Callable[..., relax.Expr]) -> Converter:
    """Sums or products up to each place, in the dtype of the result."""

    def convert(node: fx.Node, importer: Any) -> Any:
        a = arguments_of(node, importer)
        return emit(importer, op(cast(importer, a["self"], out_dtype(node)), a["dim"]))

    return convert


def _position(op: Callable[..., relax.Expr]) -> Converter:
    """Where the extreme of an axis, or of everything, first stands."""

    def convert(node: fx.Node, importer: Any) -> Any:
        a = arguments_of(node, importer)
        x, axis = a["self"], a["dim"]
        if axis is not None:
            return _first(importer, x, _along(importer, op, x, axis), axis, bool(a["keepdim"]))
        flat = emit(importer, relax.op.flatten(x))
        found = _first(importer, flat, _along(importer, op, flat, 0), 0, False)
        ones = [1] * len(x.ty.shape)
        return emit(importer, relax.op.reshape(found, ones)) if a["keepdim"] else found

    return convert


def _extreme(op: Callable[..., relax.Expr]) -> Converter:
    """Extremes along an axis and where they first stand; TVM's importer sorts for them."""

    def convert(node: fx.Node, importer: Any) -> Any:
        a = arguments_of(node, importer)
        x, axis, keep = _counted(importer, a["self"]), a["dim"], bool(a["keepdim"])
        top = _along(importer, op, x, axis)
        value = top if keep else emit(importer, relax.op.squeeze(top, [axis]))
        value = cast(importer, value, dtype_of(a["self"]))
        return emit(importer, relax.Tuple([value, _first(importer, x, top, axis, keep)]))

    return convert


def _along(importer: Any, op: Callable[..., relax.Expr], x: relax.Expr, axis: int) -> Any:
    return emit(importer, op(x, axis, keepdims=True))


def _first(importer: Any, x: relax.Expr, top: relax.Expr, axis: int, keep: bool) -> Any:
    """Where ``x`` first equals ``top``, or first is NaN, which torch counts as the extreme.

    TVM's argmax of ``x`` itself gives -1 where all elements are the least there is, and passes over
    NaN.
    """
    hit = emit(importer, relax.op.equal(x, top))
    if "float" in dtype_of(x):
        hit = emit(importer, relax.op.logical_or(hit, emit(importer, relax.op.isnan(x))))
    hit = cast(importer, hit, "int32")
    return emit(importer, relax.op.argmax(hit, axis, keepdims=keep))


def _variance(node: fx.Node, importer: Any) -> Any:
    """Variance with torch's ``correction``, which TVM's converter ignores."""
    a = arguments_of(node, importer)
    x, axes = a["self"], a["dim"]
    axes = list(range(len(x.ty.shape))) if not axes else [int(d) % len(x.ty.shape) for d in axes]
    count: Any = 1
    for axis in axes:
        count = count * x.ty.shape[axis]
    keep = bool(a["keepdim"])
    correction = 1 if a["correction"] is None else a["correction"]
    if not isinstance(count, int | tirx.IntImm):
        return _variance_of_any(importer, x, axes, keep, correction, count)
    y = emit(importer, relax.op.variance(x, axes, keepdims=keep))
    known = int(count)
    factor = known / (known - correction) if known > correction else float("nan")
    return (
        y if factor == 1 else emit(importer, relax.op.multiply(y, relax.const(factor, dtype_of(y))))
    )


def _variance_of_any(
    importer: Any, x: relax.Expr, axes: list[int], keep: bool, correction: float, count: Any
) -> Any:
    """Variance over axes of which one is dynamic; NaN where nothing is left to divide by."""
    mean = emit(importer, relax.op.mean(x, axes, keepdims=True))
    centred = emit(importer, relax.op.subtract(x, mean))
    square = emit(importer, relax.op.multiply(centred, centred))
    total = emit(importer, relax.op.sum(square, axes, keepdims=keep))
    dtype = dtype_of(x)
    freedom = operand(importer, count, "float64")
    freedom = emit(importer, relax.op.subtract(freedom, relax.const(correction, "float64")))
    freedom = emit(importer, relax.op.maximum(freedom, relax.const(0, "float64")))
    return emit(importer, relax.op.divide(total, cast(importer, freedom, dtype)))


def _logsumexp(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    x = cast(importer, a["self"], out_dtype(node))
    axes = [a["dim"]] if isinstance(a["dim"], int) else list(a["dim"])
    top = emit(importer, relax.op.max(x, axes, keepdims=True))
    zero = relax.const(0, dtype_of(x))
    top = emit(importer, relax.op.where(emit(importer, relax.op.isinf(top)), zero, top))
    parts = emit(importer, relax.op.exp(emit(importer, relax.op.subtract(x, top))))
    total = emit(importer, relax.op.log(emit(importer, relax.op.sum(parts, axes, keepdims=True))))
    total = emit(importer, relax.op.add(total, top))
    return total if a["keepdim"] else emit(importer, relax.op.squeeze(total, axes))


def _variance_and_mean(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    axes = list(a["dim"]) if a["dim"] else None
    mean = emit(importer, relax.op.mean(a["self"], axes, keepdims=bool(a["keepdim"])))
    return [_variance(node, importer), mean]


def _sort(node: fx.Node, importer: Any) -> Any:
    """Sorted values and where they stood; equal ones keep their order."""
    a = arguments_of(node, importer)
    return _with_values(importer, a, _order(importer, a))


def _argsort(node: fx.Node, importer: Any) -> Any:
    return _order(importer, arguments_of(node, importer))


def _order(importer: Any, a: dict[str, Any]) -> Any:
    x = _sortable(importer, a["self"])
    return emit(importer, relax.op.argsort(x, a["dim"], bool(a["descending"]), dtype="int64"))


def _topk(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    x, largest = _sortable(importer, a["self"]), bool(a["largest"])
    order = relax.op.topk(x, int(a["k"]), a["dim"], "indices", largest, dtype="int64")
    return _with_values(importer, a, emit(importer, order))


def _median(node: fx.Node, importer: Any) -> Any:
    """The lower of the two in the middle, and where it stands; NaN and its first place if any."""
    a = arguments_of(node, importer)
    x, axis, keep = a["self"], a.get("dim"), bool(a.get("keepdim"))
    if axis is None:
        x, axis = emit(importer, relax.op.flatten(x)), 0
    order = relax.op.argsort(_sortable(importer, x), axis, dtype="int64")
    middle = importer.symbols.simplify((x.ty.shape[axis] - 1) // 2)
    place = relax.op.strided_slice(
        emit(importer, order), [axis], [middle], [middle + 1], assume_inbound=True
    )
    place = emit(importer, place)
    if "float" in dtype_of(x):
        nan = cast(importer, emit(importer, relax.op.isnan(x)), "int32")
        found = cast(importer, _along(importer, relax.op.max, nan, axis), "bool")
        first = cast(importer, emit(importer, relax.op.argmax(nan, axis, keepdims=True)), "int64")
        place = emit(importer, relax.op.where(found, first, place))
    value = emit(importer, relax.op.gather_elements(x, place, axis=axis))
    if not keep:
        value, place = (emit(importer, relax.op.squeeze(v, [axis])) for v in (value, place))
    return emit(importer, relax.Tuple([value, place])) if "dim" in a else value


def _with_values(importer: Any, a: dict[str, Any], order: Any) -> Any:
    values = emit(importer, relax.op.gather_elements(a["self"], order, axis=a["dim"]))
    return emit(importer, relax.Tuple([values, order]))


def _sortable(importer: Any, x: relax.Expr) -> Any:
    """Return keys of ``x`` for TVM's sort.

    It takes the bits of bfloat16 for those of float16, has no place for NaN, which torch counts as
    the greatest, and takes no integers of 8 or 16 bits.
    """
    if "float" not in dtype_of(x):
        return x if dtype_of(x) in ("int32", "int64") else cast(importer, x, "int32")
    x = cast(importer, x, "float32") if dtype_of(x) in HALF else x
    top = relax.const(float("inf"), dtype_of(x))
    return emit(importer, relax.op.where(emit(importer, relax.op.isnan(x)), top, x))


def _scatter_add(node: fx.Node, importer: Any) -> Any:
    """Add values where indices say; those of 16 bits in float32."""
    a = arguments_of(node, importer)
    wide = "float32" if out_dtype(node) in HALF else out_dtype(node)
    x, source = (cast(importer, a[name], wide) for name in ("self", "src"))
    index = cast(importer, a["index"], "int64")
    return emit(importer, relax.op.scatter_elements(x, index, source, a["dim"], "add"))


REDUCTIONS: dict[str, Converter] = {
    "scatter_add.default": _scatter_add,
    "var.correction": _variance,
    "var_mean.correction": _variance_and_mean,
    **dict.fromkeys(("any.dim", "any.dims"), _any),
    "amax.default": _reduction(relax.op.max),
    "amin.default": _reduction(relax.op.min),
    "max.default": _overall(relax.op.max),
    "min.default": _overall(relax.op.min),
    "cumsum.default": _running(relax.op.cumsum),
    "cumprod.default": _running(relax.op.cumprod),
    "max.dim": _extreme(relax.op.max),
    "min.dim": _extreme(relax.op.min),
    "argmax.default": _position(relax.op.max),
    "argmin.default": _position(relax.op.min),
    "prod.dim_int": _reduction(relax.op.prod),
    "logsumexp.default": _logsumexp,
    "sort.default": _sort,
    "sort.stable": _sort,
    "argsort.default": _argsort,
    "topk.default": _topk,
    "median.default": _median,
    "median.dim": _median,
}

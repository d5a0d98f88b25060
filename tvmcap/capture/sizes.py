"""Converters whose result has a size of its own: slices, views, ranges.

Each takes that size from torch, which knows it exactly. TVM's own derive ``min(S, 128)`` where
torch proved ``S``: a later pass then runs without end, or finds no kernel.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx
from tvm import relax, tirx

from tvmcap.capture.emitting import (
    Converter,
    arguments_of,
    cast,
    emit,
    operand,
    out_dtype,
    shape_of,
)


def _slice(node: fx.Node, importer: Any) -> Any:
    a = arguments_of(node, importer)
    x, step = a["self"], a["step"]
    axis = a["dim"] % len(x.ty.shape)
    extent, size = x.ty.shape[axis], shape_of(node, importer)[axis]
    start = _start(importer, 0 if a["start"] is None else a["start"], extent)
    if isinstance(size, int) and isinstance(start, int):
        end = min(start + size * step, int(extent)) if isinstance(extent, tirx.IntImm) else None
        end = start + size * step if end is None else end
    else:
        end = importer.symbols.simplify(start + size * step)
    part = relax.op.strided_slice(x, [axis], [start], [end], [step], assume_inbound=True)
    return emit(importer, part)


def _select(node: fx.Node, importer: Any) -> Any:
    """One index of an axis as a slice; TVM's converter reads outside memory at a negative index."""
    x, axis, index = importer.retrieve_args(node)[:3]
    axis %= len(x.ty.shape)
    start = _start(importer, index, x.ty.shape[axis])
    end = importer.symbols.simplify(start + 1)
    part = relax.op.strided_slice(x, [axis], [start], [end], assume_inbound=True)
    return emit(importer, relax.op.squeeze(emit(importer, part), [axis]))


def _start(importer: Any, start: Any, extent: Any) -> Any:
    """Where a slice starts, counted from the front and inside the axis."""
    if isinstance(start, int):
        is_negative = start < 0
    elif importer.symbols.is_true(start < 0):
        is_negative = True
    elif importer.symbols.is_true(start >= 0):
        is_negative = False
    else:
        raise ValueError(f"whether the index {start} counts from the end depends on sizes")
    if is_negative:
        return importer.symbols.simplify(tirx.max(extent + start, 0))
    if isinstance(extent, tirx.IntImm) and isinstance(start, int):
        return min(start, int(extent))
    return start


def _view(node: fx.Node, importer: Any) -> Any:
    x = importer.retrieve_args(node)[0]
    return emit(importer, relax.op.reshape(x, shape_of(node, importer)))


def _arange(node: fx.Node, importer: Any) -> Any:
    """Numbers from ``start`` by ``step``, which may be negative."""
    a = arguments_of(node, importer)
    dtype, wide = out_dtype(node), "int64" if "int" in out_dtype(node) else "float64"
    steps = relax.op.arange(shape_of(node, importer)[0], dtype="int64")
    steps = cast(importer, emit(importer, steps), wide)
    scaled = emit(importer, relax.op.multiply(steps, operand(importer, a["step"], wide)))
    moved = emit(importer, relax.op.add(scaled, operand(importer, a["start"], wide)))
    return cast(importer, moved, dtype)


def _repeat(node: fx.Node, importer: Any) -> Any:
    """Copies along each axis; TVM's converter takes no symbolic count."""
    x, repeats = importer.retrieve_args(node)[:2]
    if all(isinstance(count, int) for count in repeats):
        return emit(importer, relax.op.tile(x, list(repeats)))
    old = [1] * (len(repeats) - len(x.ty.shape)) + list(x.ty.shape)
    x = emit(importer, relax.op.reshape(x, [n for size in old for n in (1, size)]))
    wide = [n for pair in zip(repeats, old, strict=True) for n in pair]
    x = emit(importer, relax.op.broadcast_to(x, wide))
    return emit(importer, relax.op.reshape(x, shape_of(node, importer)))


def _slice_scatter(node: fx.Node, importer: Any) -> Any:
    """A tensor with a slice of it replaced: what comes before, the new part, what comes after."""
    a = arguments_of(node, importer)
    x, part, step = a["self"], a["src"], a["step"]
    axis = a["dim"] % len(x.ty.shape)
    extent, size = x.ty.shape[axis], part.ty.shape[axis]
    start = _start(importer, 0 if a["start"] is None else a["start"], extent)
    if step != 1:
        return _scatter_steps(node, importer, (start, step, axis))
    end = importer.symbols.simplify(start + size)
    pieces = [cast(importer, part, out_dtype(node))]
    if not importer.symbols.is_true(extent == end):
        after = relax.op.strided_slice(x, [axis], [end], [extent], assume_inbound=True)
        pieces = [*pieces, emit(importer, after)]
    if not isinstance(start, int) or start > 0:
        before = relax.op.strided_slice(x, [axis], [0], [start], assume_inbound=True)
        pieces = [emit(importer, before), *pieces]
    return pieces[0] if len(pieces) == 1 else emit(importer, relax.op.concat(pieces, axis))


def _scatter_steps(node: fx.Node, importer: Any, where: tuple[Any, int, int]) -> Any:
    """A tensor with every ``step``-th place from ``start`` on replaced, along ``axis``.

    TVM's own lowering reads outside the memory of the new part, for places that it leaves alone.
    """
    start, step, axis = where
    x, part = importer.retrieve_args(node)[:2]
    x, part = (cast(importer, value, out_dtype(node)) for value in (x, part))
    number = partial(operand, importer, dtype="int64")
    places = emit(importer, relax.op.arange(x.ty.shape[axis], dtype="int64"))
    offset = emit(importer, relax.op.subtract(places, number(start)))
    index = emit(importer, relax.op.floor_divide(offset, number(step)))
    again = emit(importer, relax.op.multiply(index, number(step)))
    hit = relax.op.logical_and(
        emit(importer, relax.op.equal(again, offset)),
        emit(importer, relax.op.greater_equal(index, number(0))),
    )
    last = emit(importer, relax.op.less(index, number(part.ty.shape[axis])))
    hit = emit(importer, relax.op.logical_and(emit(importer, hit), last))
    shape = [1] * len(x.ty.shape)
    shape[axis] = x.ty.shape[axis]
    hit = emit(importer, relax.op.reshape(hit, shape))
    picked = emit(importer, relax.op.take(part, index, axis=axis, mode="clip"))
    return emit(importer, relax.op.where(hit, picked, x))


def _scalar(node: fx.Node, importer: Any) -> Any:
    """Make a tensor of a number, which may be a size."""
    return operand(importer, importer.retrieve_args(node)[0], out_dtype(node))


def _filled(node: fx.Node, importer: Any) -> Any:
    """Fill a tensor with a number; TVM has no kernel that fills with infinity or nan."""
    assert isinstance(node.target, torch._ops.OpOverload)
    a = arguments_of(node, importer)
    number = a.get("fill_value", a.get("value"))
    if not isinstance(number, float) or math.isfinite(number):
        return importer.convert_map[node.target.__name__](node)
    value = relax.const(number, out_dtype(node))
    return emit(importer, relax.op.broadcast_to(value, shape_of(node, importer)))


SIZES: dict[str, Converter] = {
    "slice.Tensor": _slice,
    "select.int": _select,
    **dict.fromkeys(("view.default", "reshape.default", "_unsafe_view.default"), _view),
    "repeat.default": _repeat,
    "slice_scatter.default": _slice_scatter,
    "arange.start_step": _arange,
    "scalar_tensor.default": _scalar,
    **dict.fromkeys(("full.default", "full_like.default", "fill.Scalar"), _filled),
}

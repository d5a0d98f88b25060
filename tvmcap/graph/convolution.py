"""Convolutions of few bits: as a product of patches by a matrix where that pays, else as a nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax, te, tirx, topi

from tvmcap.graph.rewrite import is_op

Array = npt.NDArray[Any]

_NAMES = {3: "nn.conv1d", 4: "nn.conv2d", 5: "nn.conv3d"}
_LAYOUTS = {3: ("NCW", "OIW"), 4: ("NCHW", "OIHW"), 5: ("NCDHW", "OIDHW")}

LEAST_FILTERS, LEAST_DEPTH = 16, 32
"""Output channels, and length of their sums, from which a product of bytes saves more than copying
patches and transposing costs."""
_OPAQUE = 8  # of the attribute op_pattern: what makes the input is not computed once for each tap


@dataclass(frozen=True)
class Convolution:
    """``y[n, f, p] = sum(x[n, group(f) + c, p * stride + t * dilation - before] * w[f, c, t])``.

    Pixels ``p`` and taps ``t`` have one, two or three dimensions.

    Attributes
    ----------
    kernel: extents of the taps.
    strides, dilation, before, after: of each dimension; the last two are the padding.
    channels: of the input that an output channel reads.
    filters: output channels.
    groups: of channels.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    channels: int
    filters: int
    groups: int

    @staticmethod
    def of(call: Any) -> Convolution | None:
        """Read a call of Relax, or return None for another operator or layout."""
        rank = getattr(call.ty, "ndim", 0)
        if rank not in _NAMES or not is_op(call, _NAMES[rank]):
            return None
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout) != _LAYOUTS[rank]:
            return None
        if attrs.out_layout not in ("", attrs.data_layout):
            return None
        filters, channels, *kernel = (int(e) for e in call.args[1].ty.shape.values)
        strides, dilation, padding = (
            tuple(map(int, x)) for x in (attrs.strides, attrs.dilation, attrs.padding)
        )
        half = rank - 2
        return Convolution(
            tuple(kernel),
            strides,
            dilation,
            padding[:half],
            padding[half:],
            channels,
            filters,
            int(attrs.groups),
        )

    @property
    def is_product(self) -> bool:
        """Whether it is computed as a product: of pixels by channels, or of patches by taps."""
        depth = int(np.prod(self.kernel)) * self.channels
        return self.groups == 1 and self.filters >= LEAST_FILTERS and depth >= LEAST_DEPTH

    @property
    def is_pointwise(self) -> bool:
        """Whether each output pixel reads the input pixel at its own place."""
        return all(k == s == 1 for k, s in zip(self.kernel, self.strides, strict=True)) and not any(
            (*self.before, *self.after)
        )

    def matrix(self, weight: Array) -> Array:
        """Return a weight [filters, channels, *kernel] as [prod(kernel) * channels, filters]."""
        last_filters = (*range(2, weight.ndim), 1, 0)
        return np.ascontiguousarray(weight.transpose(last_filters).reshape(-1, self.filters))

    def weight(self, matrix: Array) -> Array:
        """Return what ``matrix`` was made of."""
        *taps, c, f = range(len(self.kernel) + 2)
        parts = matrix.reshape(*self.kernel, self.channels, self.filters)
        return np.ascontiguousarray(parts.transpose(f, c, *taps))


def channels_last(builder: Any, x: Any) -> Any:
    """Emit [n, c, *space] as [n, *space, c]."""
    rank = x.ty.ndim
    return builder.emit(relax.op.permute_dims(x, [0, *range(2, rank), 1]))


def channels_first(builder: Any, y: Any) -> Any:
    """Emit [n, *space, c] as [n, c, *space]."""
    rank = y.ty.ndim
    return builder.emit(relax.op.permute_dims(y, [0, rank - 1, *range(1, rank - 1)]))


def rows(builder: Any, conv: Convolution, q: Any, zero: int) -> Any:
    """Emit the patches of q [n, *space, channels] as [n, *pixels, prod(kernel) * channels].

    ``zero`` is what stands for zero in the padding.
    """
    if conv.is_pointwise:
        return q

    def patches(q: te.Tensor) -> te.Tensor:
        return _patches(conv, q, zero)

    copied = builder.emit_te(
        patches, q, primfunc_name_hint="patches", primfunc_attrs={"op_pattern": _OPAQUE}
    )
    shape = list(copied.ty.shape.values)[: len(conv.kernel) + 1]
    depth = int(np.prod(conv.kernel)) * conv.channels
    return builder.emit(relax.op.reshape(copied, [*shape, tirx.IntImm("int64", depth)]))


def _patches(conv: Convolution, q: te.Tensor, zero: int) -> te.Tensor:
    """Return [n, *pixels, *kernel, channels]."""
    count = len(conv.kernel)
    space = q.shape[1:-1]

    def cell(n: Any, *index: Any) -> Any:
        pixel, tap, channel = index[:count], index[count:-1], index[-1]
        inside, at = [], []
        for i, (p, t) in enumerate(zip(pixel, tap, strict=True)):
            where = p * conv.strides[i] + t * conv.dilation[i] - conv.before[i]
            inside += [where >= 0] if conv.before[i] else []
            inside += [where < space[i]] if conv.after[i] else []
            at.append(where)
        value = q(n, *at, channel)
        if not inside:
            return value
        return tirx.if_then_else(tirx.all(*inside), value, tirx.const(zero, q.dtype))

    shape = (q.shape[0], *_pixels(conv, space), *conv.kernel, conv.channels)
    return te.compute(shape, cell, name="patches")


def _pixels(conv: Convolution, space: Sequence[Any]) -> list[Any]:
    """Return the extents of the output's pixels for those of the input's."""
    reach = [(k - 1) * d for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    padded = [e + b + a for e, b, a in zip(space, conv.before, conv.after, strict=True)]
    return [
        tirx.floordiv(e - r - 1, s) + 1 for e, r, s in zip(padded, reach, conv.strides, strict=True)
    ]


def nest(builder: Any, conv: Convolution, x: Any, weight: Any, dtype: str) -> Any:
    """Emit the convolution of x [n, c, *space], summed in ``dtype``, as a nest of loops.

    ``weight`` is a constant [filters, channels, *kernel].
    """
    layout, kernel_layout = _LAYOUTS[x.ty.ndim]

    def convolution(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
        return topi.nn.conv(
            x,
            weight,
            list(conv.strides),
            [*conv.before, *conv.after],
            list(conv.dilation),
            conv.groups,
            layout,
            kernel_layout,
            dtype,
        )

    return builder.emit_te(convolution, x, weight, primfunc_name_hint="conv")

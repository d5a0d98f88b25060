"""Ranges of activations over calibration inputs, and the magnitude to clip each at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmcap.base.errors import QuantizeError
from tvmcap.base.quantization import LARGEST, Quantize
from tvmcap.base.ranges import Range
from tvmcap.graph.quantize import rounded

Array = npt.NDArray[Any]

#: Values of one layer's input that are kept of each calibration input.
_KEPT = 1 << 18
#: Magnitudes tried by the mean squared error, and bins of the histogram of the entropy.
_STEPS, _BINS, _LEVELS = 80, 2048, 128


class Observer:
    """Sees the input of one layer, one calibration input after the other."""

    def __init__(self, layer: str, options: Quantize) -> None:
        self.layer, self.options = layer, options
        self.low, self.high = np.inf, -np.inf
        self.channels: Array | None = None
        self.values: list[Array] = []

    def see(self, x: Array, source: str) -> None:
        """Take in one input [..., K]; raises QuantizeError where it is NaN or infinite.

        ``source`` says what input of the model it comes from.
        """
        if not np.isfinite(x).all():
            raise QuantizeError(
                f"{source} makes NaN or Inf in the input of layer "
                f"{self.layer!r}; leave that input out, or keep the layer: keep=({self.layer!r},)"
            )
        if x.size == 0:
            return
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
        size = np.abs(x.reshape(-1, x.shape[-1]).astype(np.float32))
        if self.options.smooth is not None:
            top = size.max(axis=0)
            self.channels = top if self.channels is None else np.maximum(self.channels, top)
        if self.options.activations == "static" and self.options.method != "minmax":
            self.values.append(size.ravel()[:: -(-size.size // _KEPT)])

    def range(self) -> Range:
        """Return what was seen; raises QuantizeError where that gives no scale."""
        if self.low > self.high:
            raise QuantizeError(f"no calibration input reaches layer {self.layer!r}")
        if self.low == self.high:
            raise QuantizeError(
                f"the input of layer {self.layer!r} is {self.low:g} everywhere over the "
                "calibration inputs, which tells nothing of its range; calibrate on real inputs, "
                f"or keep the layer: keep=({self.layer!r},)"
            )
        top = max(abs(self.low), abs(self.high))
        clip = top if not self.values else self._clip(top)
        channels = () if self.channels is None else tuple(map(_short, self.channels))
        return Range(_short(self.low), _short(self.high), _short(clip), channels)

    def _clip(self, top: float) -> float:
        values = np.concatenate(self.values)
        if self.options.method == "percentile":
            return float(np.percentile(values, self.options.percentile)) or top
        if self.options.method == "mse":
            return least_squares(values, top, self.options.dtype)
        return least_entropy(values, top)


def _short(value: Any) -> float:
    """Round to six digits, so that a file of ranges and what it was made from agree exactly."""
    return float(f"{float(value):.6g}")


def least_squares(values: Array, top: float, dtype: str) -> float:
    """Return the clip of magnitudes whose rounding to ``dtype`` has the least squared error."""

    def error(clip: float) -> float:
        scale = np.float32(clip / LARGEST[dtype])
        back = rounded(values / scale, dtype).astype(np.float32) * scale
        return float(np.square(values - back, dtype=np.float64).mean())

    clips = [top * i / _STEPS for i in range(_STEPS // 20, _STEPS + 1)]
    return min(clips, key=error)


def least_entropy(values: Array, top: float) -> float:
    """Return the clip whose 128 levels lose the least information of a histogram of magnitudes.

    The measure is the divergence of Kullback and Leibler between the clipped histogram and itself
    in 128 levels (S. Migacz, "8-bit inference with TensorRT", GTC 2017).
    """
    counts = np.histogram(values, bins=_BINS, range=(0.0, top))[0].astype(np.float64)
    counts[0] = counts[1]  # zeros round to zero under every clip
    if not counts.any():
        return top  # no magnitude among these values tells one clip from another

    def divergence(bins: int) -> float:
        clipped = counts[:bins].copy()
        clipped[-1] += counts[bins:].sum()
        level = np.arange(bins) * _LEVELS // bins
        filled = counts[:bins] > 0
        total = np.bincount(level, counts[:bins], _LEVELS)
        number = np.maximum(np.bincount(level, filled, _LEVELS), 1)
        coarse = np.where(filled, (total / number)[level], 0.0)
        p, q = clipped / clipped.sum(), coarse / max(coarse.sum(), 1.0)
        both = (p > 0) & (q > 0)
        lost = p[(p > 0) & (q == 0)].sum()
        return float((p[both] * np.log(p[both] / q[both])).sum() + lost * np.log(_BINS))

    bins = min(range(_LEVELS, _BINS + 1, 16), key=divergence)
    return top * bins / _BINS


def smoothing(ranges: Sequence[Range], weights: Sequence[Array], alpha: float) -> tuple[float, ...]:
    """Return what to divide each channel by, for layers [K, N] that read one input.

    max|x|**alpha / max|w|**(1 - alpha), after Xiao et al., "SmoothQuant" (2023), equation 4.
    """
    x = np.max([np.asarray(r.channels) for r in ranges], axis=0)
    w = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    silent = (x <= 0) | (w <= 0)
    with np.errstate(divide="ignore"):
        factor = np.power(x, alpha) / np.power(w, 1 - alpha, where=w > 0, out=np.ones_like(x))
    return tuple(map(_short, np.where(silent, 1.0, np.clip(factor, 1e-5, 1e5))))

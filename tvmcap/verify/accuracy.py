"""Measures what quantization costs: the noise of each layer and of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmcap.base.accuracy import Accuracy, AccuracyReport
from tvmcap.base.errors import QuantizeError
from tvmcap.base.numerics import Comparison
from tvmcap.base.quantization import LARGEST
from tvmcap.graph.convolution import Convolution
from tvmcap.graph.layers import Layer
from tvmcap.graph.quantize import Plan, quantized_weight, rounded

Array = npt.NDArray[Any]

LUCK_DB = 6.0
"""What a set of inputs may be noisier than the budget by: the noise of few numbers is partly luck,
and twice as large now and then."""

_ROWS = 256
"""Rows of an input that one layer by itself is measured on."""


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): inf without noise; -inf where all is noise, NaN included."""
    if not math.isfinite(noise):
        return -math.inf
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


class Noise:
    """Sums over pairs of results: the model's own, and the quantized model's."""

    def __init__(self) -> None:
        self.signal = self.noise = self.size = self.dot = self.most = 0.0

    def add(self, want: Array, got: Array) -> None:
        """Take in one pair; elements that are not finite in ``want`` do not count."""
        a, b = (np.asarray(x, np.float64).ravel() for x in (want, got))
        good = np.isfinite(a)
        a, b = a[good], b[good]
        error = a - b
        self.signal += float(a @ a)
        self.noise += float(error @ error)
        self.size += float(b @ b)
        self.dot += float(a @ b)
        self.most = float(np.maximum(self.most, np.abs(error).max(initial=0.0)))  # keeps a NaN

    @property
    def sqnr_db(self) -> float:
        """Signal over noise, in dB."""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 for two zeros."""
        length = math.sqrt(self.signal * self.size)
        return self.dot / length if length else float(self.noise == 0)


@dataclass(frozen=True)
class Held(Comparison):
    """One output of a quantized model, judged by its noise instead of its largest error.

    Attributes
    ----------
    signal, noise: sums of squares of the reference, and of what ours differs by.
    floor_db: least ratio of the two.
    """

    signal: float = 0.0
    noise: float = 0.0
    floor_db: float = -math.inf

    @property
    def title(self) -> str:
        """The output, and its noise."""
        of = f" of {self.floor_db:g}" if math.isfinite(self.floor_db) else ""
        return f"{self.name}, {decibels(self.signal, self.noise):.1f} dB{of}"

    @property
    def rule(self) -> str:
        """What the budget is, in words."""
        return (
            f"{self.floor_db:g} dB, {LUCK_DB:g} below quantize's budget_db, on inputs like the "
            "example or those of calibration"
        )

    def judged(self, bad: int) -> Held:
        """Return it with ``bad`` elements, none where the noise is within the budget."""
        found = decibels(self.signal, self.noise)
        if found >= self.floor_db:
            return replace(self, bad=0, budget=max(self.budget, self.max_abs))
        share = 10 ** ((found - self.floor_db) / 20)
        return replace(self, bad=max(bad, 1), budget=self.max_abs * share)

    def pooled(self, other: Held) -> Held:
        """Judge two draws of inputs together."""
        worse = self if self.max_abs >= other.max_abs else other
        sums = self.signal + other.signal, self.noise + other.noise
        return replace(worse, signal=sums[0], noise=sums[1]).judged(max(self.bad, other.bad))


def hold(
    result: Comparison,
    ours: Array,
    reference: Array,
    eager: Array,
    floor_db: float,
    *,
    clipped: bool = False,
) -> Comparison:
    """Judge one output of a quantized model by its noise, where it is not exact anyway.

    Integers and bools (an argmax, a comparison) only need the reference's shape: noise moves ties.
    A NaN may stand for an infinity, and the reverse. Where eager is finite and the reference is
    not, or the reverse, anything will do: PyTorch has several answers there (a row that a mask
    hides whole). So it is where neither is finite and static ranges have ``clipped`` NaN and Inf.
    """
    if not ours.shape == reference.shape == eager.shape:
        return result
    finite = np.isfinite(reference)
    agreed = finite == np.isfinite(eager)
    if result.misplaced:
        strange = (np.isfinite(ours) != finite) & agreed
        if (strange & finite if clipped else strange).any():
            return result
    if not result.dtype.startswith(("float", "bfloat")):
        return replace(result, bad=0)
    noise = Noise()
    noise.add(reference[agreed], ours[agreed])
    same = {f.name: getattr(result, f.name) for f in fields(Comparison)}
    held = Held(
        **{**same, "misplaced": 0}, signal=noise.signal, noise=noise.noise, floor_db=floor_db
    )
    return held if result.ok else held.judged(result.bad)


def require_finite(name: str, values: Sequence[Array], source: str) -> None:
    """Raise QuantizeError where an output is nowhere finite, and so measures nothing."""
    if any(v.size for v in values) and not any(np.isfinite(v).any() for v in values):
        raise QuantizeError(
            f"output {name!r} of the unquantized model is NaN or Inf everywhere on the {source}, "
            "which tells nothing of what quantization costs; pass calibration=[x1, x2, ...] with "
            "inputs that the model can take"
        )


class LayerNoise:
    """Measures one layer over several inputs."""

    def __init__(self, layer: Layer, plan: Plan | None) -> None:
        self.layer, self.plan = layer, plan
        self.whole, self.own = Noise(), Noise()
        self.outside = self.count = 0
        if plan is not None:
            self.weight = layer.values()
            self.data, self.scale = quantized_weight(self.weight, plan)

    def add(self, x: Array, want: Array, got: Array) -> None:
        """Take in the unquantized model's input and result, and the quantized model's result."""
        self.whole.add(want, got)
        if self.plan is None:
            return
        part, conv = _some(x, self.layer.conv), self.layer.conv
        with np.errstate(invalid="ignore", over="ignore"):  # rows with NaN or Inf do not count
            own, outside = imitate(part, self.data, self.scale, self.plan, conv)
            self.own.add(product(part, self.weight, conv), own)
        self.outside += outside
        self.count += part.size

    def result(self) -> Accuracy:
        """Return the measure of all inputs."""
        before, plan = self.layer.bytes, self.plan
        after = before if plan is None else self.data.nbytes + self.scale.nbytes
        return Accuracy(
            self.layer.name,
            "kept" if plan is None else plan.dtype + ("-weight-only" if plan.weight_only else ""),
            self.whole.sqnr_db,
            None if plan is None else self.own.sqnr_db,
            self.whole.cosine,
            self.whole.most,
            self.outside / max(self.count, 1),
            before,
            after,
        )


def _some(x: Array, conv: Convolution | None) -> Array:
    """Return some of a layer's input in float32: rows of a product, samples of a convolution."""
    rows = x.reshape(-1, x.shape[-1]) if conv is None else x
    most = _ROWS if conv is None else max(1, _ROWS * x.shape[-1] // max(x[:1].size, 1))
    return rows[:: max(1, len(rows) // most)].astype(np.float32)


def product(x: Array, matrix: Array, conv: Convolution | None) -> Array:
    """Return a layer's result on float32 inputs and its weight as a matrix."""
    if conv is None:
        result: Array = x @ matrix
        return result
    import torch

    padding = [(0, 0), (0, 0), *zip(conv.before, conv.after, strict=True)]
    functions = torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d
    found: Array = functions[len(conv.kernel) - 1](
        torch.from_numpy(np.pad(x, padding)),
        torch.from_numpy(conv.weight(matrix)),
        stride=conv.strides,
        dilation=conv.dilation,
        groups=conv.groups,
    ).numpy()
    return found


def imitate(
    x: Array, data: Array, scale: Array, plan: Plan, conv: Convolution | None = None
) -> tuple[Array, int]:
    """Return the result of a quantized layer on float32 inputs, and the values that saturate."""
    if plan.smooth:
        x = x / np.asarray(plan.smooth, np.float32)
    wide = data.astype(np.float32) * scale
    if plan.weight_only:
        return product(x, wide, conv), 0
    largest = np.float32(LARGEST[plan.dtype])
    axes = (-1,) if conv is None else tuple(range(1, x.ndim))
    top = np.abs(x).max(axis=axes, keepdims=True) if plan.clip is None else np.float32(plan.clip)
    step = np.maximum(top, np.float32(1e-30)) / largest
    q = rounded(x / step, plan.dtype).astype(np.float32)
    return product(q * step, wide, conv), int((np.abs(x) > top).sum())


def report(
    layers: Sequence[LayerNoise],
    outputs: Mapping[str, Noise],
    budget_db: float,
    inputs: int,
    source: str,
) -> AccuracyReport:
    """Put the measures together, the noisiest layers first; bytes of one weight count once."""
    found: list[Accuracy] = []
    counted: set[tuple[Any, ...]] = set()
    for x in layers:
        own, weight = x.result(), x.layer.weight
        held = weight, "" if x.plan is None else x.plan.smooth
        own = replace(own, bytes_before=0) if (weight,) in counted else own
        found.append(replace(own, bytes_after=0) if held in counted else own)
        counted |= {(weight,), held}
    found.sort(key=lambda x: x.sqnr_db)
    ends = [Accuracy(n, "", x.sqnr_db, None, x.cosine, x.most) for n, x in outputs.items()]
    return AccuracyReport(tuple(ends), tuple(found), budget_db, inputs, source)

"""What quantization costs: the noise of each layer and of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmcap.base.numerics import Comparison
from tvmcap.base.quantization import LARGEST
from tvmcap.graph.convolution import Convolution
from tvmcap.graph.layers import Layer
from tvmcap.graph.quantize import Plan, quantized_weight, rounded

Array = npt.NDArray[Any]

_ROWS = 256
"""Rows of an input that one layer by itself is measured on."""


@dataclass(frozen=True)
class Accuracy:
    """One layer or output of the quantized model against the model as it was.

    Attributes
    ----------
    name: of the layer, or of the output.
    scheme: what the layer holds; "kept" where it was left as it was, "" for an output.
    sqnr_db: signal to quantization noise, noise from earlier layers included.
    own_db: the same on the unquantized model's input: what this layer alone adds; None for outputs.
    cosine: of the two results as vectors.
    max_error: largest absolute difference.
    saturation: share of the input's values beyond the range of their scale.
    bytes_before, bytes_after: of the weight, its scales included.
    """

    name: str
    scheme: str
    sqnr_db: float
    own_db: float | None
    cosine: float
    max_error: float
    saturation: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True)
class AccuracyReport:
    """The accuracy of a quantized model; ``layers`` are sorted worst first.

    Attributes
    ----------
    outputs: of the model; those of integers or bools are left out.
    layers: the products with constant weights, quantized or kept.
    budget_db: least ``sqnr_db`` of an output.
    inputs: sets of inputs measured on, and ``source`` where they are from.
    """

    outputs: tuple[Accuracy, ...]
    layers: tuple[Accuracy, ...]
    budget_db: float
    inputs: int
    source: str

    @property
    def ok(self) -> bool:
        """Whether every output is within the budget."""
        return all(o.sqnr_db >= self.budget_db for o in self.outputs)

    @property
    def bytes_before(self) -> int:
        """Bytes of the listed weights before."""
        return sum(x.bytes_before for x in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the listed weights and their scales after."""
        return sum(x.bytes_after for x in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; infinities become strings."""
        return {
            "ok": self.ok,
            "budget_db": self.budget_db,
            "inputs": self.inputs,
            "source": self.source,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "outputs": [_plain(asdict(x)) for x in self.outputs],
            "layers": [_plain(asdict(x)) for x in self.layers],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> AccuracyReport:
        """Read what ``to_json`` wrote."""
        outputs, layers = (
            tuple(Accuracy(**_numbers(x)) for x in data[name]) for name in ("outputs", "layers")
        )
        return AccuracyReport(
            outputs, layers, float(data["budget_db"]), data["inputs"], data["source"]
        )


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    odd = {k for k, v in data.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: str(v) if k in odd else v for k, v in data.items()}


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    texts = ("name", "scheme")
    return {k: float(v) if isinstance(v, str) and k not in texts else v for k, v in data.items()}


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
        self.most = max(self.most, float(np.abs(error).max(initial=0.0)))

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise): inf without noise; -inf where all is noise, NaN included."""
        if not math.isfinite(self.noise):
            return -math.inf
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 for two zeros."""
        length = math.sqrt(self.signal * self.size)
        return self.dot / length if length else float(self.noise == 0)


def hold(result: Comparison, ours: Array, reference: Array, floor_db: float) -> Comparison:
    """Judge one output of a quantized model by its noise instead of its largest error.

    Integers and bools (an argmax, a comparison) only need the reference's shape: noise moves ties.
    A NaN may stand for an infinity, and the reverse.
    """
    if ours.shape != reference.shape:
        return result
    if result.misplaced and (np.isfinite(ours) != np.isfinite(reference)).any():
        return result
    if not result.dtype.startswith(("float", "bfloat")):
        return replace(result, bad=0)
    noise = Noise()
    noise.add(reference, ours)
    bad = 0 if noise.sqnr_db >= floor_db else max(result.bad, 1)
    name = f"{result.name}, {noise.sqnr_db:.1f} dB of {floor_db:g}"
    budget = max(result.budget, result.max_abs)
    return replace(result, name=name, bad=bad, budget=budget, misplaced=0)


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
    """Put the measures together, the noisiest layers first."""
    found = sorted((x.result() for x in layers), key=lambda x: x.sqnr_db)
    ends = [Accuracy(n, "", x.sqnr_db, None, x.cosine, x.most) for n, x in outputs.items()]
    return AccuracyReport(tuple(ends), tuple(found), budget_db, inputs, source)

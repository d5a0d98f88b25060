"""What quantization cost: the accuracy of each layer and output, and the bytes before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
    bytes_before, bytes_after: of the weight, its scales included; 0 where another layer, which has
        the same weight, counts them.
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
    constants_before, constants_after: bytes of all tensors that the library holds, biases, norms
        and scales included, as the model was and as it is.
    library_after: bytes of the library, of weights beside it too; None where there is no file.
    """

    outputs: tuple[Accuracy, ...]
    layers: tuple[Accuracy, ...]
    budget_db: float
    inputs: int
    source: str
    constants_before: int = 0
    constants_after: int = 0
    library_after: int | None = None

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

    @property
    def library_before(self) -> int | None:
        """Bytes of the library if it held the tensors of the model as it was, and no other code."""
        if self.library_after is None:
            return None
        return self.library_after + self.constants_before - self.constants_after

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; infinities become strings."""
        return {
            "ok": self.ok,
            "budget_db": self.budget_db,
            "inputs": self.inputs,
            "source": self.source,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "constants_before": self.constants_before,
            "constants_after": self.constants_after,
            "library_before": self.library_before,
            "library_after": self.library_after,
            "outputs": [_plain(asdict(x)) for x in self.outputs],
            "layers": [_plain(asdict(x)) for x in self.layers],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> AccuracyReport:
        """Read what ``to_json`` wrote."""
        outputs, layers = (
            tuple(Accuracy(**_numbers(x)) for x in data[name]) for name in ("outputs", "layers")
        )
        sizes = ("constants_before", "constants_after", "library_after")
        return AccuracyReport(
            outputs,
            layers,
            float(data["budget_db"]),
            data["inputs"],
            data["source"],
            **{name: data[name] for name in sizes},
        )


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    odd = {k for k, v in data.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: str(v) if k in odd else v for k, v in data.items()}


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    texts = ("name", "scheme")
    return {k: float(v) if isinstance(v, str) and k not in texts else v for k, v in data.items()}

"""How a model is quantized: the scheme, what it applies to, and the accuracy it must keep."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from tvmcap.base.errors import ConfigError

SCHEMES = ("int8", "int8-weight-only", "fp8", "fp8-weight-only")
METHODS = ("minmax", "percentile", "mse", "entropy")
ACTIVATIONS = ("token", "static")

MAX_K = (2**31 - 1) // 127**2
"""Longest sum of products of int8 values in -127..127 that int32 holds: 133,144."""

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude used of each dtype; -128 is left out, so that the range is symmetric."""


@dataclass(frozen=True)
class Quantize:
    """Options of quantization.

    Attributes
    ----------
    scheme: ``"int8"`` or ``"fp8"`` (e4m3): weights with one scale for each output channel, and
        activations; with ``"-weight-only"`` activations keep their dtype.
    activations: ``"token"`` for one scale a row, found at run time, or ``"static"`` for one scale a
        tensor, from calibration, which clips what is outside, NaN and Inf included.
    smooth: alpha of SmoothQuant (Xiao et al., 2023), 0 to 1, or None: activations are divided, and
        weights multiplied, by max|x|**alpha / max|w|**(1 - alpha) of each input channel; needs
        calibration.
    keep: layers left as they are, by name or pattern (``"head"``, ``"blocks.*.gate.*"``).
    method: how a static range is chosen: ``"minmax"``, ``"percentile"``, ``"mse"``, ``"entropy"``.
    percentile: of ``method="percentile"``, in percent.
    budget_db: least signal-to-noise ratio of every output of the model, in dB.
    auto: also leave layers as they are until the budget is met, those with the most noise first.
    """

    scheme: str = "int8"
    activations: str = "token"
    smooth: float | None = None
    keep: tuple[str, ...] = ()
    method: str = "minmax"
    percentile: float = 99.99
    budget_db: float = 20.0
    auto: bool = False

    def __post_init__(self) -> None:
        """Refuse what no pass can do."""
        for name, known in (
            ("scheme", SCHEMES),
            ("activations", ACTIVATIONS),
            ("method", METHODS),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ConfigError(
                    f"quantize: {name}: expected one of {', '.join(known)}, got {value!r}"
                )
        keep = (self.keep,) if isinstance(self.keep, str) else self.keep
        if not isinstance(keep, list | tuple) or not all(isinstance(k, str) for k in keep):
            raise ConfigError(f"quantize: keep: expected names or patterns, got {self.keep!r}")
        object.__setattr__(self, "keep", tuple(keep))
        self._check_numbers()
        if self.weight_only and self.activations == "static":
            raise ConfigError(
                f"quantize: {self.scheme!r} leaves activations as they are; leave "
                "activations='static' out"
            )

    def _check_numbers(self) -> None:
        limits = {"smooth": (0, 1), "percentile": (50, 100), "budget_db": (-math.inf, math.inf)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if name == "smooth" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high or not math.isfinite(value):
                what = f"number from {low} to {high}" if math.isfinite(high) else "finite number"
                raise ConfigError(f"quantize: {name}: expected a {what}, got {value!r}")
        if not isinstance(self.auto, bool):
            raise ConfigError(f"quantize: auto: expected True or False, got {self.auto!r}")

    @property
    def weight_only(self) -> bool:
        """Whether activations keep their dtype."""
        return self.scheme.endswith("-weight-only")

    @property
    def dtype(self) -> str:
        """What quantized tensors hold."""
        return "int8" if self.scheme.startswith("int8") else "float8_e4m3fn"

    @property
    def needs_calibration(self) -> bool:
        """Whether the scheme depends on activations seen at build."""
        return self.smooth is not None or self.activations == "static"

    @property
    def clipping(self) -> dict[str, Any]:
        """What static clips depend on, beside the inputs; empty where scales are not static."""
        if self.activations != "static":
            return {}
        found: dict[str, Any] = {"method": self.method, "smooth": self.smooth}
        if self.method == "percentile":
            found["percentile"] = self.percentile
        if self.method == "mse":
            found["dtype"] = self.dtype
        return found

    def keeps(self, layer: str) -> bool:
        """Whether ``keep`` names the layer, or its weight with or without ``.weight``.

        The second layer of a weight is ``WEIGHT#2``.
        """
        weight = layer.partition("#")[0]
        names = (layer, weight, weight.removesuffix(".weight"))
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.keep)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data, which ``parse`` reads."""
        return {**asdict(self), "keep": list(self.keep)}


def parse(value: Any) -> Quantize | None:
    """Read the option ``quantize``: a scheme's name, ``"auto"``, a mapping of fields, or None.

    Raises ConfigError that names what is known.
    """
    if value is None or isinstance(value, Quantize):
        return value
    if isinstance(value, Mapping):
        known = [f.name for f in fields(Quantize)]
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"quantize: unknown field {name!r}; {hint}")
        return Quantize(**value)
    if value == "auto":
        return Quantize(auto=True)
    if isinstance(value, str) and value in SCHEMES:
        return Quantize(scheme=value)
    raise ConfigError(
        f"quantize: expected one of {', '.join(SCHEMES)}, 'auto', a tvmcap.Quantize, a dict of its "
        f"fields or None, got {value!r}"
    )

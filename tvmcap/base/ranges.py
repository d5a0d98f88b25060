"""What calibration is given and what it finds: inputs of the model, ranges of its activations."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmcap.base.errors import ConfigError
from tvmcap.base.folders import write_whole

FORMAT = "tvmcap-ranges-2"

_LARGEST, _LEAST = 3.4028235e38, 1e-36
"""What float32 holds at most, and the least clip whose scale it holds upside down."""


@dataclass(frozen=True)
class Range:
    """The input of one layer over the calibration inputs.

    Attributes
    ----------
    low, high: smallest and largest value seen.
    clip: magnitude that the largest quantized value stands for.
    channels: largest magnitude in each channel; empty where no scheme asked for it.
    """

    low: float
    high: float
    clip: float
    channels: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ranges:
    """The range of each layer's input, by the layer's name; a small JSON file.

    A build with the ranges of another build's calibration is that build, exactly.

    Attributes
    ----------
    layers: what calibration saw, for the layers whose scheme depends on it.
    kept: layers that ``auto`` left as they were.
    clipping: what the clips depend on, as ``Quantize.clipping`` says.
    """

    layers: Mapping[str, Range] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    clipping: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` is its inverse."""
        layers = {
            name: {"low": r.low, "high": r.high, "clip": r.clip, "channels": list(r.channels)}
            for name, r in self.layers.items()
        }
        return {
            "format": FORMAT,
            "clipping": dict(self.clipping),
            "layers": layers,
            "kept": list(self.kept),
        }

    @staticmethod
    def from_json(data: Any) -> Ranges:
        """Read what ``to_json`` wrote; raises ConfigError where it is malformed."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, expected {FORMAT!r}")
            layers = {str(name): _range(entry) for name, entry in data["layers"].items()}
            kept, clipping = data["kept"], data["clipping"]
            if not isinstance(kept, list) or not isinstance(clipping, dict):
                raise ValueError(f"kept {kept!r}, clipping {clipping!r}")
            return Ranges(layers, tuple(map(str, kept)), dict(clipping))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ConfigError(
                f"calibration: not the ranges that Ranges.save wrote ({e!r}); calibrate again"
            ) from e

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write them to a JSON file."""
        file = Path(path)
        try:
            write_whole(file, (json.dumps(self.to_json(), indent=1) + "\n").encode())
        except OSError as e:
            raise ConfigError(f"cannot write the ranges to {file}: {e}") from e
        return file

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Ranges:
        """Read a file that ``save`` wrote; raises ConfigError where that is not possible."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as e:
            raise ConfigError(f"calibration: cannot read ranges from {path}: {e}") from e
        return Ranges.from_json(data)


def _range(entry: Any) -> Range:
    if not isinstance(entry["channels"], list):
        raise ValueError(f"channels {entry['channels']!r}")
    values = [entry["low"], entry["high"], entry["clip"], *entry["channels"]]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    low, high, clip, *channels = values
    if not numbers or not all(abs(v) <= _LARGEST for v in values) or clip < _LEAST or low > high:
        raise ValueError(f"impossible range {values[:3]}")
    return Range(float(low), float(high), float(clip), tuple(map(float, channels)))


@dataclass(frozen=True)
class Samples:
    """Inputs of the model to calibrate on: one tuple of arguments each."""

    inputs: tuple[tuple[Any, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return a digest of the values, which tells one set of samples from another."""
        return {"samples": len(self.inputs), "sha256": digest(self.inputs)}


def digest(value: Any) -> str:
    """Return the sha256 of a nested structure of tensors, by their dtypes, shapes and values."""
    from tvmcap.base.numerics import to_numpy  # numpy, which `import tvmcap` does without

    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if _is_tensor(value):
            array = to_numpy(value)
            found.update(f"{value.dtype}{array.shape}".encode())
            found.update(array.tobytes())
        elif isinstance(value, Mapping | tuple | list):
            found.update(f"{type(value).__name__}{len(value)}".encode())
            for item in value.items() if isinstance(value, Mapping) else value:
                feed(item)
        else:
            found.update(repr(value).encode())

    feed(value)
    return found.hexdigest()


def parse(value: Any) -> Samples | Ranges | None:
    """Read the option ``calibration``: inputs, ranges, or the path of a file of ranges.

    Each input is a tuple or list of arguments, or one tensor.
    """
    if value is None or isinstance(value, Samples | Ranges):
        return value
    if isinstance(value, str | os.PathLike):
        return Ranges.load(value)
    if _is_tensor(value) or not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise ConfigError(
            "calibration: expected an iterable of inputs (a tensor or a tuple of arguments each), "
            f"tvmcap.Ranges or the path of their file, got {type(value).__name__}"
        )
    inputs = tuple(tuple(v) if isinstance(v, tuple | list) else (v,) for v in value)
    if not inputs:
        raise ConfigError(
            "calibration: there are no inputs in it (an iterator may be used up); pass a list of "
            "inputs"
        )
    return Samples(inputs)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")

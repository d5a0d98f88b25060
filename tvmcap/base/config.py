"""Config: the one frozen set of options, and where each value comes from.

Precedence: the call, then ``TVMCAP_*`` environment variables, then ``tvmcap.toml`` in the working
folder, then defaults.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tvmcap.base import ranges
from tvmcap.base.errors import ConfigError
from tvmcap.base.options import PATHS, checked, integer, is_integer
from tvmcap.base.quantization import Quantize

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Dim:
    """A named dynamic dimension with inclusive bounds; equal names are equal sizes.

    A size of 0 gives empty results, and reductions what PyTorch makes of no elements. Where the
    code takes no size so small (``x.amax(0)``, ``x[1]``), the library's least is larger.
    """

    name: str
    min: int = 0
    max: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that admit nothing and names that are no identifiers."""
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ConfigError(f"Dim name: expected an identifier such as 'B', got {self.name!r}")
        for field in ("min", "max"):
            value = integer(getattr(self, field))
            if not (is_integer(value) or (field == "max" and value is None)):
                expected = "a whole number" + (" or None" if field == "max" else "")
                raise ConfigError(f"Dim {self.name!r}: {field}: expected {expected}, got {value!r}")
            object.__setattr__(self, field, value)
        if self.min < 0 or (self.max is not None and self.max < max(self.min, 1)):
            raise ConfigError(
                f"Dim {self.name!r}: need 0 <= min <= max, got min={self.min}, max={self.max}"
            )


@dataclass(frozen=True)
class Config:
    """Options of ``build``, ``tune`` and ``load``.

    Attributes
    ----------
    target: ``"llvm"``, ``"cuda"``, a JSON object, or None: cuda where a GPU is, else llvm.
    dynamic: argument (name, dotted name or position) to {dimension index: name or Dim}.
    constants: names of arguments frozen into the library at their example values.
    tune: ``"cached"`` (use records), ``"none"`` (rules alone) or a number of trials to run first.
    budget_s: seconds that tuning may take in all; None for no limit.
    quantize: a scheme such as ``"int8"``, ``"auto"``, or a ``Quantize``; None for no quantization.
    calibration: inputs (a tensor or a tuple of arguments each), ``Ranges`` or the path of their
        file; what ``quantize`` may need to know of activations.
    backward: make a library that takes part in autograd: a forward and a backward entry.
    memory_budget: with ``backward``, from 1 (save for the backward entry all that helps its speed)
        to 0 (compute again all that can be).
    disable: names of passes to leave out (``tvmcap.pipeline`` holds the list).
    allow_tf32: on cuda, float32 matmuls may multiply in tf32 (10 mantissa bits) and add in float32,
        and ``verify`` holds them to that error; on llvm it changes nothing.
    vendor_matmul: leave matmuls to torch's kernels, untuned; the library then needs torch.
    verify: compare the library with a higher-precision reference after building.
    seed: seed of every random choice.
    workers: processes that compile candidates; with ``rpc``, devices that measure them.
    rpc: ``"HOST:PORT"`` of an RPC tracker whose servers measure candidates; None for this machine.
    key: what those servers are registered under.
    log_dir: folder of tuning records to read first and write to.
    cache_dir: folder of the compile cache; None for the user's cache folder.
    dump: folder that receives the IR after each pass.
    """

    target: str | Mapping[str, Any] | None = None
    dynamic: Mapping[Any, Mapping[int, str | Dim]] | None = None
    constants: tuple[str, ...] = ()
    tune: str | int = "cached"
    budget_s: float | None = None
    quantize: str | Quantize | Mapping[str, Any] | None = None
    calibration: Any = None
    backward: bool = False
    memory_budget: float = 1.0
    disable: tuple[str, ...] = ()
    allow_tf32: bool = False
    vendor_matmul: bool = False
    verify: bool = True
    seed: int = 0
    workers: int | None = None
    rpc: str | None = None
    key: str | None = None
    log_dir: str | None = None
    cache_dir: str | None = None
    dump: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a target."""
        for name in FIELDS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if self.calibration is not None and self.quantize is None:
            raise ConfigError("calibration has no effect without quantize; pass quantize='int8'")
        if (self.rpc is None) != (self.key is None):
            raise ConfigError(
                "rpc='HOST:PORT' (a tracker) and key='NAME' (of its servers) go together; "
                f"{'rpc' if self.rpc is None else 'key'} is missing"
            )
        if self.backward and self.quantize is not None:
            raise ConfigError(
                "quantize and backward=True exclude each other: train first, then build quantized"
            )
        if self.vendor_matmul and self.quantize is not None:
            raise ConfigError(
                "vendor_matmul leaves the products to torch that quantize would rewrite; choose one"
            )

    def to_json(self, *, only_code: bool = False) -> dict[str, Any]:
        """Return plain JSON data; ``only_code`` leaves out what cannot change the library."""
        data = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if not (only_code and f.name in _NO_CODE)
        }
        plain: dict[str, Any] = json.loads(json.dumps(data, default=_plain))
        return plain


_NO_CODE = ("verify", "workers", "rpc", "key", "log_dir", "cache_dir", "dump", "budget_s")


def _plain(value: Any) -> Any:
    if isinstance(value, Quantize | ranges.Ranges | ranges.Samples):
        return value.to_json()
    return asdict(value) if isinstance(value, Dim) else str(value)


FIELDS = {f.name: f for f in fields(Config)}
_NOT_FROM_TEXT = ("dynamic", "calibration")


def make_config(config: Config | None = None, **options: Any) -> Config:
    """Merge ``options`` over ``config``, or over the environment, ``tvmcap.toml`` and the defaults.

    Raises ConfigError for a field that does not exist, naming the nearest one, or a value that
    cannot be read or has the wrong type. An empty path means the default.
    """
    for name in options:
        _check_name(name, "option")
    if config is not None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"config: expected a tvmcap.Config, got {config!r}; pass single options by their "
                "names"
            )
        return replace(config, **options)
    return Config(**{**_from_toml(Path("tvmcap.toml")), **_from_environment(os.environ), **options})


def _check_name(name: str, what: str) -> None:
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FIELDS)}"
        raise ConfigError(f"unknown {what} {name!r}; {hint}")


def _from_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read {path}: {e}") from e
    for name in data:
        _check_name(name, f"option in {path}:")
    return {name: checked(name, value, f"{path}: ") for name, value in data.items()}


#: Variables that are switches of the process and not fields of Config.
SWITCHES = ("TVMCAP_CHECK",)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    options = {}
    for key, text in environ.items():
        if not key.startswith("TVMCAP_") or key in SWITCHES:
            continue
        name = key[len("TVMCAP_") :].lower()
        _check_name(name, f"variable {key}:")
        if name in _NOT_FROM_TEXT:
            raise ConfigError(f"{key} cannot be given as text; pass {name}= in Python")
        if name in PATHS and not text:
            continue  # as if it were not set
        try:
            options[name] = checked(name, parse_option(name, text))
        except ConfigError as e:
            raise ConfigError(f"{key}: {e}") from e
    return options


def parse_option(name: str, text: str) -> Any:
    """Read the field ``name`` from ``text``, as the environment and the command line give it."""
    kind = str(FIELDS[name].type)
    try:
        if kind.startswith("bool"):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        if kind.startswith("tuple"):
            return tuple(part for part in text.split(",") if part)
        if name == "tune":
            return int(text) if text.isdigit() else text
        if name in ("target", "quantize"):
            return json.loads(text) if text.startswith("{") else text
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        return text
    except (KeyError, ValueError) as e:
        raise ConfigError(f"cannot read {name} from {text!r}: expected {kind}") from e

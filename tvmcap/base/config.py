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

from tvmcap.base.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Dim:
    """A named dynamic dimension with inclusive bounds; equal names are equal sizes.

    A size of 0 gives empty results.
    """

    name: str
    min: int = 0
    max: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that admit nothing and names that are no identifiers."""
        if not self.name.isidentifier():
            raise ConfigError(f"Dim name {self.name!r}: use a Python identifier such as 'B'")
        if self.min < 0 or (self.max is not None and self.max < max(self.min, 1)):
            raise ConfigError(
                f"Dim {self.name!r}: need 0 <= min <= max, got min={self.min}, max={self.max}"
            )


#: Options whose names are fixed and whose passes do not exist yet: only the default is accepted.
_RESERVED: dict[str, Any] = {
    "quantize": None,
    "calibration": None,
    "backward": False,
    "memory_budget": 1.0,
    "allow_tf32": False,
    "rpc": None,
}


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
    quantize, calibration, backward, memory_budget, allow_tf32, rpc: reserved; refused until there
        is something behind them.
    disable: names of passes to leave out (``tvmcap.pipeline`` holds the list).
    verify: compare the library with a higher-precision reference after building.
    seed: seed of every random choice.
    workers: processes that compile candidates.
    log_dir: folder of tuning records to read first and write to.
    cache_dir: folder of the compile cache; None for the user's cache folder.
    dump: folder that receives the IR after each pass.
    """

    target: str | Mapping[str, Any] | None = None
    dynamic: Mapping[Any, Mapping[int, str | Dim]] | None = None
    constants: tuple[str, ...] = ()
    tune: str | int = "cached"
    budget_s: float | None = None
    quantize: str | None = None
    calibration: Any = None
    backward: bool = False
    memory_budget: float = 1.0
    disable: tuple[str, ...] = ()
    allow_tf32: bool = False
    verify: bool = True
    seed: int = 0
    workers: int | None = None
    rpc: str | None = None
    log_dir: str | None = None
    cache_dir: str | None = None
    dump: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a target."""
        for name in ("constants", "disable"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = tuple(part for part in value.split(",") if part)
            object.__setattr__(self, name, tuple(value))
        if isinstance(self.tune, bool) or not (
            self.tune in ("cached", "none") or isinstance(self.tune, int)
        ):
            raise ConfigError(f"tune={self.tune!r}: use 'cached', 'none' or a number of trials")
        if isinstance(self.tune, int) and self.tune < 1:
            raise ConfigError(
                f"tune={self.tune}: a number of trials is at least 1; 'none' uses no records"
            )
        if self.budget_s is not None and self.budget_s <= 0:
            raise ConfigError(
                f"budget_s={self.budget_s}: give a positive number of seconds, or None"
            )
        for name, default in _RESERVED.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: this version of tvmcap cannot do that yet; "
                    f"leave {name} out"
                )
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers={self.workers}: give at least 1")

    def to_json(self, *, only_code: bool = False) -> dict[str, Any]:
        """Return plain JSON data; ``only_code`` leaves out what cannot change the library."""
        data = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if not (only_code and f.name in _NO_CODE)
        }
        plain: dict[str, Any] = json.loads(json.dumps(data, default=_plain))
        return plain


_NO_CODE = ("verify", "workers", "rpc", "log_dir", "cache_dir", "dump", "budget_s")


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Dim) else str(value)


FIELDS = {f.name: f for f in fields(Config)}
_NOT_FROM_TEXT = ("dynamic", "calibration")


def make_config(config: Config | None = None, **options: Any) -> Config:
    """Merge ``options`` over ``config``, or over the environment, ``tvmcap.toml`` and the defaults.

    Raises ConfigError for a field that does not exist, naming the nearest one, or a value that
    cannot be read.
    """
    for name in options:
        _check_name(name, "option")
    if config is not None:
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
    return data


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
        options[name] = parse_option(name, text)
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
        if name == "target":
            return json.loads(text) if text.startswith("{") else text
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        return text
    except (KeyError, ValueError) as e:
        raise ConfigError(f"cannot read {name} from {text!r}: expected {kind}") from e

"""What each option may hold: its plain form, whether that fits, and how to say what would."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tvmcap.base import quantization, ranges
from tvmcap.base.errors import ConfigError

_NAMES = ("constants", "disable")
_FLAGS = ("backward", "verify", "allow_tf32", "vendor_matmul")
PATHS = ("log_dir", "cache_dir", "dump")
_A_NAME_LIST = "names of {}, such as ('a', 'b')"
_A_FOLDER = "the path of a folder, or None"


def integer(value: Any) -> Any:
    """Make an int of what counts as one (NumPy's integers do); other values stay."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _is_address(value: Any) -> bool:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _is_fraction(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= 1


#: Fields with a form of their own.
_PARSED: dict[str, Callable[[Any], Any]] = {
    "quantize": quantization.parse,
    "calibration": ranges.parse,
}

#: What each field must hold, and how to say that.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "target": (
        lambda v: v is None or isinstance(v, str | Mapping),
        "'llvm', 'cuda', a JSON object or None",
    ),
    "dynamic": (
        lambda v: v is None or isinstance(v, Mapping),
        "a dict of argument to {axis: name or Dim}, such as {'x': {0: 'B'}}, or None",
    ),
    "constants": (_are_names, _A_NAME_LIST.format("arguments")),
    "disable": (_are_names, _A_NAME_LIST.format("passes")),
    "tune": (
        lambda v: (isinstance(v, str) and v in ("cached", "none")) or (is_integer(v) and v >= 1),
        "'cached', 'none' or a number of trials, at least 1",
    ),
    "memory_budget": (_is_fraction, "a number from 0 (recompute) to 1 (save)"),
    "budget_s": (
        lambda v: v is None or _is_seconds(v),
        "a positive number of seconds, or None for no limit",
    ),
    **{name: (lambda v: isinstance(v, bool), "True or False") for name in _FLAGS},
    "seed": (lambda v: is_integer(v) and 0 <= v < 1 << 63, "a whole number from 0 to 2**63 - 1"),
    "workers": (
        lambda v: v is None or (is_integer(v) and v >= 1),
        "a number of processes, at least 1, or None",
    ),
    "rpc": (lambda v: v is None or _is_address(v), "the HOST:PORT of an RPC tracker, or None"),
    "key": (
        lambda v: v is None or (isinstance(v, str) and bool(v) and not {" ", ":"} & {*v}),
        "a name without spaces or colons, or None",
    ),
    **{name: (lambda v: v is None or isinstance(v, str), _A_FOLDER) for name in PATHS},
}


def checked(name: str, value: Any, where: str = "") -> Any:
    """Return a field's value in its plain form; raises ConfigError where it has the wrong type."""
    if name in _PARSED:
        try:
            return _PARSED[name](value)
        except ConfigError as e:
            raise ConfigError(f"{where}{e}") from e
    plain = _plain_form(name, value)
    fits, expected = _EXPECTED[name]
    if not fits(plain):
        raise ConfigError(f"{where}{name}: expected {expected}, got {value!r}")
    return plain


def _plain_form(name: str, value: Any) -> Any:
    if name in _NAMES:
        if isinstance(value, str):
            return tuple(part for part in value.split(",") if part)
        listed = isinstance(value, Iterable) and not isinstance(value, bytes | Mapping)
        return tuple(value) if listed else value
    if name in PATHS:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        return None if path == "" else path
    return integer(value) if name in ("tune", "seed", "workers") else value

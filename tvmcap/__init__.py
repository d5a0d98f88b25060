"""tvmcap: one PyTorch function in, one tuned, verified, deployable library out."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tvmcap.base import errors as errors
from tvmcap.base.config import Config as Config
from tvmcap.base.config import Dim as Dim
from tvmcap.base.quantization import Quantize as Quantize
from tvmcap.base.ranges import Ranges as Ranges
from tvmcap.versions import __version__ as __version__

if TYPE_CHECKING:
    from tvmcap.base.score import Score as Score
    from tvmcap.bisect import bisect as bisect
    from tvmcap.build import build as build
    from tvmcap.capture.breaks import explain_capture as explain_capture
    from tvmcap.capture.custom import register_op as register_op
    from tvmcap.capture.export import Captured as Captured
    from tvmcap.compiled import Compiled as Compiled
    from tvmcap.compiled import load as load
    from tvmcap.kernel.registry import register_template as register_template
    from tvmcap.tune import tune as tune
    from tvmcap.verify.check import verify as verify

_LAZY = {
    "build": "tvmcap.build",
    "load": "tvmcap.compiled",
    "tune": "tvmcap.tune",
    "verify": "tvmcap.verify.check",
    "bisect": "tvmcap.bisect",
    "register_template": "tvmcap.kernel.registry",
    "register_op": "tvmcap.capture.custom",
    "explain_capture": "tvmcap.capture.breaks",
    "Compiled": "tvmcap.compiled",
    "Captured": "tvmcap.capture.export",
    "Score": "tvmcap.base.score",
}

__all__ = [
    "Captured",
    "Compiled",
    "Config",
    "Dim",
    "Quantize",
    "Ranges",
    "Score",
    "bisect",
    "build",
    "errors",
    "explain_capture",
    "load",
    "register_op",
    "register_template",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the rest of the package when it is first used.

    Torch and TVM's compiler take seconds. Raises ToolchainError where a package is missing.
    """
    if name == "errors":
        return errors
    if name not in _LAZY:
        raise AttributeError(f"module 'tvmcap' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as e:
        raise errors.missing(f"tvmcap.{name}", e) from e
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps ``tvmcap.build`` the function where the module of the same name is imported first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

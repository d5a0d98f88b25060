"""The tree of errors a user can meet.

Every message says what was expected, what came, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmcap.base.accuracy import AccuracyReport


class TvmcapError(Exception):
    """Base of every error that tvmcap raises on purpose."""


class ConfigError(TvmcapError):
    """An option is unknown, has the wrong type, or contradicts another."""


class CaptureError(TvmcapError):
    """PyTorch code could not be turned into a graph.

    Attributes
    ----------
    node: the node of the graph at which that failed (a ``torch.fx.Node``), where it was one.
    """

    node: Any = None


class UnsupportedOperatorError(CaptureError):
    """Operators with no lowering: all of them, with counts and source lines."""


class DataDependentError(CaptureError):
    """Control flow or a shape depends on the values of tensors."""


class MutationError(CaptureError):
    """The function changes a buffer or an argument in place."""


class BuildError(TvmcapError):
    """A pass, a kernel or the linker failed."""


class ContractError(BuildError):
    """A pass left a module that breaks the pass's contract (checked under ``TVMCAP_CHECK=1``)."""


class QuantizeError(BuildError):
    """A model cannot be quantized as asked: no layer, no calibration data, unusable activations."""


class AccuracyError(QuantizeError):
    """Quantization costs more accuracy than the budget allows; the message is the report.

    Attributes
    ----------
    report: the same as an object.
    """

    def __init__(self, message: str, report: AccuracyReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class ToolchainError(BuildError):
    """A compiler, linker or package that the target needs is missing or does not fit."""


class TuneError(TvmcapError):
    """Tuning could not go on: every candidate of a batch failed, or nothing can be measured."""


class RecordError(TvmcapError):
    """A record store cannot be read or written."""


class LibraryError(TvmcapError):
    """A library file cannot be used."""


class DamagedLibraryError(LibraryError):
    """The file is truncated, altered, or not a tvmcap library."""


class IncompatibleLibraryError(LibraryError):
    """The library was built for another machine: GPU architecture, CPU features or TVM version."""


class InputError(TvmcapError):
    """An argument of a call does not match the library's signature."""


class VerifyError(TvmcapError):
    """A result is outside its error budget, or cannot be checked."""


def missing(what: str, error: ModuleNotFoundError) -> ToolchainError:
    """Return the error where ``what`` needs a package that is not installed."""
    return ToolchainError(
        f"{what} needs {error.name}, which is not installed here: pip install {error.name}; "
        "a library that is built loads and runs without it"
    )

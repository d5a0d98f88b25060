"""Opening a library file: what runs it depends on whether it has gradients."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import read_manifest
from tvmcap.base.replaced import of_one_version
from tvmcap.runtime.executor import Executor


def open_library(path: str | os.PathLike[str], *, device: int = 0) -> Any:
    """Return the ``Executor`` of a library, or its ``TrainingExecutor``, which needs torch.

    Raises what they raise, and LibraryError where torch is missing.
    """
    return of_one_version(Path(path), lambda: _open(path, device))


def _open(path: str | os.PathLike[str], device: int) -> Any:
    manifest = read_manifest(path)
    if manifest.training is None:
        return Executor(path, device=device, manifest=manifest)
    if importlib.util.find_spec("torch") is None:
        raise LibraryError(f"{path}: a library with gradients needs torch: pip install torch")
    from tvmcap.runtime.training import TrainingExecutor

    return TrainingExecutor(path, manifest, device=device)

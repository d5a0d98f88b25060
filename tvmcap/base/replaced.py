"""Libraries that others replace while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tvmcap.base.errors import LibraryError, TvmcapError
from tvmcap.base.manifest import stored_digest

_ATTEMPTS = 100
_T = TypeVar("_T")


def of_one_version(path: Path, read: Callable[[], _T]) -> _T:
    """Return what ``read`` makes of a library, all of it of one version where others replace it.

    It reads again where the file was replaced meanwhile. Raises what ``read`` does, and
    LibraryError for a file that is replaced again and again.
    """
    for _ in range(_ATTEMPTS):
        before = _version(path)
        try:
            found = read()
        except (TvmcapError, OSError):
            if _version(path) == before:
                raise
        else:
            if _version(path) == before:
                return found
    raise LibraryError(f"{path}: was replaced {_ATTEMPTS} times while it was read; try again")


def _version(path: Path) -> tuple[int, bytes] | None:
    try:
        return path.stat().st_mtime_ns, stored_digest(path)
    except (OSError, LibraryError):
        return None

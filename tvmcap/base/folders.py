"""Folders for temporary files, and files that are written whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvmcap.base.errors import LibraryError


@contextmanager
def temporary_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that is gone afterwards, ``within`` one or where temporary files lie.

    Raises LibraryError where the system refuses to make it, or what the block does with files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as folder:
            yield Path(folder)
    except OSError as e:
        where = (
            "the folder for temporary files (TMPDIR names another)" if within is None else within
        )
        raise LibraryError(
            f"cannot write to {where}: {e.strerror or e}; choose a folder that you may write to"
        ) from e


def write_whole(path: Path, data: bytes) -> None:
    """Put ``data`` in place of what a file holds, whole or not at all; raises OSError."""
    file = path.resolve()
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)

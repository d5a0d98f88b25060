"""Libraries that are replaced while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.libs import chain_signature, manifest_for
from tvmcap.base.errors import DamagedLibraryError, LibraryError
from tvmcap.base.manifest import ELF_MAGIC, append_manifest, read_manifest, write_atomically
from tvmcap.base.replaced import of_one_version


def put(path: Path, maximum: int) -> None:
    """Write something with a manifest, as a library is written."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(ELF_MAGIC + bytes(99))
        append_manifest(temporary, manifest_for(chain_signature(maximum=maximum)))

    write_atomically(path, write)


def most(path: Path) -> int | None:
    return read_manifest(path).signature.dims[0].max


def reads(path: Path, *during: Callable[[], object]) -> list[int | None]:
    """Return what each reading found, where one of ``during`` happens in the midst of each."""
    found, left = [], list(during)

    def read() -> None:
        found.append(most(path))
        if left:
            left.pop(0)()

    of_one_version(path, read)
    return found


def test_one_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    put(path, 1)
    assert reads(path) == [1]
    assert reads(path, lambda: put(path, 2), lambda: put(path, 3)) == [1, 2, 3]


def fail() -> None:
    raise DamagedLibraryError("no good")


def test_an_error_counts_where_nothing_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    put(path, 1)

    def replace_and_fail() -> None:
        put(path, 2)
        fail()

    assert reads(path, replace_and_fail) == [1, 2]
    with pytest.raises(DamagedLibraryError, match="no good"):
        reads(path, fail)
    with pytest.raises(LibraryError, match="no such file"):
        reads(path, path.unlink)
    with pytest.raises(LibraryError, match="no such file"):
        reads(path)


def test_one_that_is_always_replaced_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    put(path, 1)
    with pytest.raises(LibraryError, match="was replaced 100 times"):
        reads(path, *[lambda i=i: put(path, i) for i in range(100)])

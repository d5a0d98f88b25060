"""Versions of what a library is made with."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions of tvmcap, TVM, its FFI and torch; None for what is not installed.

    Imports none of them.
    """
    names = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi", "torch": "torch"}
    return {"tvmcap": __version__, **{key: _version(name) for key, name in names.items()}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


#: Folders whose code decides what a library computes and how fast; ``runtime/serving`` does not.
COMPILER = ("capture", "graph", "kernel", "library", "runtime", "schedules")


@functools.cache
def source_hash(folders: tuple[str, ...] = ()) -> str:
    """Hash of tvmcap's own source, all of it or some folders of the package.

    The compile cache keeps libraries of other code apart by it; results on record name it.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent
    paths = [p for folder in folders for p in (root / folder).glob("*.py")]
    for path in sorted(paths or [*root.rglob("*.py"), *(root / "schedules").glob("*.py")]):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

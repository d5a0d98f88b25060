"""The compile cache: one library file a key, shared by processes, that may vanish at any time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from tvmcap.base.errors import IncompatibleLibraryError, LibraryError
from tvmcap.base.manifest import read_manifest
from tvmcap.library.export import weights_path

_log = logging.getLogger("tvmcap")


@dataclass(frozen=True)
class Status:
    """How many libraries a cache holds, and their bytes, weights beside them included."""

    folder: Path
    entries: int
    bytes: int


def key(parts: Mapping[str, Any]) -> str:
    """Return the sha256 of ``parts`` as canonical JSON: all that the library depends on."""
    text = json.dumps(
        parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def default_folder() -> Path:
    """Return the user's cache folder."""
    return platformdirs.user_cache_path("tvmcap")


def lookup(key: str, folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the library of ``key``, or None; a damaged one is dropped, with a warning."""
    path = _path(key, folder)
    try:
        if not path.exists():
            return None
        manifest = read_manifest(path, check=False)
        if manifest.weights is not None and not path.with_name(manifest.weights.file).is_file():
            raise LibraryError(f"{path}: its weights are missing")
    except LibraryError as e:
        _log.warning("dropping a cached library: %s", e)
        _remove(path)
        return None
    except OSError as e:
        _log.warning("the compile cache cannot be read (%s)", e)
        return None
    _touch(path)
    return path


def store(
    key: str, build: Callable[[Path], object], folder: str | os.PathLike[str] | None = None
) -> Path:
    """Return the library of ``key``, built by ``build(path)`` unless it is there.

    ``build`` writes the file whole or not at all (``library.export.write`` does). Of several
    processes that ask for one key one builds; the others wait and get its file. A folder that
    cannot be written to is replaced by a temporary one for the life of this process, with a
    warning.
    """
    found = lookup(key, folder)
    if found is not None:
        return found
    path = _path(key, _writable(folder))
    with filelock.FileLock(path.with_suffix(".lock")):
        if lookup(key, path.parent) is None:
            build(path)
    return path


def drop(key: str, folder: str | os.PathLike[str] | None = None) -> None:
    """Remove the library of ``key``: for a file whose damage shows only when it is loaded."""
    _remove(_path(key, folder))


def _path(key: str, folder: str | os.PathLike[str] | None) -> Path:
    return Path(folder if folder is not None else default_folder()) / f"{key}.so"


def _writable(folder: str | os.PathLike[str] | None) -> Path:
    path = Path(folder if folder is not None else default_folder())
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as e:
        temporary = Path(_temporary_folder().name)
        _log.warning(
            "cannot write to the compile cache %s (%s): this process keeps its libraries in %s "
            "and the next one "
            "compiles again; set cache_dir to a folder that you may write to",
            path,
            e.strerror or e,
            temporary,
        )
        return temporary


@lru_cache(maxsize=1)
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tvmcap-cache-")


def status(folder: str | os.PathLike[str] | None = None) -> Status:
    """Count libraries and bytes."""
    path = Path(folder if folder is not None else default_folder())
    entries = _entries(path)
    return Status(path, len(entries), sum(size for _, size, _ in entries))


def contents(folder: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Count libraries and bytes by ``target`` and ``tvm``.

    ``target`` is "of another version" for libraries that this version does not read, and "damaged"
    for what is no library.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for path, size, _ in _entries(Path(folder if folder is not None else default_folder())):
        try:
            manifest = read_manifest(path, check=False)
            arch = manifest.target.get("mcpu") or manifest.target.get("arch")
            target = f"{manifest.target.get('kind')} {arch or ''}".strip()
            held = (target, str(manifest.versions.get("tvm")))
        except IncompatibleLibraryError:
            held = ("of another version", "")
        except (LibraryError, OSError):
            held = ("damaged", "")
        found.setdefault(held, []).append(size)
    return [
        {"target": target, "tvm": tvm, "libraries": len(sizes), "bytes": sum(sizes)}
        for (target, tvm), sizes in sorted(found.items())
    ]


def clear(folder: str | os.PathLike[str] | None = None) -> Status:
    """Remove every library; returns what was there."""
    return prune(0, folder)


def prune(max_bytes: int, folder: str | os.PathLike[str] | None = None) -> Status:
    """Remove the least recently used until the rest fits ``max_bytes``; return what was removed."""
    place = Path(folder if folder is not None else default_folder())
    entries = sorted(_entries(place), key=lambda entry: entry[2])
    total, removed, freed = sum(size for _, size, _ in entries), 0, 0
    for path, size, _ in entries:
        if total - freed <= max_bytes:
            break
        _remove(path)
        path.with_suffix(".lock").unlink(missing_ok=True)
        removed, freed = removed + 1, freed + size
    return Status(place, removed, freed)


def _entries(folder: Path) -> list[tuple[Path, int, float]]:
    """Path, bytes and time of last use of every library, without files that vanish meanwhile."""
    entries = []
    for path in folder.glob("[!.]*.so"):
        try:
            stat, beside = path.stat(), weights_path(path)
            size = stat.st_size + (beside.stat().st_size if beside.exists() else 0)
            entries.append((path, size, stat.st_mtime))
        except OSError:
            continue
    return entries


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError as e:  # a cache that others own: it works, and does not learn what is used
        _log.debug("cannot mark %s as used: %s", path, e)


def _remove(path: Path) -> None:
    for file in (path, weights_path(path)):
        try:
            file.unlink(missing_ok=True)
        except OSError as e:
            _log.warning("cannot remove %s from the compile cache: %s", file, e)

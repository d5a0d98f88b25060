"""Ensures one file: device binaries, weights and manifest, written whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmcap.base import codegen
from tvmcap.base.errors import BuildError, LibraryError
from tvmcap.base.manifest import (
    Manifest,
    Weights,
    append_manifest,
    copy_with_manifest,
    read_manifest,
    write_atomically,
)
from tvmcap.base.replaced import of_one_version
from tvmcap.base.tensors import write_tensors

#: A library calls its own kernels, whatever of the same name is global in a process.
_OPTIONS = ["-Wl,-Bsymbolic"] if sys.platform.startswith("linux") else []


def write(
    executable: Any,
    path: str | os.PathLike[str],
    manifest: Manifest,
    weights: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a Relax VM executable as a library; returns the manifest as written.

    ``weights`` (name to contiguous CPU tensor, in calling order) go to ``<path>.safetensors``
    beside it. Raises ToolchainError without a C compiler to link with, BuildError where linking
    fails, LibraryError for a path that cannot be written.
    """
    path = Path(path)
    if weights:
        file = weights_path(path)
        digest: list[str] = []
        write_atomically(file, lambda temporary: digest.append(write_tensors(temporary, weights)))
        manifest = replace(manifest, weights=Weights(file.name, digest[0], tuple(weights)))

    def link(temporary: Path) -> None:
        _link(executable, temporary)
        append_manifest(temporary, manifest)

    write_atomically(path, link)
    return manifest


def weights_path(path: Path) -> Path:
    """Where large weights of the library ``path`` lie."""
    return path.with_name(path.name + ".safetensors")


def _link(executable: Any, path: Path) -> None:
    compiler = codegen.require_linker()
    try:
        executable.export_library(str(path), options=_OPTIONS)
    except Exception as e:
        raise BuildError(f"linking the library with {compiler} failed; its message:\n{e}") from e


def copy_library(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Manifest:
    """Copy a library, and the weights beside it; each file appears whole or not at all.

    The copy's weights are named after it. Raises DamagedLibraryError for a damaged source,
    LibraryError for a target that cannot be written.
    """
    return of_one_version(Path(source), lambda: _copy(Path(source), Path(target)))


def _copy(source: Path, target: Path) -> Manifest:
    manifest = read_manifest(source)
    if target.exists() and target.samefile(source):
        return manifest
    if manifest.weights is None:
        write_atomically(target, lambda temporary: shutil.copyfile(source, temporary))
        return manifest
    weights, copy = source.with_name(manifest.weights.file), weights_path(target)
    if not weights.is_file():
        raise LibraryError(
            f"{weights}: the weights of {source} are missing; copy both files, or build it again"
        )
    write_atomically(copy, lambda temporary: shutil.copyfile(weights, temporary))
    manifest = replace(manifest, weights=replace(manifest.weights, file=copy.name))
    copy_with_manifest(source, target, manifest)
    return manifest

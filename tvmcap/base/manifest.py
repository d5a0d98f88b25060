"""What a library file says about itself: a trailer, read and checked without loading the file.

Layout: ``[ELF bytes][manifest JSON][footer]``; the footer is 56 bytes: magic, length of the JSON,
length of the ELF (both little-endian 64-bit), and the sha256 of ELF and JSON. A loader of shared
objects ignores the trailer.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from tvmcap.base.errors import DamagedLibraryError, IncompatibleLibraryError, LibraryError
from tvmcap.base.signature import Signature, Size, typed_size
from tvmcap.base.training import Training

FORMAT = 2
MAGIC = b"tvmcap\x00\x01"
ELF_MAGIC = b"\x7fELF"
_FOOTER = struct.Struct("<8sQQ32s")
_CHUNK = 1 << 20
_REMEDY = "copy the file again, or build and export it again"


@dataclass(frozen=True)
class Weights:
    """Frozen weights beside the library: a safetensors file, its sha256, names in calling order."""

    file: str
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest of one library.

    Attributes
    ----------
    versions: of ``tvmcap``, ``tvm``, ``tvm_ffi`` and ``torch`` at build.
    target: ``kind``, and where they apply ``mcpu``, ``features`` (LLVM names the code may use),
        ``arch`` (``"sm_90a"``).
    signature: the calling convention.
    coverage: one ``{"task", "served_by", "record", "sizes", "reason"}`` a task.
    score: ``Score.to_json()``, or None.
    verified: compared with a reference: passed, failed, or None for not yet.
    frozen: names of the weights inside the library.
    weights: where large weights are, or None when they are inside.
    kernels: what each kernel of a call reads and writes (``view.kernels.table``).
    kernels_per_call: kernels that one call is planned to launch.
    build_s: seconds of the build.
    config: the options that made it.
    key: its key in the compile cache.
    needs: packages that it calls where it runs, such as ``torch``.
    quantization: the options, the ranges of the calibration and the report of a quantized model.
    peak_bytes: planned peak of intermediates at the largest sizes; None where some size has
        no bound, or some intermediate may be larger at smaller sizes.
    training: the forward and the backward entry, in a library with gradients.
    entry: the function that a call runs.
    arena: bytes of each storage that the intermediates of a call share; None for a library without
        a host function, which only TVM's virtual machine runs.
    """

    versions: Mapping[str, str | None]
    target: Mapping[str, Any]
    signature: Signature
    coverage: tuple[Mapping[str, Any], ...] = ()
    score: Mapping[str, Any] | None = None
    verified: bool | None = None
    frozen: tuple[str, ...] = ()
    weights: Weights | None = None
    kernels: Mapping[str, Any] | None = None
    kernels_per_call: int | None = None
    build_s: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    peak_bytes: int | None = None
    needs: tuple[str, ...] = ()
    quantization: Mapping[str, Any] | None = None
    arena: tuple[Size, ...] | None = None
    training: Training | None = None
    entry: str = "main"
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` is its inverse."""
        return {**asdict(self), "signature": self.signature.to_json()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """Read what ``to_json`` wrote, unknown fields ignored; LibraryError if malformed."""
        if data.get("format") != FORMAT:
            raise IncompatibleLibraryError(
                f"expected a manifest of format {FORMAT}, got {data.get('format')!r}: the "
                "library is from another "
                "version of tvmcap; build it again with this one"
            )
        try:
            known = {f.name: data[f.name] for f in fields(Manifest) if f.name in data}
            known["signature"] = Signature.from_json(data["signature"])
            known["coverage"] = tuple(dict(task) for task in data.get("coverage", ()))
            known["frozen"] = tuple(data.get("frozen", ()))
            known["needs"] = tuple(data.get("needs", ()))
            if known.get("arena") is not None:
                known["arena"] = tuple(map(typed_size, known["arena"]))
            known["weights"] = _weights(data.get("weights"))
            if known.get("training") is not None:
                known["training"] = Training.from_json(data["training"])
            target, versions = data["target"], data["versions"]
            texts = (target["kind"], data.get("entry", "main"), *known["needs"])
            texts += tuple(target.get("features") or ())
            texts += tuple(version for version in versions.values() if version is not None)
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("target, entry, needs or versions")
            return Manifest(**known)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise LibraryError(f"the library's manifest is malformed ({e!r}); {_REMEDY}") from e


def _weights(data: Mapping[str, Any] | None) -> Weights | None:
    if data is None:
        return None
    name = data["file"]
    if Path(name).name != name:
        raise ValueError(f"weights file {name!r} is not a plain file name")
    return Weights(name, data["sha256"], tuple(data["names"]))


def read_manifest(path: str | os.PathLike[str], *, check: bool = True) -> Manifest:
    """Read the manifest of a library, once not one byte of the file is found changed.

    ``check=False`` leaves the sha256 out (lengths are still compared): microseconds instead of a
    pass over the file. Raises DamagedLibraryError for a file that is truncated, altered, extended,
    unreadable or not a library, IncompatibleLibraryError for a manifest of another format,
    LibraryError where there is no file.
    """
    path = Path(path)
    with _opened(path) as file:
        json_size, elf_size, digest = _footer(path, file)
        if check and _digest(file, elf_size + json_size).digest() != digest:
            raise DamagedLibraryError(
                f"{path}: its bytes changed since it was written (sha256 differs); {_REMEDY}"
            )
        file.seek(elf_size)
        text = file.read(json_size)
    try:
        return Manifest.from_json(json.loads(text))
    except IncompatibleLibraryError as e:
        raise IncompatibleLibraryError(f"{path}: {e}") from e
    except (LibraryError, ValueError, AttributeError) as e:
        raise DamagedLibraryError(f"{path}: its manifest cannot be read ({e}); {_REMEDY}") from e


def stored_digest(path: str | os.PathLike[str]) -> bytes:
    """Return the sha256 that a library says it has; raises what ``read_manifest`` does."""
    path = Path(path)
    with _opened(path) as file:
        return _footer(path, file)[2]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path.is_dir():
        raise DamagedLibraryError(
            f"{path}: expected a library file, got a folder; name the .so inside it"
        )
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError as e:
        raise LibraryError(f"{path}: no such file; lib.export(path) writes a library") from e
    except OSError as e:
        raise DamagedLibraryError(
            f"{path}: cannot be read ({e.strerror or e}); check its permissions"
        ) from e


def _footer(path: Path, file: BinaryIO) -> tuple[int, int, bytes]:
    """Lengths of JSON and ELF, and the digest, once magic and lengths fit the file."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise DamagedLibraryError(f"{path}: the file is empty; {_REMEDY}")
    file.seek(0)
    if file.read(4) != ELF_MAGIC:
        raise DamagedLibraryError(
            f"{path}: not a tvmcap library (no ELF header); name a file that lib.export wrote"
        )
    file.seek(max(0, size - _FOOTER.size))
    footer = file.read(_FOOTER.size)
    if len(footer) != _FOOTER.size or not footer.startswith(MAGIC):
        raise DamagedLibraryError(
            f"{path}: no tvmcap manifest at the end of the file: it was truncated or extended, "
            "or another tool made "
            f"it; {_REMEDY}"
        )
    _, json_size, elf_size, digest = _FOOTER.unpack(footer)
    if elf_size + json_size + _FOOTER.size != size:
        expected = elf_size + json_size + _FOOTER.size
        raise DamagedLibraryError(f"{path}: expected {expected} bytes, got {size}; {_REMEDY}")
    return json_size, elf_size, digest


def _digest(file: BinaryIO, size: int) -> hashlib._Hash:
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
    return digest


def append_manifest(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Append the trailer to a fresh ELF file, in place, and flush it to the disk."""
    text = json.dumps(manifest.to_json()).encode()
    with open(path, "r+b") as file:
        elf_size = file.seek(0, os.SEEK_END)
        digest = _digest(file, elf_size)
        digest.update(text)
        file.seek(elf_size)
        file.write(text + _FOOTER.pack(MAGIC, len(text), elf_size, digest.digest()))
        file.flush()
        os.fsync(file.fileno())


def rewrite_manifest(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Give a library another manifest; readers see the old file or the new one, whole."""
    copy_with_manifest(Path(path), Path(path), manifest)


def copy_with_manifest(source: Path, target: Path, manifest: Manifest) -> None:
    """Write ``source``'s ELF with ``manifest`` to ``target``, atomically; they may be one file."""
    with _opened(source) as file:
        _, elf_size, _ = _footer(source, file)

    def write(temporary: Path) -> None:
        shutil.copyfile(source, temporary)
        os.truncate(temporary, elf_size)
        append_manifest(temporary, manifest)

    write_atomically(target, write)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file in the folder of ``path``, then rename it into place.

    Raises LibraryError where the folder is missing or not writable; an error leaves no file behind.
    """
    if path.is_dir():
        raise LibraryError(
            f"cannot write {path}: it is a folder; give a file name such as {path / 'block.so'}"
        )
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.so"
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileNotFoundError as e:
        raise LibraryError(
            f"cannot write {path}: the folder {path.parent} does not exist; make it first"
        ) from e
    except OSError as e:
        raise LibraryError(
            f"cannot write {path}: {e.strerror or e}; choose a folder that you may write to"
        ) from e
    try:
        write(temporary)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as e:
        raise LibraryError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

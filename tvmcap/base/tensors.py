"""Weights in a safetensors file, written and read as bytes: every dtype works without torch."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmcap.base.errors import DamagedLibraryError

#: safetensors' name of each dtype (github.com/huggingface/safetensors, "Format").
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
ALIGNMENT = 64


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> str:
    """Write DLPack tensors in the CPU's memory to a safetensors file; returns its sha256.

    Data starts at a multiple of 64 bytes, and tensors whose sizes are multiples of 64 come first,
    so that most can be used where they are mapped.
    """
    import tvm_ffi

    views = {name: tvm_ffi.from_dlpack(tensor) for name, tensor in tensors.items()}
    sizes = {name: view.numel() * view.dtype.itemsize for name, view in views.items()}
    order = sorted(views, key=lambda name: sizes[name] % ALIGNMENT != 0)
    header, offset = {}, 0
    for name in order:
        view, end = views[name], offset + sizes[name]
        header[name] = {
            "dtype": _NAMES[str(view.dtype)],
            "shape": list(view.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        parts: list[bytes | memoryview] = [struct.pack("<Q", len(text)), text]
        parts += [_bytes_of(views[name], sizes[name]) for name in order]
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes_of(view: Any, size: int) -> memoryview:
    if not view.is_contiguous() or view.device.type != "cpu":
        raise ValueError("weights must be contiguous and in the CPU's memory")
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(view.data_ptr()))


def read_tensors(path: Path, sha256: str) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
    """Map a safetensors file: name to (dtype, shape, bytes), the bytes not copied.

    Raises DamagedLibraryError where the file is missing, unreadable, malformed or another than the
    sha256 says.
    """
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as e:
        raise DamagedLibraryError(
            f"{path}: the weights of this library cannot be read ({e}); copy both files"
        ) from e
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedLibraryError(
            f"{path}: these are not the weights of this library (sha256 differs); copy both files"
        )
    try:
        start = 8 + struct.unpack_from("<Q", data)[0]
        if start > len(data):
            raise ValueError(f"a header of {start} bytes")
        return {
            name: _entry(entry, data[start:])
            for name, entry in json.loads(bytes(data[8:start])).items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedLibraryError(
            f"{path}: not a safetensors file ({e!r}); build and export the library again"
        ) from e


def _entry(entry: Mapping[str, Any], data: memoryview) -> tuple[str, tuple[int, ...], memoryview]:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
    first, last = entry["data_offsets"]
    part = data[first:last]
    if len(part) != math.prod(shape) * _itemsize(dtype):
        raise ValueError(f"{dtype}{shape} does not fit {len(part)} bytes")
    return dtype, shape, part


def _itemsize(dtype: str) -> int:
    if dtype == "bool":
        return 1
    return int("".join(c for c in dtype.split("_")[0] if c.isdigit())) // 8

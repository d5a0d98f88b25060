"""Torch's kernels as global functions that a library calls by name."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.runtime.loader import ffi

NEEDS_TORCH = "torch"
"""What the manifest of a library lists under ``needs`` that leaves work to torch."""


def provide(needs: tuple[str, ...], path: Any) -> None:
    """Register what a library needs of other packages; raises LibraryError where one is missing."""
    if NEEDS_TORCH not in needs:
        return
    if importlib.util.find_spec("torch") is None:
        raise LibraryError(
            f"{path}: this library leaves its matmuls to torch, which is not installed here: "
            "pip install torch, or build the library without vendor_matmul"
        )
    _register()


@functools.cache
def _register() -> None:
    """Register once: the code of a library keeps the function that it found first."""
    ffi().register_global_func("tvmcap.torch.matmul", _matmul)


def _matmul(a: Any, b: Any, out: Any, dtype: str, trans_a: bool, trans_b: bool) -> None:
    """Write ``a @ b`` to ``out``; operands are transposed before where that is said."""
    import torch

    left, right, result = (_view(torch, x, dtype) for x in (a, b, out))
    torch.matmul(left.mT if trans_a else left, right.mT if trans_b else right, out=result)


@dataclass(frozen=True)
class _DeviceBytes:
    """Bytes on a GPU as torch reads them (numba's CUDA Array Interface)."""

    __cuda_array_interface__: dict[str, Any]


def _view(torch: Any, tensor: Any, name: str) -> Any:
    """Return a compact tensor of a kernel's argument; it belongs to nobody, so DLPack cannot."""
    dtype, shape, device = getattr(torch, name), tuple(tensor.shape), tensor.device
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=f"{device.type}:{device.index}")
    if device.type == "cpu":
        memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False)}
    memory = _DeviceBytes({**interface, "version": 2})
    found = torch.as_tensor(memory, device=f"cuda:{device.index}")
    return found.view(dtype).view(shape)

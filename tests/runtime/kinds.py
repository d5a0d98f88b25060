"""Tensors of every kind that a library takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tvm_ffi


def from_tvm(tensor: tvm_ffi.Tensor) -> torch.Tensor:
    """Return a tvm_ffi tensor as a torch one."""
    return torch.from_dlpack(tensor)


class Wrapped:
    """Only DLPack, of no framework."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], type, Callable[[Any], torch.Tensor]]] = {
    "torch": (lambda t: t, torch.Tensor, lambda t: t),
    "parameter": (torch.nn.Parameter, torch.Tensor, lambda t: t),
    "numpy": (lambda t: t.numpy(), np.ndarray, torch.from_numpy),
    "tvm_ffi": (tvm_ffi.from_dlpack, tvm_ffi.Tensor, from_tvm),
    "dlpack": (Wrapped, tvm_ffi.Tensor, from_tvm),
}

"""The CUDA runtime that TVM's side library, and torch where it is of the same CUDA, share."""

from __future__ import annotations

import ctypes
import os

NAME = "libcudart.so.13"
"""What TVM's side library links (its DT_NEEDED)."""


def loaded() -> ctypes.CDLL | None:
    """Return the CUDA runtime of this process; None where nothing has loaded it."""
    try:
        return ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def forget_error() -> None:
    """Clear the error that a failed call left in the CUDA runtime for the calling thread.

    Otherwise torch, which asks after each of its launches, takes it for a failure of its own. An
    error that breaks the device stays (CUDA Runtime API, cudaGetLastError).
    """
    runtime = loaded()
    if runtime is not None:
        runtime.cudaGetLastError()

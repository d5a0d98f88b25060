"""Host arrays as tensors of the runtime, on the CPU or a GPU, and back."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tvmcap.runtime.loader import empty, ffi


def numpy_dtype(name: str) -> Any:
    """Return NumPy's dtype of TVM's name; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def tensor_on(array: Any, dtype: str, device: Any) -> Any:
    """Copy an array to a new ``tvm_ffi.Tensor``; ``dtype`` is TVM's name of the array's."""
    array = np.asarray(array, order="C")
    tensor = empty(array.shape, dtype, device)
    if array.nbytes:
        copy = ffi().get_global_func("runtime.TVMTensorCopyFromBytes")
        copy(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    return tensor


def array_of(tensor: Any, dtype: Any) -> Any:
    """Copy a tensor to a new array, once what computes it is done; ``dtype`` is NumPy's."""
    array = np.empty(tuple(tensor.shape), dtype)
    if array.nbytes:
        copy = ffi().get_global_func("runtime.TVMTensorCopyToBytes")
        copy(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    return array

"""Torch's kernels as global functions that a library calls by name."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import math
from dataclasses import dataclass
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.runtime.loader import ffi

NEEDS_TORCH = "torch"
"""What the manifest of a library lists under ``needs`` that leaves work to torch."""
OPERATOR = "operator:"
"""What goes there before the name of a custom operator that the library calls."""


def provide(needs: tuple[str, ...], path: Any) -> None:
    """Register what a library needs of other packages; raises LibraryError where one is missing."""
    operators = [name.removeprefix(OPERATOR) for name in needs if name.startswith(OPERATOR)]
    if NEEDS_TORCH not in needs:
        return
    if importlib.util.find_spec("torch") is None:
        what, otherwise = "its matmuls", "without vendor_matmul"
        if operators:
            what, otherwise = ", ".join(operators), "with a lowering of theirs (register_op)"
        raise LibraryError(
            f"{path}: this library leaves {what} to torch, which is not installed here: "
            f"pip install torch, or build the library {otherwise}"
        )
    for name in operators:
        if _find(name) is None:
            raise LibraryError(
                f"{path}: this library calls the custom operator {name}, which is not there: "
                "import the package that defines it before loading"
            )
    _register()


@functools.cache
def _register() -> None:
    """Register once: the code of a library keeps the function that it found first."""
    ffi().register_global_func("tvmcap.torch.matmul", _matmul)
    ffi().register_global_func("tvmcap.torch.call", _call)


def _find(name: str) -> Any:
    """Return an operator of torch by name with namespace and overload; None where there is none."""
    import torch

    space, _, rest = name.partition("::")
    bare, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), bare), overload or "default")
    except AttributeError:
        return None


def _call(call: str, dtypes: str, *tensors: Any) -> None:
    """Run an operator of torch on the first tensors, and write its results to the others.

    ``call`` is ``{"op": name, "args": [...]}`` as JSON, where ``{"tensor": i}`` stands for input i.
    """
    import torch

    spec = json.loads(call)
    views = [_view(torch, x, name) for x, name in zip(tensors, dtypes.split(","), strict=True)]

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(v) for v in value]
        return views[value["tensor"]] if isinstance(value, dict) else value

    with torch.no_grad():
        results = _find(spec["op"])(*map(argument, spec["args"]))
        found = [results] if isinstance(results, torch.Tensor) else list(results)
        for target, result in zip(views[-len(found) :], found, strict=True):
            if target.shape != result.shape or target.dtype != result.dtype:
                raise ValueError(
                    f"{spec['op']} gave {result.dtype}{list(result.shape)}, where its meta "
                    f"function says {target.dtype}{list(target.shape)}"
                )
            target.copy_(result)


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

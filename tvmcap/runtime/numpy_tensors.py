"""numpy.ndarray in, numpy.ndarray out."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from tvmcap.base.errors import InputError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.binding import Plan, Shape
from tvmcap.runtime.frameworks import (
    ALIGNMENT,
    MISALIGNED,
    Copies,
    adopt_dlpack,
    check_out,
    uncopied,
    wrong,
)
from tvmcap.runtime.loader import empty, ffi

_CACHE_LINE = 64


class NumpyTensors:
    """numpy.ndarray in, numpy.ndarray out; 16-bit and 8-bit floats as ml_dtypes has them."""

    def __init__(self, signature: Signature, device: Any, copies: Copies) -> None:
        import numpy as np

        if device.type != "cpu":
            raise InputError(
                f"expected tensors on {device}, got NumPy arrays: pass torch tensors on the GPU"
            )
        self._types = frozenset((np.ndarray,))
        self._np = np
        self._copies = copies
        self._device = device
        self._view = ffi().get_global_func("runtime.TVMTensorCreateView")
        self._import = ffi().from_dlpack
        self._specs = signature.inputs
        self._dtypes = [self._dtype(spec) for spec in signature.inputs]
        self._outputs = [(spec, self._dtype(spec)) for spec in signature.outputs]

    def _dtype(self, spec: TensorSpec) -> Any:
        try:
            return self._np.dtype(spec.dtype)
        except TypeError:
            try:
                import ml_dtypes
            except ImportError as e:
                raise wrong(
                    spec.name, spec.dtype, "a NumPy without it", "pip install ml_dtypes"
                ) from e
            return self._np.dtype(getattr(ml_dtypes, spec.dtype))

    def recall(self, leaves: Sequence[Any]) -> None:
        """Recognize no inputs."""

    def remember(self, leaves: Sequence[Any], values: Sequence[Any], plan: Plan) -> None:
        """Remember no inputs."""

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...], list[int]]:
        """Return the arrays as tensors to pass, their shapes and their addresses."""
        types, import_tensor = self._types, self._import
        values, shapes, addresses = [], [], []
        for position, dtype in enumerate(self._dtypes):
            x, tensor = leaves[position], None
            if type(x) in types and x.dtype is dtype and x.flags.c_contiguous:
                try:
                    tensor = import_tensor(x)
                except BufferError:  # read-only, or a dtype that NumPy does not export
                    tensor = None
            address = MISALIGNED if tensor is None else tensor.data_ptr()
            if address & MISALIGNED:
                tensor = x = self._adopt(x, self._specs[position], dtype)
                address = tensor.data_ptr()
            values.append(tensor)
            shapes.append(x.shape)
            addresses.append(address)
        return values, tuple(shapes), addresses

    def _adopt(self, x: Any, spec: TensorSpec, dtype: Any) -> Any:
        np = self._np
        if not isinstance(x, np.ndarray | np.generic):
            return adopt_dlpack(x, spec, self._device, self._copies)
        if isinstance(x, np.ma.MaskedArray):
            raise wrong(spec.name, "a plain array", "a masked one", "fill it first")
        x = np.asarray(x)
        if x.dtype != dtype:
            raise wrong(spec.name, dtype, x.dtype, f"convert it with .astype('{dtype}')")
        if not x.flags.c_contiguous:
            self._copies.note(spec.name, "not contiguous")
            x = self._copy(x, spec)
        elif x.ctypes.data & MISALIGNED:
            self._copies.note(spec.name, f"not aligned to {ALIGNMENT} bytes")
            x = self._copy(x, spec)
        return self._wrap(x, spec.dtype)

    def _copy(self, x: Any, spec: TensorSpec) -> Any:
        try:
            copy = self._empty(x.shape, x.dtype, x.nbytes)
        except MemoryError as e:
            raise uncopied(spec.name, e) from e
        copy[...] = x
        return copy

    def _wrap(self, x: Any, dtype: str) -> Any:
        """Return the array as a tensor by its address; the tensor keeps the array alive."""
        if x.nbytes:
            data = (ctypes.c_uint8 * x.nbytes).from_address(x.ctypes.data)
            data.owner = x
            source = ffi().from_dlpack(self._np.frombuffer(data, self._np.uint8))
        else:
            source = empty((0,), "uint8", self._device)
        return self._view(source, x.shape, ffi().dtype(dtype), 0)

    def _empty(self, shape: Shape, dtype: Any, size: int) -> Any:
        """Return a new array of ``size`` bytes, from a cache line's start where it is long."""
        np = self._np
        if size < 16 * _CACHE_LINE:
            return np.empty(shape, dtype)
        memory = np.empty(size + _CACHE_LINE, np.uint8)
        start = -self._import(memory).data_ptr() % _CACHE_LINE
        return memory[start : start + size].view(dtype).reshape(shape)

    def outputs(self, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return new results, and tensors on their memory for the kernels to write to."""
        results = [self._empty(shape, dtype, size) for shape, dtype, size, _ in plan.recipe]
        targets = [
            self._import(result) if foreign is None else self._wrap(result, foreign)
            for result, (_, _, _, foreign) in zip(results, plan.recipe, strict=True)
        ]
        return results, targets

    def recipe(self, plan: Plan) -> tuple[Any, ...]:
        """Return what ``outputs`` needs: shape, dtype, bytes, and the name of a foreign dtype."""
        foreign = [None if dtype.isbuiltin == 1 else spec.dtype for spec, dtype in self._outputs]
        dtypes = [dtype for _, dtype in self._outputs]
        return tuple(zip(plan.shapes, dtypes, plan.output_bytes, foreign, strict=True))

    def flat(self, position: int, count: int) -> Any:
        """Return memory for ``count`` elements of an output."""
        dtype = self._outputs[position][1]
        return self._empty((count,), dtype, count * dtype.itemsize)

    def carve(self, memory: Any, plan: Plan, position: int) -> Any:
        """Return an output of ``plan`` at the start of what ``flat`` made."""
        shape = plan.shapes[position]
        return memory[: math.prod(shape)].reshape(shape)

    def check_out(self, out: Sequence[Any], plan: Plan) -> tuple[list[Any], list[int]]:
        """Check the caller's results; return tensors on their memory, and their addresses."""
        targets = []
        for x, (spec, dtype), shape in zip(out, self._outputs, plan.shapes, strict=True):
            name = f"out ({spec.name})"
            if not isinstance(x, self._np.ndarray):
                raise wrong(name, "a numpy.ndarray, as the inputs are", type(x).__name__)
            if x.dtype != dtype:
                raise wrong(name, dtype, x.dtype)
            if not x.flags.writeable:
                raise wrong(name, "a writable array", "a read-only one")
            check_out(spec, shape, x.shape, x.flags.c_contiguous, x.ctypes.data)
            targets.append(self._wrap(x, spec.dtype))
        return targets, [target.data_ptr() for target in targets]

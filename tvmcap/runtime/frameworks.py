"""Tensors of PyTorch, NumPy and of anything that speaks DLPack: checked, passed without a copy, and allocated.

Each class takes the tensors of a call (``inputs``), makes its results (``outputs``), and checks those that the caller
made (``check_out``). The usual case is one pass over the arguments; whatever it does not let through goes to
``_adopt``, which says what is wrong or mends it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

from tvmcap.base.errors import InputError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.binding import Plan, Shape
from tvmcap.runtime.loader import empty, ffi

_log = logging.getLogger("tvmcap")
#: What a kernel may assume of every pointer, in bytes.
ALIGNMENT = 16
_MISALIGNED = ALIGNMENT - 1
_CACHE_LINE = 64


class Copies:
    """Counts the inputs that had to be copied, and logs the first."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, name: str, why: str) -> None:
        """Count one copy of the argument ``name``."""
        if not self.count:
            _log.info("argument %r is %s and was copied; pass a compact tensor to save that (logged once)", name, why)
        self.count += 1


def wrong(name: str, expected: object, got: object, advice: str = "") -> InputError:
    """Return the error for an argument that does not fit."""
    return InputError(f"argument {name!r}: expected {expected}, got {got}" + (f"; {advice}" if advice else ""))


class TorchTensors:
    """torch.Tensor in, torch.Tensor out."""

    def __init__(self, signature: Signature, device: Any, copies: Copies) -> None:
        import torch

        self._types = frozenset((torch.Tensor, torch.nn.Parameter))
        self._torch = torch
        self._copies = copies
        self._device = torch.device(device.type, device.index) if device.type != "cpu" else torch.device("cpu")
        self._specs = signature.inputs
        self._dtypes = [getattr(torch, spec.dtype) for spec in signature.inputs]
        self._outputs = [(spec, getattr(torch, spec.dtype)) for spec in signature.outputs]
        self._makers = [torch.empty(0, dtype=dtype, device=self._device).new_empty_strided for _, dtype in self._outputs]

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...]]:
        """Return the tensors to pass, and their shapes."""
        types, device = self._types, self._device
        values, shapes = [], []
        for position, dtype in enumerate(self._dtypes):
            x = leaves[position]
            try:
                usable = (
                    type(x) in types
                    and x.dtype is dtype
                    and x.device == device
                    and x.is_contiguous()
                    and not x.data_ptr() & _MISALIGNED
                    and not x.is_neg()
                )
            except RuntimeError:  # no storage: sparse, or inside a functorch transform
                usable = False
            if not usable:
                x = self._adopt(x, self._specs[position], dtype)
            values.append(x)
            shapes.append(x.shape)
        return values, tuple(shapes)

    def _adopt(self, x: Any, spec: TensorSpec, dtype: Any) -> Any:
        torch = self._torch
        if not isinstance(x, torch.Tensor):
            if not hasattr(x, "__dlpack__"):
                raise wrong(spec.name, "a tensor", type(x).__name__)
            x = torch.from_dlpack(x)
        self._check(x, spec, dtype)
        x = x.detach()
        try:
            if x.is_neg():
                x = x.resolve_neg()
            if not x.is_contiguous():
                self._copies.note(spec.name, "not contiguous")
                x = x.contiguous()
            if x.data_ptr() & _MISALIGNED:
                self._copies.note(spec.name, f"not aligned to {ALIGNMENT} bytes")
                x = x.clone()
        except RuntimeError as e:
            raise wrong(spec.name, "a tensor with memory of its own", f"one without ({e})") from e
        return x

    def _check(self, x: Any, spec: TensorSpec, dtype: Any) -> None:
        if type(x) not in self._types:
            raise wrong(spec.name, "a plain torch.Tensor", type(x).__name__, "convert it first")
        if x.layout is not self._torch.strided:
            raise wrong(spec.name, "a dense tensor", str(x.layout), "call .to_dense()")
        if x.device != self._device:
            raise wrong(spec.name, f"a tensor on {self._device}", f"one on {x.device}", f"move it with .to('{self._device}')")
        if x.dtype is not dtype:
            raise wrong(spec.name, dtype, x.dtype, f"convert it with .to({dtype})")

    def outputs(self, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return new results, and the same as what the kernels write to."""
        results = [make(shape, strides) for make, shape, strides in plan.recipe]
        return results, results

    def recipe(self, plan: Plan) -> tuple[Any, ...]:
        """Return what ``outputs`` needs: a function, shape and strides an output."""
        return tuple(zip(self._makers, plan.shapes, plan.strides, strict=True))

    def check_out(self, out: Sequence[Any], plan: Plan) -> list[Any]:
        """Check the caller's results, and return them as what the kernels write to."""
        for x, (spec, dtype), shape in zip(out, self._outputs, plan.shapes, strict=True):
            if not isinstance(x, self._torch.Tensor):
                raise wrong(f"out ({spec.name})", "a torch.Tensor, as the inputs are", type(x).__name__)
            self._check(x, TensorSpec(f"out ({spec.name})", spec.dtype, spec.shape), dtype)
            if x.requires_grad:
                raise wrong(f"out ({spec.name})", "a tensor that does not require grad", "one that does")
            _check_out(spec, shape, tuple(x.shape), x.is_contiguous(), x.data_ptr())
        return list(out)


def _check_out(spec: TensorSpec, shape: Shape, got: Shape, contiguous: bool, address: int) -> None:
    name = f"out ({spec.name})"
    if got != shape:
        raise wrong(name, f"shape {list(shape)}", list(got))
    if not contiguous:
        raise wrong(name, "a contiguous tensor", "a strided one")
    if address & _MISALIGNED:
        raise wrong(name, f"memory aligned to {ALIGNMENT} bytes", f"address {address:#x}", "pass a tensor, not a slice")


class NumpyTensors:
    """numpy.ndarray in, numpy.ndarray out; 16-bit and 8-bit floats as ml_dtypes has them."""

    def __init__(self, signature: Signature, device: Any, copies: Copies) -> None:
        import numpy as np

        if device.type != "cpu":
            raise InputError(f"expected tensors on {device}, got NumPy arrays: pass torch tensors on the GPU")
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
                raise wrong(spec.name, spec.dtype, "a NumPy without it", "pip install ml_dtypes") from e
            return self._np.dtype(getattr(ml_dtypes, spec.dtype))

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...]]:
        """Return the arrays as tensors to pass, and their shapes."""
        types, import_tensor = self._types, self._import
        values, shapes = [], []
        for position, dtype in enumerate(self._dtypes):
            x, tensor = leaves[position], None
            if type(x) in types and x.dtype is dtype and x.flags.c_contiguous:
                try:
                    tensor = import_tensor(x)
                except BufferError:  # read-only, or a dtype that NumPy does not export
                    tensor = None
            if tensor is None or tensor.data_ptr() & _MISALIGNED:
                tensor = x = self._adopt(x, self._specs[position], dtype)
            values.append(tensor)
            shapes.append(x.shape)
        return values, tuple(shapes)

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
            x = self._copy(x)
        elif x.ctypes.data & _MISALIGNED:
            self._copies.note(spec.name, f"not aligned to {ALIGNMENT} bytes")
            x = self._copy(x)
        return self._wrap(x, spec.dtype)

    def _copy(self, x: Any) -> Any:
        copy = self._empty(x.shape, x.dtype, x.nbytes)
        copy[...] = x
        return copy

    def _wrap(self, x: Any, dtype: str) -> Any:
        """Return the array as a tensor by its address, whatever its dtype and flags; the caller keeps it alive."""
        data = (ctypes.c_uint8 * x.nbytes).from_address(x.ctypes.data) if x.nbytes else b""
        source = self._np.frombuffer(data, self._np.uint8)
        source = ffi().from_dlpack(source) if x.nbytes else empty((0,), "uint8", self._device)
        return self._view(source, x.shape, ffi().dtype(dtype), 0)

    def _empty(self, shape: Shape, dtype: Any, size: int) -> Any:
        """Return a new array of ``size`` bytes, on a cache line's boundary where it is longer than a few."""
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
        """Return what ``outputs`` needs: shape, dtype, bytes, and the name of a dtype that is not NumPy's own."""
        foreign = [None if dtype.isbuiltin == 1 else spec.dtype for spec, dtype in self._outputs]
        dtypes = [dtype for _, dtype in self._outputs]
        return tuple(zip(plan.shapes, dtypes, plan.output_bytes, foreign, strict=True))

    def check_out(self, out: Sequence[Any], plan: Plan) -> list[Any]:
        """Check the caller's results, and return tensors on their memory."""
        targets = []
        for x, (spec, dtype), shape in zip(out, self._outputs, plan.shapes, strict=True):
            name = f"out ({spec.name})"
            if not isinstance(x, self._np.ndarray):
                raise wrong(name, "a numpy.ndarray, as the inputs are", type(x).__name__)
            if x.dtype != dtype:
                raise wrong(name, dtype, x.dtype)
            if not x.flags.writeable:
                raise wrong(name, "a writable array", "a read-only one")
            _check_out(spec, shape, x.shape, x.flags.c_contiguous, x.ctypes.data)
            targets.append(self._wrap(x, spec.dtype))
        return targets


class DLPackTensors:
    """Anything with ``__dlpack__`` in, tvm_ffi.Tensor out."""

    def __init__(self, signature: Signature, device: Any, copies: Copies) -> None:
        self._signature = signature
        self._device = device
        self._copies = copies

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...]]:
        """Return tvm_ffi tensors on the arguments' memory, and their shapes."""
        values = [
            adopt_dlpack(x, spec, self._device, self._copies)
            for x, spec in zip(leaves, self._signature.inputs, strict=True)
        ]
        return values, tuple(tuple(value.shape) for value in values)

    def outputs(self, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return new tensors, twice."""
        results = [empty(shape, dtype, self._device) for shape, dtype in plan.recipe]
        return results, results

    def recipe(self, plan: Plan) -> tuple[Any, ...]:
        """Return what ``outputs`` needs: shape and dtype an output."""
        return tuple(zip(plan.shapes, [spec.dtype for spec in self._signature.outputs], strict=True))

    def check_out(self, out: Sequence[Any], plan: Plan) -> list[Any]:
        """Check the caller's results, and return them as tvm_ffi tensors."""
        targets = []
        for x, spec, shape in zip(out, self._signature.outputs, plan.shapes, strict=True):
            tensor = _import(x, TensorSpec(f"out ({spec.name})", spec.dtype, spec.shape), self._device)
            _check_out(spec, shape, tuple(tensor.shape), tensor.is_contiguous(), tensor.data_ptr())
            targets.append(tensor)
        return targets


def adopt_dlpack(x: Any, spec: TensorSpec, device: Any, copies: Copies) -> Any:
    """Return a DLPack object as an aligned tvm_ffi tensor."""
    tensor = _import(x, spec, device)
    if not tensor.is_contiguous():
        raise wrong(spec.name, "a contiguous tensor", f"strides {list(tensor.strides)}", "make a contiguous copy")
    if tensor.data_ptr() & _MISALIGNED:
        copies.note(spec.name, f"not aligned to {ALIGNMENT} bytes")
        copy = empty(tuple(tensor.shape), spec.dtype, device)
        ffi().get_global_func("runtime.TVMTensorCopyFromTo")(tensor, copy)
        return copy
    return tensor


def _import(x: Any, spec: TensorSpec, device: Any) -> Any:
    try:
        tensor = x if isinstance(x, ffi().Tensor) else ffi().from_dlpack(x)
    except Exception as e:
        raise wrong(spec.name, "a tensor (torch, NumPy or DLPack)", type(x).__name__, f"DLPack says: {e}") from e
    if tensor.dtype != spec.dtype:
        raise wrong(spec.name, spec.dtype, tensor.dtype)
    if tensor.device != device:
        raise wrong(spec.name, f"a tensor on {device}", f"one on {tensor.device}")
    return tensor

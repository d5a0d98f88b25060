"""What the classes for each kind of tensor share, and the class for anything that speaks DLPack.

``TorchTensors``, ``NumpyTensors`` and ``DLPackTensors`` take the tensors of a call (``inputs``),
make its results (``outputs``), and check those that the caller made (``check_out``). The usual case
is one pass over the arguments; whatever it does not let through goes to ``_adopt``, which says what
is wrong or mends it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from tvmcap.base.errors import InputError, LibraryError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.binding import Plan, Shape
from tvmcap.runtime.loader import empty, ffi

_log = logging.getLogger("tvmcap")
#: What a kernel may assume of every pointer, in bytes.
ALIGNMENT = 16
MISALIGNED = ALIGNMENT - 1


class Copies:
    """Counts the inputs that had to be copied, and logs the first.

    Attributes
    ----------
    count: in all threads; ``here`` in the calling one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._thread = threading.local()

    @property
    def here(self) -> int:
        """Copies in the calling thread."""
        return getattr(self._thread, "count", 0)

    def note(self, name: str, why: str) -> None:
        """Count one copy of the argument ``name``."""
        if not self.count:
            _log.info(
                "argument %r is %s and was copied; pass a compact tensor to save that (logged "
                "once)",
                name,
                why,
            )
        self.count += 1
        self._thread.count = self.here + 1


def wrong(name: str, expected: object, got: object, advice: str = "") -> InputError:
    """Return the error for an argument that does not fit."""
    return InputError(
        f"argument {name!r}: expected {expected}, got {got}" + (f"; {advice}" if advice else "")
    )


def is_of_memory(error: Exception) -> bool:
    """Whether an error of NumPy, torch or TVM says that memory cannot be had."""
    told = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in told for words in ("out of memory", "allocate memory")
    )


def uncopied(name: str, error: Exception) -> LibraryError:
    """Return the error for an argument that there is no memory to copy."""
    return LibraryError(
        f"argument {name!r}: no memory for a copy of it; pass a tensor that is contiguous and "
        f"aligned to {ALIGNMENT} bytes, which needs none; original: {error}"
    )


def check_out(spec: TensorSpec, shape: Shape, got: Shape, contiguous: bool, address: int) -> None:
    """Raise InputError for a result tensor that kernels cannot write to."""
    name = f"out ({spec.name})"
    if got != shape:
        raise wrong(name, f"shape {list(shape)}", list(got))
    if not contiguous:
        raise wrong(name, "a contiguous tensor", "a strided one")
    if address & MISALIGNED:
        raise wrong(
            name,
            f"memory aligned to {ALIGNMENT} bytes",
            f"address {address:#x}",
            "pass a tensor, not a slice",
        )


class DLPackTensors:
    """Anything with ``__dlpack__`` in, tvm_ffi.Tensor out."""

    def __init__(self, signature: Signature, device: Any, copies: Copies) -> None:
        self._signature = signature
        self._device = device
        self._copies = copies

    def recall(self, leaves: Sequence[Any]) -> None:
        """Recognize no inputs."""

    def remember(self, leaves: Sequence[Any], values: Sequence[Any], plan: Plan) -> None:
        """Remember no inputs."""

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...], list[int]]:
        """Return tvm_ffi tensors on the arguments' memory, their shapes and their addresses."""
        values = [
            adopt_dlpack(x, spec, self._device, self._copies)
            for x, spec in zip(leaves, self._signature.inputs, strict=True)
        ]
        shapes = tuple(tuple(value.shape) for value in values)
        return values, shapes, [value.data_ptr() for value in values]

    def outputs(self, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return new tensors, twice."""
        results = [empty(shape, dtype, self._device) for shape, dtype in plan.recipe]
        return results, results

    def recipe(self, plan: Plan) -> tuple[Any, ...]:
        """Return what ``outputs`` needs: shape and dtype an output."""
        return tuple(
            zip(plan.shapes, [spec.dtype for spec in self._signature.outputs], strict=True)
        )

    def flat(self, position: int, count: int) -> Any:
        """Return memory for ``count`` elements of an output."""
        return empty((count,), self._signature.outputs[position].dtype, self._device)

    def carve(self, memory: Any, plan: Plan, position: int) -> Any:
        """Return an output of ``plan`` at the start of what ``flat`` made."""
        dtype = ffi().dtype(self._signature.outputs[position].dtype)
        view = ffi().get_global_func("runtime.TVMTensorCreateView")
        return view(memory, plan.shapes[position], dtype, 0)

    def check_out(self, out: Sequence[Any], plan: Plan) -> tuple[list[Any], list[int]]:
        """Check the caller's results; return them as tvm_ffi tensors, and their addresses."""
        targets = []
        for x, spec, shape in zip(out, self._signature.outputs, plan.shapes, strict=True):
            tensor = _import(
                x, TensorSpec(f"out ({spec.name})", spec.dtype, spec.shape), self._device
            )
            check_out(spec, shape, tuple(tensor.shape), tensor.is_contiguous(), tensor.data_ptr())
            targets.append(tensor)
        return targets, [target.data_ptr() for target in targets]


def adopt_dlpack(x: Any, spec: TensorSpec, device: Any, copies: Copies) -> Any:
    """Return a DLPack object as an aligned tvm_ffi tensor."""
    tensor = _import(x, spec, device)
    if not tensor.is_contiguous():
        raise wrong(
            spec.name,
            "a contiguous tensor",
            f"strides {list(tensor.strides)}",
            "make a contiguous copy",
        )
    if tensor.data_ptr() & MISALIGNED:
        copies.note(spec.name, f"not aligned to {ALIGNMENT} bytes")
        copy = empty(tuple(tensor.shape), spec.dtype, device)
        ffi().get_global_func("runtime.TVMTensorCopyFromTo")(tensor, copy)
        return copy
    return tensor


def _import(x: Any, spec: TensorSpec, device: Any) -> Any:
    try:
        tensor = x if isinstance(x, ffi().Tensor) else ffi().from_dlpack(x)
    except Exception as e:
        raise wrong(
            spec.name, "a tensor (torch, NumPy or DLPack)", type(x).__name__, f"DLPack says: {e}"
        ) from e
    if tensor.dtype != spec.dtype:
        raise wrong(spec.name, spec.dtype, tensor.dtype)
    if tensor.device != device:
        raise wrong(spec.name, f"a tensor on {device}", f"one on {tensor.device}")
    return tensor

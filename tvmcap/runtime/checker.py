"""Checker: the tensors of a call, checked against the signature, and what follows from them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmcap.base import cudart
from tvmcap.base.errors import InputError, LibraryError
from tvmcap.base.signature import Signature
from tvmcap.runtime.binding import Plan, Shape, make_plan
from tvmcap.runtime.bound import Bound
from tvmcap.runtime.frameworks import Copies, DLPackTensors, is_of_memory
from tvmcap.runtime.loader import empty, ffi
from tvmcap.runtime.numpy_tensors import NumpyTensors
from tvmcap.runtime.torch_tensors import TorchTensors

_PLANS_KEPT = 1024
_OVERLAP = "out: expected memory of its own, got memory shared with an argument or another output"


class Checker:
    """Checks tensors for calls on one device, and remembers the shapes that it saw.

    Attributes
    ----------
    copies: inputs copied because they were not contiguous or not aligned.
    """

    def __init__(self, signature: Signature, device: Any) -> None:
        self.signature = signature
        self.device = device
        self.copies = Copies()
        self.plans: dict[tuple[Any, tuple[Shape, ...]], Plan] = {}
        self._frameworks: dict[type, Any] = {}

    def check(self, leaves: Sequence[Any]) -> tuple[Any, Sequence[Any], list[int], Plan]:
        """Return the framework of tensors, what to pass, their addresses, what shapes imply.

        Raises InputError where one does not fit.
        """
        kind = type(leaves[0]) if leaves else type(None)
        framework = self._frameworks.get(kind) or self._framework_for(leaves)
        known = framework.recall(leaves)
        if known is not None:
            return framework, leaves, known[1], known[0]
        values, shapes, addresses = framework.inputs(leaves)
        plan = self.plan(framework, shapes)
        framework.remember(leaves, values, plan)
        return framework, values, addresses, plan

    def plan(self, framework: Any, shapes: tuple[Shape, ...]) -> Plan:
        """Return what follows from the shapes of the inputs, the same object for the same shapes.

        Raises InputError where they do not fit the signature.
        """
        plan = self.plans.get((framework, shapes))
        if plan is None:
            plan = make_plan(self.signature, shapes, lambda dtype: int(ffi().dtype(dtype).itemsize))
            plan = replace(plan, recipe=framework.recipe(plan))
            if len(self.plans) >= _PLANS_KEPT:
                self.plans.clear()
            self.plans[framework, shapes] = plan
        return plan

    def outputs(self, framework: Any, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return new results, and what kernels write to; LibraryError where there is no memory."""
        try:
            made: tuple[list[Any], list[Any]] = framework.outputs(plan)
            return made
        except (MemoryError, RuntimeError) as e:
            if not is_of_memory(e):
                raise
            raise _no_memory("", self.device, plan, e) from e

    def kept(self, bound: Bound, framework: Any, plan: Plan) -> list[Any]:
        """Return the outputs of a run; LibraryError where there is no memory for them."""
        try:
            return bound.targets(framework, plan)
        except (MemoryError, RuntimeError) as e:
            if not is_of_memory(e):
                raise
            raise _no_memory("", self.device, plan, e) from e

    def _framework_for(self, leaves: Sequence[Any]) -> Any:
        """Choose by the first tensor; without any, torch's where torch is in use, else NumPy's."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        first = leaves[0] if leaves else None
        if torch is not None and (isinstance(first, torch.Tensor) or not leaves):
            make: type = TorchTensors
        elif not leaves or (numpy is not None and isinstance(first, numpy.ndarray | numpy.generic)):
            make = NumpyTensors
        else:
            make = DLPackTensors
        framework = self._frameworks.get(make) or make(self.signature, self.device, self.copies)
        self._frameworks[make] = self._frameworks[type(first)] = framework
        return framework

    def compact(self, tensors: Sequence[Any]) -> list[Any]:
        """Replace tensors without elements, whose strides the kernels would refuse."""
        compact = []
        for tensor in tensors:
            if 0 in tensor.shape:
                dtype = str(ffi().from_dlpack(tensor).dtype)
                tensor = empty(tuple(tensor.shape), dtype, self.device)
            compact.append(tensor)
        return compact


def check_overlap(places: Sequence[int], plan: Plan) -> None:
    """Refuse results that share memory with an argument or each other."""
    at = len(plan.input_bytes)
    for size in plan.output_bytes:
        start = places[at]
        end = start + size
        for other, length in zip(places, plan.input_bytes, strict=False):
            if start < other + length and other < end:
                raise InputError(_OVERLAP)
        at += 1
    if len(plan.output_bytes) > 1:
        sized = zip(places[len(plan.input_bytes) :], plan.output_bytes, strict=True)
        outputs = sorted((start, size) for start, size in sized if size)
        for (start, size), (other, _) in itertools.pairwise(outputs):
            if start + size > other:
                raise InputError(_OVERLAP)


def failure(path: Path, device: Any, plan: Plan, error: Exception) -> Exception:
    """Return the error for a call that TVM's runtime could not run; CUDA's own is forgotten."""
    cudart.forget_error()
    if plan.zero:
        return InputError(
            f"a size of 0 cannot be run on this target (sizes {dict(plan.dims)}); original: {error}"
        )
    if is_of_memory(error):
        return _no_memory(f"{path}: ", device, plan, error)
    if "data pointer is NULL" in str(error):
        return InputError(
            "expected tensors with memory, got one without: its storage was freed or resized to "
            f"nothing, or a function transform made it (sizes {dict(plan.dims)}); original: {error}"
        )
    return LibraryError(
        f"{path}: a kernel of the library failed (sizes {dict(plan.dims)}); build it "
        "again, and report it "
        f"if it fails again; original: {error}"
    )


def _no_memory(where: str, device: Any, plan: Plan, error: Exception) -> LibraryError:
    return LibraryError(
        f"{where}no memory on {device} for a call (sizes {dict(plan.dims)}): free some, or call "
        f"with smaller sizes; original: {error}"
    )

"""torch.Tensor in, torch.Tensor out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.binding import Plan, Shape
from tvmcap.runtime.frameworks import ALIGNMENT, MISALIGNED, Copies, check_out, wrong


class TorchTensors:
    """torch.Tensor in, torch.Tensor out."""

    def __init__(self, signature: Signature, device: Any, copies: Copies) -> None:
        import torch

        self._types = frozenset((torch.Tensor, torch.nn.Parameter))
        self._torch = torch
        self._copies = copies
        self._device = (
            torch.device(device.type, device.index) if device.type != "cpu" else torch.device("cpu")
        )
        self._specs = signature.inputs
        dtypes = [getattr(torch, spec.dtype) for spec in signature.inputs]
        # lazily negated views come from complex numbers, which have no parts of other dtypes
        parts = (torch.float16, torch.float32, torch.float64)
        self._wanted = [(dtype, dtype in parts) for dtype in dtypes]
        self._outputs = [(spec, getattr(torch, spec.dtype)) for spec in signature.outputs]
        self._makers = [
            torch.empty(0, dtype=dtype, device=self._device).new_empty_strided
            for _, dtype in self._outputs
        ]

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...], list[int]]:
        """Return the tensors to pass, their shapes and their addresses."""
        types, device = self._types, self._device
        values: list[Any] = []
        shapes, addresses = [], []
        for x, (dtype, may_be_negative) in zip(leaves, self._wanted, strict=True):
            try:
                address = x.data_ptr()
                usable = (
                    type(x) in types
                    and x.dtype is dtype
                    and x.device == device
                    and x.is_contiguous()
                    and not address & MISALIGNED
                    and not (may_be_negative and x.is_neg())
                )
            # no tensor; or no storage: sparse, or inside a functorch transform
            except (AttributeError, RuntimeError):
                usable = False
            if not usable:
                x = self._adopt(x, self._specs[len(values)], dtype)
                address = x.data_ptr()
            values.append(x)
            shapes.append(x.shape)
            addresses.append(address)
        return values, tuple(shapes), addresses

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
            if x.data_ptr() & MISALIGNED:
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
            raise wrong(
                spec.name,
                f"a tensor on {self._device}",
                f"one on {x.device}",
                f"move it with .to('{self._device}')",
            )
        if x.dtype is not dtype:
            raise wrong(spec.name, dtype, x.dtype, f"convert it with .to({dtype})")

    def outputs(self, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return new results, and the same as what the kernels write to."""
        results = [make(shape, strides) for make, shape, strides in plan.recipe]
        return results, results

    def recipe(self, plan: Plan) -> tuple[Any, ...]:
        """Return what ``outputs`` needs: a function, shape and strides an output."""
        return tuple(zip(self._makers, plan.shapes, plan.strides, strict=True))

    def flat(self, position: int, count: int) -> Any:
        """Return memory for ``count`` elements of an output."""
        return self._torch.empty(count, dtype=self._outputs[position][1], device=self._device)

    def carve(self, memory: Any, plan: Plan, position: int) -> Any:
        """Return an output of ``plan`` at the start of what ``flat`` made."""
        shape = plan.shapes[position]
        return memory[: math.prod(shape)].view(shape)

    def check_out(self, out: Sequence[Any], plan: Plan) -> list[Any]:
        """Check the caller's results, and return them as what the kernels write to."""
        types, device = self._types, self._device
        for x, (spec, dtype), shape in zip(out, self._outputs, plan.shapes, strict=True):
            if not (
                type(x) in types
                and x.dtype is dtype
                and x.device == device
                and x.shape == shape
                and x.is_contiguous()
                and not x.data_ptr() & MISALIGNED
                and not x.requires_grad
                and not x.is_neg()
            ):
                self._refuse_out(x, spec, dtype, shape)
        return list(out)

    def _refuse_out(self, x: Any, spec: TensorSpec, dtype: Any, shape: Shape) -> None:
        """Raise InputError for what is wrong with a result tensor."""
        name = f"out ({spec.name})"
        if not isinstance(x, self._torch.Tensor):
            raise wrong(name, "a torch.Tensor, as the inputs are", type(x).__name__)
        self._check(x, TensorSpec(name, spec.dtype, spec.shape), dtype)
        if x.requires_grad:
            raise wrong(name, "a tensor that does not require grad", "one that does")
        if x.is_neg():
            raise wrong(name, "a tensor with memory of its own", "a negated view")
        check_out(spec, shape, tuple(x.shape), x.is_contiguous(), x.data_ptr())

"""torch.Tensor in, torch.Tensor out."""

from __future__ import annotations

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
        self._dtypes = [getattr(torch, spec.dtype) for spec in signature.inputs]
        self._outputs = [(spec, getattr(torch, spec.dtype)) for spec in signature.outputs]
        self._makers = [
            torch.empty(0, dtype=dtype, device=self._device).new_empty_strided
            for _, dtype in self._outputs
        ]

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
                    and not x.data_ptr() & MISALIGNED
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

    def check_out(self, out: Sequence[Any], plan: Plan) -> list[Any]:
        """Check the caller's results, and return them as what the kernels write to."""
        for x, (spec, dtype), shape in zip(out, self._outputs, plan.shapes, strict=True):
            if not isinstance(x, self._torch.Tensor):
                raise wrong(
                    f"out ({spec.name})", "a torch.Tensor, as the inputs are", type(x).__name__
                )
            self._check(x, TensorSpec(f"out ({spec.name})", spec.dtype, spec.shape), dtype)
            if x.requires_grad:
                raise wrong(
                    f"out ({spec.name})", "a tensor that does not require grad", "one that does"
                )
            check_out(spec, shape, tuple(x.shape), x.is_contiguous(), x.data_ptr())
        return list(out)

"""torch.Tensor in, torch.Tensor out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.binding import Plan, Shape
from tvmcap.runtime.frameworks import (
    ALIGNMENT,
    MISALIGNED,
    Copies,
    check_out,
    is_of_memory,
    uncopied,
    wrong,
)

#: Looks of inputs remembered, and of outputs.
_KNOWN = 1024


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
        self._make = self._maker()
        self._known: dict[Any, tuple[Any, Plan]] = {}
        self._known_outputs: dict[Plan, Any] = {}
        self._telling = telling(signature)

    def _maker(self) -> Callable[[Shape, Shape, Any], Any]:
        """Return (shape, strides, dtype) -> a new tensor.

        What torch.compile's own code calls takes half the time of ``torch.empty_strided``, but
        makes tensors on the current GPU.
        """
        torch, device = self._torch, self._device
        if device.type == "cpu":
            return cast("Callable[..., Any]", torch._C._dynamo.guards._empty_strided_cpu)
        if torch.cuda.device_count() == 1:
            return cast("Callable[..., Any]", torch._C._dynamo.guards._empty_strided_cuda)
        return lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        )

    def recall(self, leaves: Sequence[Any]) -> tuple[Plan, list[int]] | None:
        """Return plan and addresses of inputs that look like those of a call before; else None."""
        try:
            if len(self._telling) == 1:
                key = leaves[self._telling[0]].shape
            else:
                key = tuple([leaves[i].shape for i in self._telling])
            known = self._known.get(key)
            if known is None or not known[0](*leaves):
                return None
            addresses = [x.data_ptr() for x in leaves]
        # no tensor, or one without memory, or no input at all
        except (AttributeError, IndexError, RuntimeError):
            return None
        for address in addresses:
            if address & MISALIGNED:
                return None
        return known[1], addresses

    def remember(self, leaves: Sequence[Any], values: Sequence[Any], plan: Plan) -> None:
        """Let ``recall`` find a call whose inputs were all usable as they were."""
        if not leaves or any(x is not value for x, value in zip(leaves, values, strict=True)):
            return
        if len(self._known) >= _KNOWN:
            self._known.clear()
        shapes = [x.shape for x in leaves]
        key = tuple(shapes[i] for i in self._telling)
        self._known[key[0] if len(key) == 1 else key] = guard(self._torch, leaves), plan

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Shape, ...], list[int]]:
        """Return the tensors to pass, their shapes and their addresses."""
        types, device = self._types, self._device
        values: list[Any] = []
        shapes, addresses = [], []
        for x, (dtype, may_be_negative) in zip(leaves, self._wanted, strict=True):
            try:
                address, shape = x.data_ptr(), x.shape
                usable = (
                    type(x) in types
                    and x.dtype is dtype
                    and x.device == device
                    and x.is_contiguous()
                    and not address & MISALIGNED
                    and not (may_be_negative and x.is_neg())
                )
            # no tensor; or no storage or shape: sparse, nested, or inside a functorch transform
            except (AttributeError, RuntimeError):
                usable = False
            if not usable:
                x = self._adopt(x, self._specs[len(values)], dtype)
                address, shape = x.data_ptr(), x.shape
            values.append(x)
            shapes.append(shape)
            addresses.append(address)
        return values, tuple(shapes), addresses

    def _adopt(self, x: Any, spec: TensorSpec, dtype: Any) -> Any:
        torch = self._torch
        if not isinstance(x, torch.Tensor):
            if not hasattr(x, "__dlpack__"):
                raise wrong(spec.name, "a tensor", type(x).__name__)
            try:
                x = torch.from_dlpack(x)
            except Exception as e:
                raise wrong(
                    spec.name, "a tensor that torch can use", type(x).__name__, f"DLPack says: {e}"
                ) from e
        self._check(x, spec, dtype)
        x = x.detach()
        try:
            if x.is_neg():
                self._copies.note(spec.name, "a lazily negated view")
                x = x.resolve_neg()
            if not x.is_contiguous():
                self._copies.note(spec.name, "not contiguous")
                x = x.contiguous()
            if x.data_ptr() & MISALIGNED:
                self._copies.note(spec.name, f"not aligned to {ALIGNMENT} bytes")
                x = x.clone()
        except RuntimeError as e:
            if is_of_memory(e):
                raise uncopied(spec.name, e) from e
            raise wrong(spec.name, "a tensor with memory of its own", f"one without ({e})") from e
        return x

    def _check(self, x: Any, spec: TensorSpec, dtype: Any) -> None:
        if type(x) not in self._types:
            raise wrong(spec.name, "a plain torch.Tensor", type(x).__name__, "convert it first")
        if x.layout is not self._torch.strided:
            raise wrong(spec.name, "a dense tensor", str(x.layout), "call .to_dense()")
        if x.is_nested:
            raise wrong(spec.name, "a dense tensor", "a nested one", "pad it first")
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
        make = self._make
        results = [make(shape, strides, dtype) for shape, strides, dtype in plan.recipe]
        return results, results

    def recipe(self, plan: Plan) -> tuple[Any, ...]:
        """Return what ``outputs`` needs: shape, strides and dtype an output."""
        dtypes = [dtype for _, dtype in self._outputs]
        return tuple(zip(plan.shapes, plan.strides, dtypes, strict=True))

    def flat(self, position: int, count: int) -> Any:
        """Return memory for ``count`` elements of an output."""
        return self._torch.empty(count, dtype=self._outputs[position][1], device=self._device)

    def carve(self, memory: Any, plan: Plan, position: int) -> Any:
        """Return an output of ``plan`` at the start of what ``flat`` made."""
        shape = plan.shapes[position]
        return memory[: math.prod(shape)].view(shape)

    def check_out(self, out: Sequence[Any], plan: Plan) -> tuple[list[Any], list[int]]:
        """Check the caller's results; return them as what kernels write to, and their addresses."""
        targets = list(out)
        check = self._known_outputs.get(plan)
        if check is not None and check(*targets):
            addresses = [x.data_ptr() for x in targets]
            if not any(address & MISALIGNED for address in addresses):
                return targets, addresses
        for x, (spec, dtype), shape in zip(targets, self._outputs, plan.shapes, strict=True):
            self._check_out(x, spec, dtype, shape)
        if len(self._known_outputs) >= _KNOWN:
            self._known_outputs.clear()
        self._known_outputs[plan] = guard(self._torch, targets)
        return targets, [x.data_ptr() for x in targets]

    def _check_out(self, x: Any, spec: TensorSpec, dtype: Any, shape: Shape) -> None:
        """Raise InputError for a result tensor that kernels cannot write to."""
        name = f"out ({spec.name})"
        if not isinstance(x, self._torch.Tensor):
            raise wrong(name, "a torch.Tensor, as the inputs are", type(x).__name__)
        self._check(x, TensorSpec(name, spec.dtype, spec.shape), dtype)
        if x.requires_grad:
            raise wrong(name, "a tensor that does not require grad", "one that does")
        if x.is_neg():
            raise wrong(name, "a tensor with memory of its own", "a negated view")
        check_out(spec, shape, tuple(x.shape), x.is_contiguous(), x.data_ptr())


def telling(signature: Signature) -> list[int]:
    """List inputs whose shapes tell every symbolic dimension apart; the first where none has."""
    seen: set[Any] = set()
    found = []
    for position, spec in enumerate(signature.inputs):
        names = {size for size in spec.shape if isinstance(size, str)} - seen
        if names:
            seen |= names
            found.append(position)
    return found or [0]


def guard(torch: Any, tensors: Sequence[Any]) -> Callable[..., bool]:
    """Return (tensors) -> whether they are as these, apart from their addresses and contents.

    torch.compile's guards compare type, dtype, device, sizes, strides and what autograd and lazy
    negation add, all at once.
    """
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check

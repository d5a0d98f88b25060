"""Inputs to calibrate a quantized model on, and inputs to measure it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmcap.base.errors import InputError, QuantizeError
from tvmcap.base.numerics import dtype_name
from tvmcap.base.signature import Signature
from tvmcap.runtime.binding import flatten_call, make_plan
from tvmcap.verify.inputs import draw, plan_inputs, varied

Leaves = Sequence[torch.Tensor]

#: Seeds of drawn inputs start here, away from those that verification uses.
_SEED = 104_729


def leaves(signature: Signature, args: Sequence[Any], number: int) -> list[torch.Tensor]:
    """Return the tensors of one calibration input.

    Raises QuantizeError where a call of the library would refuse it.
    """
    where = f"calibration input {number}"
    try:
        tensors = [torch.as_tensor(t) for t in flatten_call(signature, args, {})]
        plan = make_plan(signature, [tuple(t.shape) for t in tensors], lambda _: 1)
    except (InputError, TypeError, ValueError, RuntimeError) as e:
        raise QuantizeError(f"{where} does not fit the model: {e}") from e
    if plan.skip:
        sizes = ", ".join(f"{name}={size}" for name, size in plan.dims.items())
        raise QuantizeError(f"{where} makes outputs without elements ({sizes}); leave it out")
    for spec, tensor in zip(signature.inputs, tensors, strict=True):
        if dtype_name(tensor) != spec.dtype:
            raise QuantizeError(
                f"{where}: {spec.name}: expected {spec.dtype}, got {dtype_name(tensor)}"
            )
    return [t.detach().cpu().contiguous().clone() for t in tensors]


def split(inputs: Sequence[Leaves]) -> tuple[list[Leaves], list[Leaves]]:
    """Return inputs to calibrate on and to measure on: the last quarter, of two inputs at least."""
    held = max(len(inputs) // 4, 1) if len(inputs) > 1 else 0
    return list(inputs[: len(inputs) - held]), list(inputs[len(inputs) - held :])


def spread(signature: Signature, inputs: Sequence[Leaves]) -> list[tuple[str, Leaves]]:
    """Return the inputs, and parts of them where all have one size of a dynamic dimension.

    The parts have its least size and half of the size seen. Each comes with words that name it.
    """
    found = [(f"calibration input {i}", one) for i, one in enumerate(inputs)]
    names = {dim.name for dim in signature.dims}
    extents = [extent for spec in signature.inputs for extent in spec.shape]
    if not all(isinstance(extent, int) or extent in names for extent in extents):
        return found  # sizes that are computed of others cannot be cut one by one
    for dim in signature.dims:
        sizes = {_size(signature, one, dim.name) for one in inputs} - {None}
        if len(sizes) != 1:
            continue
        (size,) = sizes
        wanted = {max(dim.min, 1), max((size or 0) // 2, dim.min, 1)}
        parts = sorted(part for part in wanted if part < (size or 0))
        for i, one in enumerate(inputs):
            cuts = [(part, _cut(signature, one, dim.name, part)) for part in parts]
            found += [
                (
                    f"calibration input {i}, cut to {dim.name}={part} (to have no cuts, give "
                    f"inputs of several sizes, or their least: Dim({dim.name!r}, min=...)),",
                    cut,
                )
                for part, cut in cuts
                if not _may_point_outside(one, cut, size or 0, part)
            ]
    return found


def _may_point_outside(one: Leaves, cut: Leaves, size: int, part: int) -> bool:
    """Whether integers that may be positions in a dimension would lie outside of what is left."""
    return any(
        after.numel() and int(before.max()) < size and int(after.max()) >= part
        for before, after in zip(one, cut, strict=True)
        if not before.is_floating_point() and before.dtype != torch.bool
    )


def _size(signature: Signature, one: Leaves, name: str) -> int | None:
    for spec, tensor in zip(signature.inputs, one, strict=True):
        if name in spec.shape:
            return int(tensor.shape[spec.shape.index(name)])
    return None


def _cut(signature: Signature, one: Leaves, name: str, size: int) -> Leaves:
    found = []
    for spec, tensor in zip(signature.inputs, one, strict=True):
        for axis, extent in enumerate(spec.shape):
            tensor = tensor.narrow(axis, 0, size) if extent == name else tensor
        found.append(tensor.contiguous().clone())
    return found


def of_example(
    signature: Signature, example: Sequence[torch.Tensor], seed: int
) -> tuple[list[Leaves], str]:
    """Return inputs to measure on without calibration, and what they are.

    They are the example itself, or drawn at its sizes where each of its tensors has one value.
    """
    own = [t.detach().cpu().contiguous() for t in example]
    if varied(own):
        return [own], "example input"
    (first, *_) = plan_inputs(signature, example, seed=seed)
    kind = type(first)(first.kind, first.sizes, _SEED + seed)
    return [draw(signature, kind, example)], "input drawn like the example"

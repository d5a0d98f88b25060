"""Inputs to calibrate a quantized model on, and inputs to measure it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmcap.base.errors import QuantizeError
from tvmcap.base.numerics import dtype_name
from tvmcap.base.signature import Signature, flatten
from tvmcap.verify.inputs import draw, plan_inputs

Leaves = Sequence[torch.Tensor]

#: Seeds of drawn inputs start here, away from those that verification uses.
_SEED = 104_729


def leaves(signature: Signature, args: Sequence[Any], number: int) -> list[torch.Tensor]:
    """Return the tensors of one calibration input; raises QuantizeError where it does not fit."""
    where = f"calibration input {number}"
    try:
        tensors = [torch.as_tensor(t) for t in flatten(signature.in_tree, tuple(args))]
    except Exception as e:
        raise QuantizeError(f"{where} does not fit the arguments of the model: {e}") from e
    if len(tensors) != len(signature.inputs):
        raise QuantizeError(
            f"{where}: expected {len(signature.inputs)} tensors, got {len(tensors)}"
        )
    bounds = {d.name: (d.min, d.max) for d in signature.dims}
    for spec, tensor in zip(signature.inputs, tensors, strict=True):
        fits = len(spec.shape) == tensor.ndim and all(
            size == extent if isinstance(size, int) else _inside(bounds.get(size), extent)
            for size, extent in zip(spec.shape, tensor.shape, strict=False)
        )
        if not fits or dtype_name(tensor) != spec.dtype:
            raise QuantizeError(
                f"{where}: {spec.name}: expected {spec.dtype} {list(spec.shape)} within the "
                f"dimensions' bounds, got {dtype_name(tensor)} {list(tensor.shape)}"
            )
    return [t.detach().cpu().contiguous().clone() for t in tensors]


def _inside(bounds: tuple[int, int | None] | None, extent: int) -> bool:
    if bounds is None:
        return True  # an expression of other dimensions
    low, high = bounds
    return low <= extent and (high is None or extent <= high)


def split(inputs: Sequence[Leaves]) -> tuple[list[Leaves], list[Leaves]]:
    """Return inputs to calibrate on and to measure on: the last quarter, of two inputs at least."""
    held = max(len(inputs) // 4, 1) if len(inputs) > 1 else 0
    return list(inputs[: len(inputs) - held]), list(inputs[len(inputs) - held :])


def spread(signature: Signature, inputs: Sequence[Leaves]) -> list[Leaves]:
    """Return the inputs, and parts of them where all have one size of a dynamic dimension.

    The parts have its least size and half of the size seen.
    """
    found: list[Leaves] = list(inputs)
    names = {dim.name for dim in signature.dims}
    extents = [extent for spec in signature.inputs for extent in spec.shape]
    if not all(isinstance(extent, int) or extent in names for extent in extents):
        return found  # sizes that are computed of others cannot be cut one by one
    for dim in signature.dims:
        sizes = {_size(signature, one, dim.name) for one in inputs} - {None}
        if len(sizes) != 1:
            continue
        (size,) = sizes
        parts = {max(dim.min, 1), max((size or 0) // 2, dim.min, 1)} - {size}
        found += [_cut(signature, one, dim.name, n) for one in inputs for n in sorted(parts)]
    return found


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
    if any(t.numel() and bool((t != t.flatten()[0]).any()) for t in own):
        return [own], "example input"
    (first, *_) = plan_inputs(signature, example, seed=seed)
    kind = type(first)(first.kind, first.sizes, _SEED + seed)
    return [draw(signature, kind, example)], "input drawn like the example"

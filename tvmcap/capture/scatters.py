"""Operators that write into a copy of a tensor or read its memory, as functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for

_aten = torch.ops.aten


def masked_put(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """Write ``aten.index_put`` at the places of a mask as a choice, at each place, of two values.

    For one mask, and values that are the same at each of its places, however many there are.
    """
    given = [index for index in indices if index is not None]
    if len(given) != 1 or given[0].dtype not in (torch.bool, torch.uint8):
        return NotImplemented
    mask, first = given[0].bool(), next(i for i, index in enumerate(indices) if index is not None)
    after = x.dim() - first - mask.dim()
    count = values.dim() - after - 1  # the axis of the values along the places
    if count >= 0:
        if values.shape[count] != 1:
            return NotImplemented
        axes = [*values.shape[:count], *[1] * mask.dim(), *values.shape[count + 1 :]]
        values = values.reshape(axes)
    chosen = x + values if accumulate else values
    return torch.where(mask.reshape(*mask.shape, *[1] * after), chosen, x)


def index_put(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """Write ``aten.index_put`` as a scatter along one axis.

    For whole-number indices of axes next to each other, whose places are numbered then; for a mask
    as ``masked_put`` does.
    """
    used = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return masked_put(x, indices, values, accumulate)
    first, front = used[0], list(range(len(used)))
    if used != [first + i for i in front]:
        return NotImplemented
    sizes = [x.shape[axis] for axis in used]
    whole = [torch.where(i < 0, i + size, i) for i, size in zip(given, sizes, strict=True)]
    place = whole[0]
    for index, size in zip(whole[1:], sizes[1:], strict=True):
        place = place * size + index
    rest = [size for axis, size in enumerate(x.shape) if axis not in used]
    flat = x.movedim(used, front).reshape(math.prod(sizes), *rest)
    put = values.expand([*rest[:first], *place.shape, *rest[first:]])
    ranks = list(range(place.dim()))
    put = put.movedim([first + i for i in ranks], ranks).reshape(place.numel(), *rest)
    where = place.reshape(-1, *[1] * len(rest)).expand(put.shape)
    write = _aten.scatter_add.default if accumulate else _aten.scatter.src
    return write(flat, 0, where, put).reshape(*sizes, *rest).movedim(front, used)


def diagonal_scatter(
    x: torch.Tensor, values: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Write ``aten.diagonal_scatter`` as a choice, at each place, of x or of the diagonal."""
    moved = x.movedim((dim1, dim2), (-2, -1))
    row = torch.arange(moved.shape[-2], device=x.device)
    column = torch.arange(moved.shape[-1], device=x.device)
    along = row if offset >= 0 else column
    picked = values[..., along.clamp(max=values.shape[-1] - 1)]
    picked = picked.unsqueeze(-1 if offset >= 0 else -2)
    on = column == row.unsqueeze(-1) + offset
    return torch.where(on, picked, moved).movedim((-2, -1), (dim1, dim2))


def as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """Write ``aten.as_strided`` of a contiguous tensor as a look-up of places in memory.

    For places of x itself, where x is a view of more memory.
    """
    first = 0 if offset is None else offset - x.storage_offset()
    last = first + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    if not x.is_contiguous() or first < 0 or last >= x.numel():
        return NotImplemented
    rank, place = len(size), torch.full((), first, dtype=torch.int64, device=x.device)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, device=x.device) * step
        place = place + along.reshape(-1, *[1] * (rank - 1 - axis))
    return x.reshape(-1)[place]


def empty_strided(size: Sequence[int], stride: Sequence[int], **how: Any) -> torch.Tensor:
    """Write ``aten.empty_strided``, which the gradient of a change in place fills, as zeros.

    For memory without gaps; other strides leave the operator whole.
    """
    order = list(range(len(size)))
    if not all(isinstance(n, int) for n in (*size, *stride)):
        order = order if tuple(stride) == make_contiguous_strides_for(size) else []
    else:
        order.sort(key=lambda axis: -stride[axis])
    lengths = [size[axis] for axis in order]
    steps = tuple(stride[axis] for axis in order)
    if len(order) != len(size) or steps != make_contiguous_strides_for(lengths):
        return NotImplemented
    how = {name: how.get(name) for name in ("dtype", "device")}
    back = sorted(range(len(order)), key=lambda place: order[place])
    zeros = torch.zeros(lengths, **how)
    return zeros.permute(back) if order != sorted(order) else zeros


def scatters() -> dict[Any, Callable[..., Any]]:
    """List them by operator; torch's decompositions change tensors in place, or there are none."""
    return {
        _aten.index_put.default: index_put,
        _aten.diagonal_scatter.default: diagonal_scatter,
        _aten.empty_strided.default: empty_strided,
    }

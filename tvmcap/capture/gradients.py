"""Gradients that PyTorch has no decomposition of, or one without a lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Write ``aten.convolution_backward`` for one, two and three dimensions.

    The gradient of x is the transposed convolution of ``grad``; that of the weight is the
    convolution of x by ``grad`` with the batch as channels, each group's on its own.
    """
    if transposed:
        return NotImplemented  # type: ignore[no-any-return]
    rank = x.dim() - 2
    axes = list(range(2, x.dim()))
    stride, padding, dilation = (_full(v, rank) for v in (stride, padding, dilation))
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        reached = [
            (grad.shape[a] - 1) * s - 2 * p + d * (weight.shape[a] - 1) + 1
            for a, s, p, d in zip(axes, stride, padding, dilation, strict=True)
        ]
        rest = [x.shape[a] - r for a, r in zip(axes, reached, strict=True)]
        grad_x = _aten.convolution(
            grad, weight, None, stride, padding, dilation, True, rest, groups
        )
    if output_mask[1]:
        n, c, o = x.shape[0], x.shape[1] // groups, grad.shape[1] // groups
        images = x.reshape(n, groups, c, *x.shape[2:]).transpose(0, 2)
        kernels = grad.reshape(n, groups, o, *grad.shape[2:]).permute(
            1, 2, 0, *(a + 1 for a in axes)
        )
        wide = _aten.convolution(
            images.reshape(c, groups * n, *x.shape[2:]),
            kernels.reshape(groups * o, n, *grad.shape[2:]),
            None,
            dilation,
            padding,
            stride,
            False,
            [0] * rank,
            groups,
        )
        for axis in axes:
            wide = wide.narrow(axis, 0, weight.shape[axis])
        grad_weight = wide.transpose(0, 1)
    if output_mask[2]:
        grad_bias = grad.sum([0, *axes])
    return grad_x, grad_weight, grad_bias


def _full(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def embedding_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    count: int,
    padding: int,
    scale_by_frequency: bool,
) -> torch.Tensor:
    """Write ``aten.embedding_dense_backward``: rows of ``grad`` added where ``indices`` say."""
    if scale_by_frequency:
        return NotImplemented
    rows, where = grad.reshape(-1, grad.shape[-1]), indices.reshape(-1, 1)
    rows = torch.where(where == padding, torch.zeros_like(rows), rows)
    start = grad.new_zeros((count, grad.shape[-1]))
    return start.scatter_add(0, where.expand(rows.shape), rows)


def max_pool2d_with_indices(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write ``aten.max_pool2d_with_indices`` as a maximum over shifted views of x.

    The gradient needs the positions, which the lowering of pooling does not give.
    """
    kernel, padding, dilation = (_full(v, 2) for v in (kernel, padding, dilation))
    stride = _full(stride, 2) if len(stride) else kernel
    height, width = x.shape[-2:]
    rows, columns = (
        _pooled(size, k, s, p, d, ceil_mode)
        for size, k, s, p, d in zip((height, width), kernel, stride, padding, dilation, strict=True)
    )
    more = [
        (n - 1) * s + (k - 1) * d + 1 - size - p
        for n, s, k, d, size, p in zip(
            (rows, columns), stride, kernel, dilation, (height, width), padding, strict=True
        )
    ]
    edges = [padding[1], max(more[1], 0), padding[0], max(more[0], 0)]
    padded = _aten.constant_pad_nd(x, edges, float("-inf")) if any(edges) else x
    views, places = [], []
    row = torch.arange(rows, device=x.device).reshape(-1, 1) * stride[0] - padding[0]
    column = torch.arange(columns, device=x.device).reshape(1, -1) * stride[1] - padding[1]
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            last = top + (rows - 1) * stride[0] + 1, left + (columns - 1) * stride[1] + 1
            views.append(padded[..., top : last[0] : stride[0], left : last[1] : stride[1]])
            at = row + top, column + left
            if any(edges):
                at = _inside(at[0], dilation[0], height), _inside(at[1], dilation[1], width)
            places.append(at[0] * width + at[1])
    value, which = torch.stack(views, -1).max(-1)
    where = torch.stack(places, -1).expand(*value.shape, len(places))
    return value, where.gather(-1, which.unsqueeze(-1)).squeeze(-1)


def _inside(place: torch.Tensor, dilation: int, size: int) -> torch.Tensor:
    """Take the window's first place inside for one before: where all are -inf, padding wins."""
    return torch.where(place < 0, place.remainder(dilation), place).clamp(max=size - 1)


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Extent of a pooled dimension, as torch.nn.MaxPool2d documents it."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def max_pool2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Write ``aten.max_pool2d_with_indices_backward``: ``grad`` added where ``indices`` say.

    An index counts the places of a plane; windows that overlap may share one, and are added up in
    float32 where x has 16 bits. Versions of PyTorch have a decomposition or none.
    """
    planes = x.shape[:-2]
    wide = grad.float() if x.dtype in (torch.float16, torch.bfloat16) else grad
    start = wide.new_zeros((*planes, x.shape[-2] * x.shape[-1]))
    added = start.scatter_add(-1, indices.reshape(*planes, -1), wide.reshape(*planes, -1))
    return added.reshape(x.shape).to(x.dtype)


def gradients() -> dict[Any, Callable[..., Any]]:
    """List them by operator."""
    return {
        _aten.convolution_backward.default: convolution_backward,
        _aten.max_pool2d_with_indices.default: max_pool2d_with_indices,
        _aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
        _aten.embedding_dense_backward.default: embedding_backward,
    }

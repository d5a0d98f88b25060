"""The gradient of a convolution as convolutions."""

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
        return NotImplemented
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
        kernels = grad.reshape(n, groups, o, *grad.shape[2:]).permute(1, 2, 0, *(a + 1 for a in axes))
        wide = _aten.convolution(
            images.reshape(c, groups * n, *x.shape[2:]),
            kernels.reshape(groups * o, n, *grad.shape[2:]),
            None, dilation, padding, stride, False, [0] * rank, groups,
        )
        for axis in axes:
            wide = wide.narrow(axis, 0, weight.shape[axis])
        grad_weight = wide.transpose(0, 1)
    if output_mask[2]:
        grad_bias = grad.sum([0, *axes])
    return grad_x, grad_weight, grad_bias


def _full(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def gradients() -> dict[Any, Callable[..., Any]]:
    """List by operator the gradients that PyTorch has no decomposition of."""
    return {_aten.convolution_backward.default: convolution_backward}

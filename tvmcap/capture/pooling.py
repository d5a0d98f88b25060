"""Average pooling with a divisor of its own, and gradients: products with one matrix a dimension.

Averaging over a box is averaging along each axis in turn; the matrix of an axis has a row a window
and a column a place, and the gradient is a product with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _pull(grad: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply the last ``len(matrices)`` axes of ``grad`` by one matrix each."""
    first = grad.dim() - len(matrices)
    for i, matrix in enumerate(matrices):
        grad = (grad.movedim(first + i, -1) @ matrix.to(grad.dtype)).movedim(-1, first + i)
    return grad


def _adaptive(windows: int, places: int, like: torch.Tensor) -> torch.Tensor:
    """Matrix of adaptive pooling: window i reaches from floor(i n / w) to ceil((i + 1) n / w)."""
    window = torch.arange(windows, device=like.device)
    start = (window * places) // windows
    end = ((window + 1) * places + windows - 1) // windows
    return _matrix(start, end, end - start, places, like)


def _strided(
    windows: int,
    places: int,
    kernel: int,
    stride: int,
    padding: int,
    count_padding: bool,
    like: Any,
) -> torch.Tensor:
    """Matrix of pooling with a kernel; a window counts the padding it covers, or not."""
    start = torch.arange(windows, device=like.device) * stride - padding
    end = start + kernel
    inside = end.clamp(max=places) - start.clamp(min=0)
    counted = end.clamp(max=places + padding) - start if count_padding else inside
    return _matrix(start, end, counted, places, like)


def _matrix(
    start: torch.Tensor, end: torch.Tensor, count: torch.Tensor, places: int, like: torch.Tensor
) -> torch.Tensor:
    place = torch.arange(places, device=start.device)
    inside = (place >= start.unsqueeze(-1)) & (place < end.unsqueeze(-1))
    return inside.to(torch.promote_types(torch.float32, like.dtype)) / count.unsqueeze(-1)


def adaptive_average_backward(grad: torch.Tensor, x: torch.Tensor, rank: int) -> torch.Tensor:
    """Write ``aten._adaptive_avg_pool2d_backward`` and the 3-d one."""
    sizes = zip(grad.shape[-rank:], x.shape[-rank:], strict=True)
    return _pull(grad, [_adaptive(windows, places, x) for windows, places in sizes])


def average_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    rank: int,
) -> torch.Tensor:
    """Write ``aten.avg_pool2d_backward`` and the 3-d one."""
    kernel, padding = _full(kernel, rank), _full(padding, rank)
    stride = _full(stride, rank) if len(stride) else kernel
    matrices = []
    for axis in range(rank):
        windows, places = grad.shape[axis - rank], x.shape[axis - rank]
        size = kernel[axis]
        matrix = _strided(windows, places, size, stride[axis], padding[axis], count_include_pad, x)
        if divisor_override is not None:
            matrix = (matrix > 0).to(matrix.dtype)
        matrices.append(matrix)
    total = _pull(grad, matrices)
    return total if divisor_override is None else total / divisor_override


def average(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    rank: int,
) -> Any:
    """Write ``aten.avg_pool2d`` and the 3-d one where a divisor is given; else they stay whole.

    A divisor replaces the count of places, so places past the end that ``ceil_mode`` adds can be
    zeros of the input.
    """
    if divisor_override is None:
        return NotImplemented
    kernel, padding = _full(kernel, rank), _full(padding, rank)
    stride = _full(stride, rank) if len(stride) else kernel
    if ceil_mode:
        ends = []
        for axis in reversed(range(rank)):
            size, k, s, p = x.shape[axis - rank], kernel[axis], stride[axis], padding[axis]
            windows = (size + 2 * p - k + s - 1) // s + 1
            windows -= (windows - 1) * s >= size + p
            ends += [p, max((windows - 1) * s + k - size - p, p)]
        x = torch.nn.functional.pad(x, ends)
        windows_of = [0] * rank
    else:
        windows_of = padding
    pool = _aten.avg_pool2d if rank == 2 else _aten.avg_pool3d
    return pool(x, kernel, stride, windows_of) * (math.prod(kernel) / divisor_override)


def _full(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def pooling() -> dict[Any, Callable[..., Any]]:
    """List them by operator."""

    def of(rule: Callable[..., Any], rank: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: rule(*args, **kwargs, rank=rank)

    return {
        _aten._adaptive_avg_pool2d_backward.default: of(adaptive_average_backward, 2),
        _aten._adaptive_avg_pool3d_backward.default: of(adaptive_average_backward, 3),
        _aten.avg_pool2d_backward.default: of(average_backward, 2),
        _aten.avg_pool3d_backward.default: of(average_backward, 3),
        _aten.avg_pool2d.default: of(average, 2),
        _aten.avg_pool3d.default: of(average, 3),
    }

"""Normalisations with what their gradients need: the statistics, in float32 for 16-bit values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _normalize(
    x: torch.Tensor, dims: list[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x of mean 0 and variance 1 over ``dims``, the mean, and 1 over the deviation."""
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    return centred * scale, mean, scale


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write ``aten.native_layer_norm`` over the trailing ``len(shape)`` dimensions of x."""
    result, mean, scale = _normalize(_wide(x), [-i for i in range(len(shape), 0, -1)], eps)
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return result.to(x.dtype), mean, scale


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write ``aten.native_group_norm`` for x of shape (n, channels, ...)."""
    parts = _wide(x).reshape(n, groups, channels // groups * inner)
    result, mean, scale = _normalize(parts, [2], eps)
    result = result.reshape(x.shape)
    along = [1, channels, *[1] * (x.dim() - 2)]
    result = result if weight is None else result * weight.reshape(along)
    result = result if bias is None else result + bias.reshape(along)
    return result.to(x.dtype), mean.reshape(n, groups), scale.reshape(n, groups)


def normalizations() -> dict[Any, Callable[..., Any]]:
    """List them by operator; torch's own decompositions end in operators without a lowering."""
    return {
        _aten.native_layer_norm.default: layer_norm,
        _aten.native_group_norm.default: group_norm,
    }

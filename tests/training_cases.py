"""Small models whose gradients are tested, with an example and what is dynamic of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Case = tuple[Any, tuple[torch.Tensor, ...], dict[int, dict[int, str]] | None]


class Attention(nn.Module):
    """Causal attention of two heads between two linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, steps, width = x.shape
        q, k, v = self.qkv(x).view(rows, steps, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, steps, width))


class ConvNet(nn.Module):
    """Convolutions, batch norm in train mode, pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(F.relu(self.second(x)).mean((2, 3)))


def block() -> Case:
    """A linear layer with GELU, as a function of its weights."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b), approximate="tanh")

    return fn, (torch.randn(7, 16), torch.randn(32, 16) / 4, torch.randn(32)), {0: {0: "B"}}


def mlp(dropout: float = 0.25) -> Case:
    """Two linear layers with GELU and dropout between them."""
    layers = (nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8))
    return nn.Sequential(*layers), (torch.randn(6, 16, requires_grad=True),), {0: {0: "B"}}


def norm_mlp() -> Case:
    """LayerNorm and an MLP in bfloat16, on sequences of any length."""
    layers = (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x = torch.randn(3, 5, 16).bfloat16().requires_grad_()
    return nn.Sequential(*layers).bfloat16(), (x,), {0: {0: "B", 1: "T"}}


def attention() -> Case:
    """``Attention`` with a dynamic batch."""
    return Attention(), (torch.randn(2, 5, 16, requires_grad=True),), {0: {0: "B"}}


def convnet() -> Case:
    """``ConvNet`` in train mode."""
    return ConvNet(), (torch.randn(2, 3, 8, 8),), None


CASES: dict[str, Callable[[], Case]] = {
    "block": block,
    "mlp": mlp,
    "norm_mlp": norm_mlp,
    "attention": attention,
    "convnet": convnet,
}

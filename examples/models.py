"""The blocks that the demo, the benchmarks and the GPU tests compile.

Each entry of ``CASES`` makes (function or module, example inputs, dynamic).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Case = tuple[Any, tuple[torch.Tensor, ...], dict[str, dict[int, str]]]


def gelu_tanh(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The capstone block with the tanh form of GELU: x [B, K], w [K, N], b [N]."""
    return F.gelu(x @ w + b, approximate="tanh")


def gelu_erf(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The capstone block with GELU as PyTorch defines it by default."""
    return F.gelu(x @ w + b)


class MLP(nn.Module):
    """Linear layers of equal width with GELU after each."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B, width] to [B, width]."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class NormMLP(nn.Module):
    """A transformer's feed-forward half: LayerNorm, up, GELU, down, residual."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B, width] to [B, width]."""
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class ConvNet(nn.Module):
    """Two convolutions with batch norm and ReLU, pooling, and a classifier; eval mode."""

    def __init__(self, channels: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * channels, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B, 3, H, W] to [B, classes]."""
        return self.body(x)


class SelfAttention(nn.Module):
    """Multi-head self-attention, softmax(q k^T / sqrt(d)) v, with its projections."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B, T, width] to [B, T, width]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _block(fn: Callable[..., torch.Tensor], k: int, n: int) -> Callable[[], Case]:
    def make() -> Case:
        x, w, b = torch.randn(128, k), torch.randn(k, n) / k**0.5, torch.randn(n)
        return fn, (x, w, b), {"x": {0: "B"}}

    return make


def _module(cls: type[nn.Module], *shape: int) -> Callable[[], Case]:
    return lambda: (cls().eval(), (torch.randn(*shape),), {"x": {0: "B"}})


CASES: dict[str, Callable[[], Case]] = {
    "block": _block(gelu_tanh, 1024, 4096),
    "block_erf": _block(gelu_erf, 1024, 4096),
    "mlp": _module(MLP, 64, 256),
    "norm_mlp": _module(NormMLP, 64, 256),
    "convnet": _module(ConvNet, 8, 3, 32, 32),
    "attention": _module(SelfAttention, 4, 64, 256),
}

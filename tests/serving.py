"""What the tests of serving share: a network, its library, samples, and the clients."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tvmcap
from tests import libs

WIDTH = 16
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import serving_client as serving_client  # noqa: E402


class Net(nn.Module):
    """``x [B, 16]`` to ``[B, 16]``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def export(fn: object, path: Path, *args: torch.Tensor, **options: object) -> Path:
    """Build with a batch in front of each argument, and write the library."""
    free = {i: {0: tvmcap.Dim("B", max=512)} for i in range(len(args))}
    return Path(libs.quick(fn, *args, **{"dynamic": free, **options}).export(path))


def write_sample(path: Path, seed: int) -> Path:
    """Write a sample with PyTorch's own outputs of ``Net(seed)``."""
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        np.savez(path, x=x.numpy(), out0=Net(seed).eval()(x).numpy())
    return path

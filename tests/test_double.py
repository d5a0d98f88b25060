"""float64 in, float64 throughout: libraries and torch.compile, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmcap
from tests.compiling import compiled

Fn = Callable[..., Any]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def convolutions(x: Any, w1: Any, w2: Any, w3: Any) -> tuple[torch.Tensor, ...]:
    one = F.conv1d(x, w1, stride=2, padding=1)
    two = F.conv2d(x.view(2, 4, 3, 4), w2, padding=1, groups=2)
    return one, two, F.conv3d(x.view(2, 4, 3, 2, 2), w3)


def pools(x: Any) -> tuple[torch.Tensor, ...]:
    square = x.view(2, 4, 3, 4)
    return F.avg_pool2d(square, 3, 2, 1), F.adaptive_avg_pool2d(square, (2, 3)), F.elu(x * 0.1)


CASES: dict[str, tuple[Fn, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "convolutions": (
        convolutions,
        lambda: (draw(2, 4, 12), draw(5, 4, 3), draw(4, 2, 3, 3), draw(3, 4, 2, 1, 2)),
    ),
    "pools": (pools, lambda: (draw(2, 4, 12),)),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("case", CASES)
def test_gradients_have_the_precision_of_float64(case: str) -> None:
    fn, make = CASES[case]
    args = make()
    fast = compiled(fn)
    found = []
    for call in (fast, fn):
        results = call(*args)
        total = sum((y * y).sum() for y in results)
        found.append([*results, *torch.autograd.grad(total, args)])
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-13, atol=1e-13)


def test_a_library_normalizes_in_float64() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double().eval()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    lib = tvmcap.build(model, (x,), target="llvm", tune="none", verify=False)
    torch.testing.assert_close(lib(x), model(x), rtol=1e-13, atol=1e-13)

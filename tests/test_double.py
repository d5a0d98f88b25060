"""float64 in, float64 throughout: libraries and torch.compile, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmcap
from tests import libs
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


NORMS: dict[str, nn.Module] = {
    "layer norm": nn.LayerNorm(8),
    "of two dimensions": nn.LayerNorm((4, 8), elementwise_affine=False),
    "group norm": nn.GroupNorm(2, 4),
    "group norm without weights": nn.GroupNorm(4, 4, affine=False),
    "rms norm": nn.RMSNorm(8),
    "instance norm": nn.InstanceNorm1d(4, affine=True),
    "encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_build_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(NORMS[name]).to(dtype).eval()
    x = torch.randn(3, 4, 8).to(dtype)
    lib = tvmcap.build(model, (x,), target="llvm", tune="none", verify=False, dynamic={0: {0: "B"}})
    limit = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(lib(x[:2]), model(x[:2]), rtol=limit, atol=limit)


def test_hyperbolic_functions_in_float64() -> None:
    x = torch.tensor(
        [0.0, 1e-9, -1e-3, 0.49, 0.5, 0.7, -3.0, 40.0, 710.0, -711.0, float("nan")]
    ).double()
    lib = libs.quick(lambda x: (x.sinh(), x.cosh()), x)
    torch.testing.assert_close(lib(x), (x.sinh(), x.cosh()), rtol=1e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_what_is_no_number_is_told_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, float("nan"), float("inf"), -float("inf")]).to(dtype)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.isnan(), x.isinf(), x.isfinite()

    torch.testing.assert_close(libs.quick(fn, x)(x), fn(x))

"""Tensors without elements: what PyTorch makes of them, its errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.capture.running import check, same
from tests.libs import quick
from tvmcap.base.errors import CaptureError
from tvmcap.capture.export import capture

NOTHING = torch.zeros(4, 0)

CASES: dict[str, Callable[..., Any]] = {
    "mean": lambda x: (x.mean(), x.mean(-1), x.mean((0, -1), keepdim=True), x.mean(0)),
    "sums": lambda x: (x.sum(), x.sum(-1, dtype=torch.float64), x.long().sum(-1), x.sum(0)),
    "products": lambda x: (x.prod(), x.prod(-1), x @ x.new_ones(0, 3)),
    "variances": lambda x: (x.var(), x.var(-1, correction=0), *torch.var_mean(x, -1), x.std(-1)),
    "truth": lambda x: (x.any(-1), x.all(-1), (x > 0).all(), (x > 0).any()),
    "norms": lambda x: (torch.linalg.vector_norm(x, dim=-1), x.logsumexp(-1)),
    "half": lambda x: (x.bfloat16().mean(-1), x.half().sum(-1) + 1),
    "layers": lambda x: (F.layer_norm(x, (0,)).sum(-1), F.mse_loss(x, x * 2)),
    "between": lambda x: (x.sum(-1) + 1) * x.mean(),
}


@pytest.mark.parametrize("name", CASES)
def test_what_pytorch_makes_of_no_elements(name: str) -> None:
    check(CASES[name], (NOTHING,))


def test_a_dynamic_dimension_beside_it() -> None:
    def both(x: torch.Tensor) -> Any:
        return x.mean(-1), x.sum((0, -1)), x.sum(-1) * 2

    others = (torch.zeros(7, 0),), (torch.zeros(2, 0),)
    check(both, (NOTHING,), *others, dynamic={"x": {0: "B"}})


def test_what_pytorch_refuses() -> None:
    for fn in (torch.max, lambda x: x.amax(-1), lambda x: x.median(-1).values):
        with pytest.raises(CaptureError, match=r"(?s)test_empty\.py.*(dim|reduc)"):
            capture(lambda x, fn=fn: fn(x), (NOTHING,))


def test_a_library_and_a_gradient() -> None:
    x, y = torch.randn(3, generator=torch.Generator().manual_seed(2)), torch.zeros(3, 0)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * (y.sum(-1) + 2) + y.mean()

    same(quick(f, x, y)(x, y), f(x, y))
    x.requires_grad_()
    lib = quick(lambda x, y: x * (y.sum(-1) + 2), x, y, backward=True)
    lib(x, y).sum().backward()
    same(x.grad, torch.full((3,), 2.0))

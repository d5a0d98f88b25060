"""Values and gradients that a rewrite of the graph could change, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tvmcap

_TABLE = torch.tensor([1.0, -2.0, 0.5, 3.0])


def _constants(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Use constants that the backward graph needs, two of them at one place of memory."""
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    loss = F.cross_entropy(x, torch.tensor([0, 3, 2]), weight=weight, reduction="none")
    part = torch.where(x > 0, _TABLE[:1], _TABLE[:4]) * y
    return (
        part * torch.tensor(2.0) + loss.unsqueeze(1) + x.index_put((torch.tensor([2, 0]),), y[:2])
    )


def _changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Change parts of a tensor, contiguous or not, whose gradient is made by changing memory."""
    z = x * 1
    z[:, 1] = y[:, 0]
    z.t()[2].mul_(y[:, 1])
    turned = (x * 2).t().contiguous().t()
    turned[:, 3].mul_(y[:, 2])
    return z + turned


def _averages(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Average windows, the sum over the divisor that is given."""
    image = (x.unsqueeze(-1) * y.unsqueeze(1)).reshape(1, 3, 4, 4)
    one = F.avg_pool2d(image, 3, 2, 1, divisor_override=5)
    two = F.avg_pool2d(image[0], (3, 2), ceil_mode=True, padding=1, divisor_override=2)
    three = F.avg_pool3d(image, (3, 2, 3), 2, 1, True, False, divisor_override=7)
    return torch.cat([part.flatten() for part in (one, two, three)])


def _unread(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Use one result of several."""
    return x.split([1, 3], 1)[1] * 2 + F.softshrink(y)[:, :3]


def _no_elements(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply matrices with sizes of 0, in each place."""
    return (x[:0] @ y.t()).sum() + x[:, :0] @ y[:, :0].t() + (x @ y[:0].t()).sum() + x[:, :3]


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "constants": _constants,
    "changed in place": _changed,
    "average pooling": _averages,
    "results not read": _unread,
    "sizes of 0": _no_elements,
}


def _results(fn: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = fn(*leaves)
    cotangent = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).to(y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    example = tuple(t.clone().requires_grad_() for t in inputs)
    options: dict[str, Any] = {"tune": "none", "verify": False, "cache_dir": str(tmp_path)}
    lib = tvmcap.build(CASES[name], example, backward=True, target="llvm", **options)
    wanted = _results(CASES[name], [t.double() for t in inputs]) if name != "constants" else None
    eager = _results(CASES[name], inputs)
    for ours, theirs, exact in zip(_results(lib, inputs), eager, wanted or eager, strict=True):
        assert ours.shape == theirs.shape
        error, room = (ours - exact).abs().max(), (theirs - exact).abs().max()
        assert error <= 2 * room + 4 * torch.finfo(torch.float32).eps * exact.abs().max()


def _zeros(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * 0.0, 0 * x + 1, torch.where(x > 0, x * -0.0, x), x * torch.tensor(0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_times_what_is_not_finite_is_no_zero(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 4)
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, -torch.inf
    x = x.to(dtype)
    lib = tvmcap.build(_zeros, (x,), target="llvm", tune="none", cache_dir=str(tmp_path))
    for ours, theirs in zip(lib(x), _zeros(x), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())

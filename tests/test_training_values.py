"""Values and gradients that a rewrite of the graph could change, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
    none = x[:, :0].reshape(0, 5).sum() + y[:0].reshape(4, 0, 2).sum() + x[None, :0][0].sum()
    return (x[:0] @ y.t()).sum() + x[:, :0] @ y[:, :0].t() + (x @ y[:0].t()).sum() + x[:, :3] + none


def _truths(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Reduce and sort truth values, over some axes and over all."""
    hit = x > 0
    rows = (hit.amax(1) & ~hit.amin(0)[:3]) | hit.max(1)[0] | (y < 0).min(1)[0]
    places = hit.cumsum(1) + hit.sort(1)[0] + hit.any() + hit.max() + (x > -99).min()
    return (x * rows[:, None] + y) * places


def _two_dtypes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Combine operands that PyTorch promotes, tensors and numbers of rank 0."""
    wide, whole = y.double() * 0.5, torch.arange(4)
    parts = [torch.cat([x, wide]), torch.stack([x, wide]).flatten(0, 1)]
    parts += [torch.where(x > 0, x, wide).repeat(2, 1), torch.where(x > 0, x, whole).repeat(2, 1)]
    parts += [torch.fmod(x, wide.abs() + 0.3).repeat(2, 1)]
    bounds = torch.tensor(-0.5, dtype=torch.float64), torch.linspace(0.1, 0.4, 24).view(6, 4)
    parts += [x.repeat(2, 1).clamp(*bounds), y.clamp(min=whole - 2).repeat(2, 1)]
    parts += [F.cosine_similarity(x.to(y.dtype), y, dim=1)[:, None].repeat(2, 4)]
    return sum(parts).to(x.dtype)  # type: ignore[union-attr]


def _moved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Shuffle, make matrices of ones, multiply up along an axis, with zeros in it."""
    image = (
        F.pixel_shuffle(x.reshape(3, 4, 1, 1), 2) + F.pixel_unshuffle(y.view(1, 1, 6, 2), 2).sum()
    )
    products = torch.where(x < -0.5, 0.0, x).cumprod(1) + x.cumprod(0)
    return image.reshape(3, 4) * torch.eye(3, 4) + products + y @ torch.eye(4).to(y.dtype)


def _attention_of_none(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Attend with no queries, and with no keys, whose result has elements and no sources."""
    none = F.scaled_dot_product_attention(x[None, :0], y[None], y[None])
    some = F.scaled_dot_product_attention(x[None], y[None, :0], x[None, :0])
    return torch.cat([none[0], some.nan_to_num(0.25)[0] + x * y])


def _sums_of_none(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Reduce and scan parts without elements, which are no views of what they are parts of."""
    none = x[:0].sum(0) + x[:0].sum() + y[:, :0].cumsum(1).sum() + y[:0].cumsum(0).sum(0)
    return x + (none + x[:0].softmax(0).sum(0)) * y + y[:, :0].prod(1, keepdim=True)


def _hidden(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Attend to what masks leave, which are made with infinity, as causal and padding masks are."""
    causal = torch.full((3, 3), float("-inf")).triu(1)
    padding = torch.tensor([False, False, True])
    scores = (x @ y.t() + causal).masked_fill(padding, float("-inf"))
    gone = torch.where(x > y, x, torch.full_like(x, float("nan"))).nan_to_num(0.5)
    return scores.softmax(1) @ y + gone + x.masked_fill(y > 0, -2.0)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "constants": _constants,
    "changed in place": _changed,
    "average pooling": _averages,
    "results not read": _unread,
    "sizes of 0": _no_elements,
    "sums of none": _sums_of_none,
    "truth values": _truths,
    "two dtypes": _two_dtypes,
    "moved": _moved,
    "masks of infinity": _hidden,
    "attention of none": _attention_of_none,
    "its input": lambda x, y: x,
    "a gradient that is its input": lambda x, y: x + y,
}


def _results(fn: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = fn(*leaves)
    cotangent = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).to(y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent, materialize_grads=True)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CASES), ("sums of none", torch.bfloat16)],
)
def test_values_and_gradients(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    inputs = [torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)]
    example = tuple(t.clone().requires_grad_() for t in inputs)
    options: dict[str, Any] = {"tune": "none", "verify": False, "cache_dir": str(tmp_path)}
    lib = tvmcap.build(CASES[name], example, backward=True, target="llvm", **options)
    wanted = _results(CASES[name], [t.double() for t in inputs]) if name != "constants" else None
    eager = _results(CASES[name], inputs)
    for ours, theirs, exact in zip(_results(lib, inputs), eager, wanted or eager, strict=True):
        assert ours.shape == theirs.shape
        error, room = (ours - exact).abs().max(), (theirs - exact).abs().max()
        assert error <= 2 * room + 4 * torch.finfo(dtype).eps * exact.abs().max()


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


def _ranked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    small = (x.nan_to_num(0.0) * 3).to(torch.int8)
    along = (*x.median(1), *x.median(0, keepdim=True), x.median(), x[2:].median(0).values)
    return (*along, small.sort(1)[0], small.to(torch.uint8).topk(2, 1)[0], (x > 0).sort(0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_medians_and_orders_of_small_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(4)
    x = torch.randn(5, 6).to(dtype)
    x[1, 2] = torch.nan
    options: dict[str, Any] = {"tune": "none", "cache_dir": str(tmp_path), "verify": False}
    lib = tvmcap.build(_ranked, (x,), target="llvm", **options)
    for ours, theirs in zip(lib(x), _ranked(x), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.nan_to_num(99), theirs.nan_to_num(99))


def _products(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply with the batch as rows and inside."""
    return F.gelu(x @ w), x.t() @ (x @ w)


@pytest.mark.parametrize("backward", [False, True])
def test_products_of_a_dynamic_size_that_is_zero(backward: bool, tmp_path: Path) -> None:
    torch.manual_seed(6)
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    example = (x.clone().requires_grad_(backward), w.clone().requires_grad_(backward))
    options: dict[str, Any] = {"tune": "none", "cache_dir": str(tmp_path), "verify": False}
    options["dynamic"] = {0: {0: tvmcap.Dim("B", min=0)}}
    lib = tvmcap.build(_products, example, backward=backward, target="llvm", **options)
    for size in (0, 3):
        results = []
        for fn in (lib, _products):
            leaves = [torch.linspace(-1, 1, size * 4).view(size, 4), w.clone()]
            leaves = [t.requires_grad_(backward) for t in leaves]
            values = fn(*leaves)
            total = sum(v.sum() for v in values)
            found = torch.autograd.grad(total, leaves) if backward else ()
            results.append([*(v.detach() for v in values), *found])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class _Checkpointed(nn.Module):
    """A layer with dropout whose inside is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return x + y


def test_a_module_with_checkpoints_is_built_and_verified(tmp_path: Path) -> None:
    torch.manual_seed(4)
    module, x, found = _Checkpointed(), torch.randn(3, 4), []
    options: dict[str, Any] = {"tune": "none", "cache_dir": str(tmp_path)}
    lib = tvmcap.build(module, (x,), backward=True, target="llvm", **options)
    assert lib.manifest.verified
    for fn in (lib, module):
        torch.manual_seed(6)
        y = fn(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_convolutions_of_any_batch(tmp_path: Path) -> None:
    """PyTorch chooses another kernel from 16 images on, which a library has nothing to do with."""
    torch.manual_seed(5)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(2), nn.Conv1d(4, 3, 2)
    )
    options: dict[str, Any] = {"tune": "none", "verify": False, "cache_dir": str(tmp_path)}
    lib = tvmcap.build(
        module,
        (torch.randn(3, 2, 4, 4),),
        backward=True,
        target="llvm",
        dynamic={0: {0: "B"}},
        **options,
    )
    for count in (1, 3, 20):
        x = torch.randn(count, 2, 4, 4)
        for ours, theirs in zip(
            *(
                [y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))]
                for y in (lib(x), module(x))
            ),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

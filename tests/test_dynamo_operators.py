"""Operators under torch.compile that tracing, or a simplifier, treats in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.compiling import compiled

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_a_kernel_of_torchs_sees_eagers_strides() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.t().contiguous().t() * 2
        return torch.as_strided(y, (3,), (1,)) + y[1:, 0].sum()

    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(fn)(x), fn(x))


def test_a_strided_view_of_part_of_memory() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.as_strided((2, 2), (2, 1), *offset) * 2 for offset in ((), (9,), (5,)))

    x = torch.randn(5, 4)[2:]
    for ours, eager in zip(compiled(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(ours, eager)


def test_tensors_written_in_the_code() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([2, 0])] * torch.tensor(2.5) + torch.tensor([1, 2, 3, 4])

    x, found = torch.randn(3, 4, requires_grad=True), []
    for call in (compiled(fn), fn):
        y = call(x)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("fn", [torch.copysign, torch.fmax, torch.hypot, torch.fmin])
def test_operators_that_stay_with_torch(fn: Callable[..., torch.Tensor], caplog: Any) -> None:
    args, found = [torch.randn(3, 4, requires_grad=True) for _ in range(2)], []
    for call in (compiled(lambda x, y: fn(x * 2, y) + 1), lambda x, y: fn(x * 2, y) + 1):
        y = call(*args)
        found.append((y, *torch.autograd.grad(y.sum(), args)))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)
    assert not [r for r in caplog.records if "prims" in r.getMessage()]


ACTIVATIONS = (
    "celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu"
    " silu softplus softshrink softsign tanhshrink"
).split()


def test_gradients_of_activations_are_compiled(caplog: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(F, name)(x * 1.5) for name in ACTIVATIONS], 1)

    x = torch.cat([torch.randn(4, 8), torch.randn(4, 8) * 100]).requires_grad_()
    found = []
    for call in (compiled(fn), fn):
        y = call(x)
        found.append((y, *torch.autograd.grad(y, x, torch.cos(y.detach()))))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-4)
    assert not [r for r in caplog.records if "stays with PyTorch" in r.getMessage()]


def test_parts_of_a_tensor_and_powers_as_in_eager_without_a_word_from_tvm(
    tmp_path: Path, capfd: Any
) -> None:
    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        parts = (
            x[:4].sum(0) * x[2:5].sum(0) + x[::3].prod(0) + x[1::2].exp().sum(0) + x[-3:-1].sum()
        )
        taken = F.embedding(at, x).pow(3).sum((0, 1)) + x[:, 1:8:3].cos().sum()
        written = torch.slice_scatter(x, x[:2] * 2, 0, 1, 8, 4) + torch.slice_scatter(
            x, x[1:3], 0, 6
        )
        return parts * taken + written

    torch.manual_seed(0)
    x, at, weight = (
        torch.rand(8, 9, requires_grad=True),
        torch.randint(0, 8, (3, 2)),
        torch.rand(8, 9),
    )
    found = []
    for call in (compiled(fn, cache_dir=str(tmp_path)), fn):
        y = call(x, at)
        found.append((y, *torch.autograd.grad(y, x, weight)))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert "Warning" not in capfd.readouterr().err  # nothing that TVM prints by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_varies_is_an_argument_of_the_graph(dtype: torch.dtype, caplog: Any) -> None:
    def fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).tanh() - scale

    call, x = compiled(fn), torch.randn(5, 3, dtype=dtype, requires_grad=True)
    for scale in (1.5, 0.3, -2.25):
        found = [(y, *torch.autograd.grad(y.sum(), x)) for y in (f(x, scale) for f in (call, fn))]
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(
                ours, eager, rtol=0.02, atol=0.02 if dtype.itemsize == 2 else 1e-5
            )
    assert not [r for r in caplog.records if "stays with PyTorch" in r.getMessage()]


def test_losses_and_sums_of_no_elements_of_any_batch_are_compiled(caplog: Any) -> None:
    """Gradients of means divide by a size; sums of no elements are made while compiling."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        none = x[:, :0].sum() + x[:0].new_ones(2, 3).mean()
        return F.mse_loss(x, x.detach() * 2) + F.smooth_l1_loss(x.cos(), x) + none

    call = compiled(fn)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4, requires_grad=True)
        found = [(y, *torch.autograd.grad(y, x)) for y in (f(x) for f in (call, fn))]
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert not [r for r in caplog.records if "stays with PyTorch" in r.getMessage()]


def test_a_rounding_is_not_simplified_away() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + 12582912.0) - 12582912.0, torch.log1p(x * 1e-3)

    x = torch.randn(300)
    rounded, logarithm = compiled(fn)(x)
    assert torch.equal(rounded, x.round())
    torch.testing.assert_close(logarithm, torch.log1p(x * 1e-3), rtol=3e-7, atol=0)

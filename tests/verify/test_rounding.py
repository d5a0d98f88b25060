"""Eager rounded otherwise: by ulps where results are not exact, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tvmcap.base.numerics import compare
from tvmcap.verify.rounding import RUNS, Rounding, rounded

SEED = torch.seed() % 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_move_by_a_few_ulps_and_not_all_in_one_direction(dtype: torch.dtype) -> None:
    x = torch.rand(1000).to(dtype) + 1
    with Rounding(SEED):
        y = x / 3
    off = (y.double() - x.double() / 3) / torch.finfo(dtype).eps
    assert y.dtype == dtype and (off > 0).any() and (off < 0).any()
    assert off.abs().max() < 4


def test_what_is_exact_stays() -> None:
    x = torch.randint(-8, 8, (40, 30)).float()
    zeros = torch.zeros(5)
    with Rounding(SEED):
        assert torch.equal((x @ x.T).floor(), (x.double() @ x.double().T).float())
        assert torch.equal(x * 0.5 > 0, x > 0)
        assert torch.equal(torch.exp(zeros - torch.inf), zeros)
        assert torch.equal(x.t().contiguous(), x.clone().t())
        assert torch.equal(x.double() / 3, x.double() / 3)
        assert (x / 0).isnan().equal(x == 0)


def test_strides_and_random_numbers_are_those_of_eager() -> None:
    x = torch.rand(6, 4).t()
    torch.manual_seed(SEED)
    plain = torch.nn.functional.dropout(x / 3, 0.5)
    torch.manual_seed(SEED)
    with Rounding(SEED):
        noisy = torch.nn.functional.dropout(x / 3, 0.5)
    assert noisy.stride() == plain.stride()
    assert torch.equal(noisy == 0, plain == 0)


def test_an_error_that_eager_avoids_by_luck_is_within_the_budget() -> None:
    # sums that cancel: in another order eager is much further from the exact result
    x = torch.randn(1, 512) * 64
    w = torch.randn(512, 1)
    w[-1] = -(x[0, :-1] @ w[:-1, 0]) / x[0, -1]
    exact = x.double() @ w.double()
    orders = [torch.randperm(512) for _ in range(64)]
    found = sorted((x[:, o] @ w[o] for o in orders), key=lambda y: float((y - exact).abs()))
    lucky, typical = found[0], found[32]
    assert not compare(typical, exact, lucky).ok or torch.equal(typical, lucky)
    others = rounded(lambda: x @ w, RUNS)
    assert compare(typical, exact, lucky, others=others).ok
    wrong = exact + 1e-5 * (x.double().abs() @ w.double().abs())
    assert not compare(wrong.float(), exact, lucky, others=others).ok


def test_gradients_of_a_saturated_softmax() -> None:
    q = torch.tensor([[0.0, 17.5, -3.0, 1.0]], requires_grad=True)
    tangent = torch.randn(1, 4)

    def run(dtype: torch.dtype) -> Any:
        wide = q.detach().to(dtype).requires_grad_()
        return torch.autograd.grad(torch.softmax(wide, -1), wide, tangent.to(dtype))[0]

    exact, eager = run(torch.float64), run(torch.float32)
    spread = [float((g - exact).abs().max()) for g in rounded(lambda: run(torch.float32), RUNS)]
    assert max(spread) >= float((eager - exact).abs().max())
    assert max(spread) < 1e-5


def test_what_cannot_run_so_is_left_out() -> None:
    def fails() -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    assert rounded(fails, RUNS) == []

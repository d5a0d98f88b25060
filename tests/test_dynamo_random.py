"""Random numbers under torch.compile: drawn once, and in the order of eager."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tvmcap
from tests.compiling import compiled
from tvmcap import dynamo
from tvmcap.capture import partition

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def same(fast: Any, eager: Any, x: torch.Tensor, parameters: Any = ()) -> None:
    """Check results and gradients under one seed, and where the generator stands after."""
    found = []
    for fn in (fast, eager):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        y = fn(leaf)
        grads = torch.autograd.grad((y * y).sum(), [leaf, *parameters])
        found.append([y.detach(), *grads, torch.rand(1)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
def test_no_budget_draws_again(budget: float) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout((x * torch.rand(x.shape)).sin(), 0.4)
        y = (y * torch.bernoulli(x.sigmoid())).tanh() + torch.randn_like(y)
        return F.dropout(y.exp(), 0.2).sin()

    same(compiled(fn, memory_budget=budget), fn, torch.randn(6, 8))


def test_a_checkpoint_draws_once(caplog: Any) -> None:
    first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def fn(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(first, x, use_reentrant=False)
        return y.tanh()

    same(compiled(fn), fn, torch.randn(6, 8), list(first.parameters()))
    assert not [r for r in caplog.records if r.name == "tvmcap"]


def test_a_checkpoint_is_computed_again(monkeypatch: Any) -> None:
    first = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    saved = []

    def spy(joint: Any, outputs: int, budget: float) -> Any:
        pair = partition.partition(joint, outputs, budget)
        saved.append(partition.saved_bytes(pair, outputs))
        return pair

    monkeypatch.setattr(dynamo, "partition", SimpleNamespace(partition=spy, copy=partition.copy))
    x = torch.randn(6, 8)
    same(compiled(first), first, x)
    same(compiled(lambda x: checkpoint(first, x, use_reentrant=False)), first, x)
    assert saved[0] >= 4 * x.shape[0] * 64 and saved[1] == 0


def _late(x: torch.Tensor) -> torch.Tensor:
    """The first number that is drawn waits for what the second one does not need."""
    return torch.bernoulli((x @ x.t()).sigmoid()) * torch.rand(x.shape[0]) * x.sum()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    y = x.t() * 2
    return F.dropout(y, 0.5) + torch.rand_like(y) * F.dropout(x, 0.5).t()


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.expand(3, *x.shape), 0.5) * F.dropout(x[:, ::2], 0.5).sum()


@pytest.mark.parametrize("fn", [_transposed, _repeated], ids=["transposed", "repeated"])
def test_a_library_draws_in_eagers_memory(fn: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(4, 6)
    same(tvmcap.build(fn, (x,), backward=True, target="llvm", tune="none", verify=False), fn, x)


def _attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, 1, 2, 3)
    return F.scaled_dot_product_attention(heads, heads * 2, heads, dropout_p=0.3).flatten(1)


@pytest.mark.parametrize(
    "fn",
    [_late, _transposed, _repeated, _attention],
    ids=["late", "transposed", "repeated", "attention"],
)
def test_the_order_and_the_memory_are_eagers(fn: Callable[..., torch.Tensor]) -> None:
    fast = compiled(fn)
    for rows in (4, 5):
        same(fast, fn, torch.randn(rows, 6))


def test_an_encoder_layer_drops_what_eager_drops() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    same(compiled(layer), layer, torch.randn(3, 5, 8), list(layer.parameters()))

"""Tensors without elements: what PyTorch makes of them, its errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.capture.running import check, same
from tests.libs import quick
from tvmcap.base.errors import CaptureError, InputError
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


FEW: dict[str, Callable[..., Any]] = {
    "all": lambda x: ((x > 0).all(), x.all(0), (x > 0).all(0, keepdim=True), x.all(1)),
    "any": lambda x: ((x > 0).any(), x.any(0), (x > 0).any((0, 1), keepdim=True), x.any(1)),
    "sums": lambda x: (x.sum(), x.sum(0, keepdim=True), x.long().sum(0), x.nansum()),
    "products": lambda x: (x.prod(), x.prod(0, keepdim=True), x.t() @ x),
    "means": lambda x: (x.mean(), x.mean(0, keepdim=True), x.var(0), x.std(), x.var(correction=0)),
    "logsumexp": lambda x: (x.logsumexp(0), x.logsumexp((0, 1)), x.logsumexp(0, keepdim=True)),
    "softmax": lambda x: (x.softmax(0), x.softmax(0).sum(0), x.log_softmax(0).sum()),
    "norms": lambda x: (x.norm(), torch.linalg.vector_norm(x, 3, dim=0), torch.count_nonzero(x)),
    "rows": lambda x: (x.amax(1), x.max(1), x.argmax(1), x.sort(0).values.sum(0)),
}


@pytest.mark.parametrize("name", FEW)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_reductions_over_a_dimension_that_may_be_empty(name: str) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    lib = quick(FEW[name], x, dynamic={"x": {0: "B"}})
    for rows in (x, x[:0], x[:1]):
        same(lib(rows), FEW[name](rows))


REFUSED: dict[str, tuple[Callable[..., Any], int]] = {
    "amax": (lambda x: x.amax(0), 1),
    "amin of all": (lambda x: x.amin(), 1),
    "max": (lambda x: x.max(), 1),
    "min and where": (lambda x: x.min(0), 1),
    "argmax": (lambda x: x.argmax(0), 1),
    "argmin of all": (lambda x: x.argmin(), 1),
    "median": (lambda x: x.median(0), 1),
    "aminmax": (lambda x: torch.aminmax(x, dim=0), 1),
    "flattened": (lambda x: x.flatten().amax(), 1),
    "norm": (lambda x: torch.linalg.vector_norm(x, float("inf")), 1),
    "topk": (lambda x: x.topk(2, 0).values, 2),
    "index": (lambda x: x[1] + x[0], 2),
    "index from the end": (lambda x: x[-1] * 2, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_pytorch_refuses(name: str) -> None:
    fn, least = REFUSED[name]
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    lib = quick(fn, x, dynamic={"x": {0: "B"}})
    same(lib(x[:least]), fn(x[:least]))
    with pytest.raises((RuntimeError, IndexError)):
        fn(x[: least - 1])
    with pytest.raises(InputError, match=f"B of at least {least}, got {least - 1}"):
        lib(x[: least - 1])


def test_a_slice_of_known_length_needs_so_many_elements() -> None:
    x = torch.randn(3, 5)
    lib = quick(lambda x: x[:2] * 2, x, dynamic={"x": {0: "B"}})
    same(lib(x[:2]), x[:2] * 2)
    with pytest.raises(InputError, match="B of at least 2, got 1"):
        lib(x[:1])


def test_any_of_negative_numbers() -> None:
    x = torch.tensor([[-1.0, 0.0], [float("nan"), -0.0]])
    same(quick(lambda x: (x.any(), x.any(0)), x)(x), (x.any(), x.any(0)))
    same(quick(lambda x: x.any(1), -x.long())(-x.long()), (-x.long()).any(1))

"""Rules of gradients against eager's own, on inputs with ties and windows that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tvmcap.capture.decompositions import for_training
from tvmcap.capture.gradients import gradients

_aten = torch.ops.aten
POOLS = {
    "plain": ((2, 3, 6, 8), ([2, 2], [], [0, 0], [1, 1], False)),
    "overlap": ((2, 3, 9, 7), ([3, 3], [1, 1], [0, 0], [1, 1], False)),
    "padding": ((2, 2, 7, 7), ([3, 2], [2, 1], [1, 1], [1, 1], False)),
    "dilation": ((1, 4, 11, 9), ([2, 3], [1, 2], [1, 1], [3, 2], False)),
    "ceil": ((2, 2, 8, 9), ([3, 3], [2, 2], [1, 1], [1, 1], True)),
    "one number": ((2, 2, 8, 9), ([3], [2], [1], [1], True)),
    "no batch": ((3, 7, 6), ([3, 3], [2, 2], [1, 1], [1, 1], False)),
}


def empty(shape: tuple[int, ...]) -> torch.Tensor:
    """Return values of which most are -inf, as padding is."""
    return torch.randn(shape).where(torch.rand(shape) < 0.1, float("-inf"))


DRAWS = {"ties": lambda shape: torch.randint(0, 3, shape).float(), "empty": empty}


@pytest.mark.parametrize("draw", [torch.randn, *DRAWS.values()], ids=["normal", *DRAWS])
@pytest.mark.parametrize("name", list(POOLS))
def test_max_pooling(name: str, draw: Any) -> None:
    shape, how = POOLS[name]
    x = draw(shape)
    value, indices = _aten.max_pool2d_with_indices(x, *how)
    grad = torch.randn(value.shape)
    wanted = _aten.max_pool2d_with_indices_backward(grad, x, *how, indices)
    rule = for_training()[_aten.max_pool2d_with_indices_backward.default]
    torch.testing.assert_close(rule(grad, x, *how, indices), wanted)
    ours, where = gradients()[_aten.max_pool2d_with_indices.default](x, *how)
    torch.testing.assert_close(ours, value, rtol=0, atol=0)
    assert torch.equal(where, indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_windows_that_share_a_place_add_up_in_float32(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 33, 33, dtype=dtype)
    x[0, 0, 16, 16] = 1  # in every window that reaches it, of 289
    how: Any = ([17, 17], [1, 1], [0, 0], [1, 1], False)
    value, indices = _aten.max_pool2d_with_indices(x, *how)
    grad = torch.rand(value.shape).to(dtype)
    rule = for_training()[_aten.max_pool2d_with_indices_backward.default]
    got = rule(grad, x, *how, indices)
    assert got.dtype == dtype
    exact = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    exact[0, 0, 16, 16] = grad.double().sum()
    torch.testing.assert_close(got, exact.to(dtype))

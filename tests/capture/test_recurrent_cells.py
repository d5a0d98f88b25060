"""Recurrent cells as a GPU has them: values as PyTorch's, gradients as autograd finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tvmcap.capture import cells
from tvmcap.capture.decompositions import for_inference, for_training


def drawn(gates: int, bias: bool, rows: int = 5, size: int = 7, width: int = 6) -> Any:
    """Return input, state, weights and biases of a cell."""
    weights = torch.randn(gates * size, width), torch.randn(gates * size, size)
    biases = [torch.randn(gates * size).requires_grad_() if bias else None for _ in range(2)]
    return torch.randn(rows, width), torch.randn(rows, size), *weights, *biases


def gradients(results: Any, given: Any, tangents: Any) -> list[torch.Tensor]:
    wanted = [t for t in given if t is not None]
    used = [(y, t) for y, t in zip(results, tangents, strict=True) if t is not None]
    ys, ts = zip(*used, strict=True)
    return list(torch.autograd.grad(ys, wanted, ts))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("missing", [None, 0, 1])
def test_lstm(bias: bool, missing: int | None) -> None:
    x, h, w, u, p, q = drawn(4, bias)
    c = torch.randn_like(h).requires_grad_()
    a, b = (x @ w.T).requires_grad_(), (h @ u.T).requires_grad_()
    *state, workspace = cells.lstm_cell(a, b, c, p, q)
    torch.testing.assert_close(tuple(state), torch.lstm_cell(x, (h, c), w, u, p, q))
    tangents: Any = [torch.randn_like(h), torch.randn_like(h)]
    if missing is not None:
        tangents[missing] = None
    found = cells.lstm_cell_backward(*tangents, c, state[1], workspace, bias)
    wanted = gradients(state, (a, b, c, p, q), tangents)
    gates, cell, of_bias = found
    ours = [gates, gates, cell, *([of_bias] * 2 if bias else [])]
    torch.testing.assert_close(ours, wanted)


def test_a_cell_without_tangents_has_no_gradient() -> None:
    assert cells.lstm_cell_backward(None, None, *[torch.zeros(2, 3)] * 3, True) == (None,) * 3


@pytest.mark.parametrize("bias", [True, False])
def test_gru(bias: bool) -> None:
    x, h, w, u, p, q = drawn(3, bias)
    h.requires_grad_()
    a, b = (x @ w.T).requires_grad_(), (h @ u.T).detach().requires_grad_()
    state, workspace = cells.gru_cell(a, b, h, p, q)
    torch.testing.assert_close(state, torch.gru_cell(x, h, w, u, p, q))
    tangent = torch.randn_like(h)
    found = cells.gru_cell_backward(tangent, workspace, bias)
    ours = [t for t in found if t is not None]
    torch.testing.assert_close(ours, gradients([state], (a, b, h, p, q), [tangent]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_computed_in_float32(dtype: torch.dtype) -> None:
    narrow = [torch.randn(4, 12).to(dtype), torch.randn(4, 12).to(dtype), torch.randn(4, 3)]
    narrow[2] = narrow[2].to(dtype)
    exact = cells.lstm_cell(*(t.double() for t in narrow))
    for ours, wide in zip(cells.lstm_cell(*narrow), exact, strict=True):
        assert ours.dtype == dtype
        limit = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), wide, rtol=limit, atol=limit)


def test_every_trace_has_them() -> None:
    for table in (for_training(), for_inference()):
        assert cells.cells().items() <= table.items()

"""Recurrent cells as a GPU computes them: there ``lstm_cell`` and ``gru_cell`` become one operator.

It takes the products of input and state with their weights (gates of all kinds next to each other)
and gives the new state with a workspace for the gradient. On a CPU PyTorch writes them out itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _total(*tensors: torch.Tensor | None) -> torch.Tensor:
    first, *rest = [_wide(t) for t in tensors if t is not None]
    return sum(rest, first)


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write ``aten._thnn_fused_lstm_cell``.

    Parameters
    ----------
    input_gates, hidden_gates: shape (n, 4 h): in, forget, cell, out; biases: (4 h,); cx: (n, h).

    Returns
    -------
    New state and cell state, (n, h), and the four gates, (n, 4 h).
    """
    dtype = cx.dtype
    i, f, g, o = _total(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * _wide(cx) + i * g
    gates = torch.cat([i, f, g, o], 1)
    return (o * cell.tanh()).to(dtype), cell.to(dtype), gates.to(dtype)


def lstm_cell_backward(
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Write ``aten._thnn_fused_lstm_cell_backward_impl``.

    Returns
    -------
    Gradients of the gates before their functions, (n, 4 h), of cx, and of a bias, or None.
    """
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = _wide(gates).chunk(4, 1)
    t = _wide(cy).tanh()
    dh = _wide(torch.zeros_like(cy) if grad_hy is None else grad_hy)
    cell = _total(dh * o * (1 - t * t), grad_cy)
    parts = cell * g * i * (1 - i), cell * _wide(cx) * f * (1 - f), cell * i * (1 - g * g)
    grad = torch.cat([*parts, dh * t * o * (1 - o)], 1)
    bias = grad.sum(0).to(gates.dtype) if has_bias else None
    return grad.to(gates.dtype), (cell * f).to(cx.dtype), bias


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write ``aten._thnn_fused_gru_cell``.

    Parameters
    ----------
    input_gates, hidden_gates: shape (n, 3 h): reset, update, new; biases: (3 h,); hx: (n, h).

    Returns
    -------
    New state, (n, h), and, (n, 5 h), the three gates, hx, and the state's part of the new gate.
    """
    dtype = hx.dtype
    h = _wide(hx)
    ar, az, an = _total(input_gates, input_bias).chunk(3, 1)
    br, bz, bn = _total(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return (n + z * (h - n)).to(dtype), torch.cat([r, z, n, h, bn], 1).to(dtype)


def gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Write ``aten._thnn_fused_gru_cell_backward``.

    Returns
    -------
    Gradients of input_gates and hidden_gates, (n, 3 h), of hx, and of the biases, or None.
    """
    dtype = workspace.dtype
    d = _wide(grad_hy)
    r, z, n, h, bn = _wide(workspace).chunk(5, 1)
    new = d * (1 - z) * (1 - n * n)
    reset, update = new * bn * r * (1 - r), d * (h - n) * z * (1 - z)
    own, state = torch.cat([reset, update, new], 1), torch.cat([reset, update, new * r], 1)
    biases = [t.sum(0).to(dtype) if has_bias else None for t in (own, state)]
    return own.to(dtype), state.to(dtype), (d * z).to(dtype), biases[0], biases[1]


def cells() -> dict[Any, Callable[..., Any]]:
    """List them by operator."""
    return {
        _aten._thnn_fused_lstm_cell.default: lstm_cell,
        _aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
        _aten._thnn_fused_gru_cell.default: gru_cell,
        _aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    }

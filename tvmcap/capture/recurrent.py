"""Recurrent layers while they are traced: PyTorch's own rules for that forget their dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Layers(TorchFunctionMode):  # type: ignore[misc]
    """Traces recurrent layers as operators with a lowering, and dropout between them as eager has.

    On a CPU the operator of a layer whose input needs no gradient would be oneDNN's. That is off
    for these calls alone: what convolutions require of sizes depends on it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a call, which sees no mode; one of a stack of layers that drops, layer by layer."""
        if getattr(func, "__name__", "") not in _NAMES:
            return func(*args, **(kwargs or {}))
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False
        try:
            if not kwargs and len(args) == 9 and _drops(*args[2:7]):
                return _in_turn(func, *args)
            return func(*args, **(kwargs or {}))
        finally:
            torch.backends.mkldnn.enabled = before


def _drops(weights: Any, has_biases: bool, layers: int, dropout: float, train: bool) -> bool:
    """Whether these are the arguments of a stack with dropout, and not of a packed sequence."""
    return isinstance(weights, tuple | list) and layers > 1 and dropout > 0 and train


def _in_turn(
    func: Any,
    x: torch.Tensor,
    state: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Return what ``func`` (``torch.lstm``, ``torch.gru``, ...) does: the result and last states.

    ``x`` has the shape (steps, batch, features), or (batch, steps, features) where ``batch_first``;
    each state (layers, or twice as many where ``bidirectional``, batch, hidden).
    """
    count, ways = len(weights) // layers, 2 if bidirectional else 1
    is_pair = not isinstance(state, torch.Tensor)
    x = x.transpose(0, 1) if batch_first else x
    ends: list[Sequence[torch.Tensor]] = []
    for i in range(layers):
        part = slice(i * ways, (i + 1) * ways)
        first = [s[part] for s in state] if is_pair else state[part]
        own = weights[i * count : (i + 1) * count]
        x, *last = func(x, first, own, has_biases, 1, 0.0, train, bidirectional, False)
        ends.append(last)
        x = torch.dropout(x, dropout, True) if i < layers - 1 else x
    found = [torch.cat(parts) for parts in zip(*ends, strict=True)]
    return x.transpose(0, 1) if batch_first else x, *found

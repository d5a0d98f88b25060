"""Recurrent layers while they are traced: PyTorch's own rules for that forget their dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Trace recurrent layers one by one, with dropout between them, as operators with a lowering.

    On a CPU the operator of a layer whose input needs no gradient would be oneDNN's, which has
    none.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        with _Layers():
            yield
    finally:
        torch.backends.mkldnn.enabled = before


class _Layers(TorchFunctionMode):  # type: ignore[misc]
    """Calls each layer of a stack with dropout on its own."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a call, which sees no mode; one of a stack of layers that drops, layer by layer."""
        if getattr(func, "__name__", "") in _NAMES and not kwargs and len(args) == 9:
            weights, (layers, dropout, train) = args[2], args[4:7]
            is_padded = isinstance(weights, tuple | list)  # else a packed sequence
            if is_padded and layers > 1 and dropout > 0 and train:
                return _in_turn(func, *args)
        return func(*args, **(kwargs or {}))


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

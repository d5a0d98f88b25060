"""Stacks of recurrent layers, traced one by one, drop what eager drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvmcap
from tvmcap.capture import recurrent


def states(found: Any) -> list[torch.Tensor]:
    y, last = found
    return [y, *(last if isinstance(last, tuple) else [last])]


def results(layers: Any, parameters: Any, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    found = states(layers(x))
    loss = torch.stack([t.square().sum() for t in found]).sum()
    return [*found, *torch.autograd.grad(loss, list(parameters)), torch.rand(2)]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (nn.LSTM, {"bidirectional": True, "bias": False}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.RNN, {}),
    ],
)
def test_one_by_one_they_are_what_they_are_together(
    cls: Any, options: dict[str, Any], batch_first: bool
) -> None:
    torch.manual_seed(1)
    layers = cls(4, 3, 3, dropout=0.5, batch_first=batch_first, **options)
    x = torch.randn(2, 5, 4)
    wanted = results(layers, layers.parameters(), x)
    with recurrent.Layers():
        found = results(layers, layers.parameters(), x)
    torch.testing.assert_close(found, wanted)


def test_gradients_of_layers_whose_input_needs_none(tmp_path: Path) -> None:
    torch.manual_seed(2)
    layers, x = nn.LSTM(3, 2, 2, dropout=0.5, bidirectional=True), torch.randn(2, 3, 3)
    options: dict[str, Any] = {"tune": "none", "verify": False, "cache_dir": str(tmp_path)}
    lib = tvmcap.build(layers, (x,), backward=True, target="llvm", **options)
    wanted = results(layers, layers.parameters(), x)
    torch.testing.assert_close(results(lib, layers.parameters(), x), wanted)

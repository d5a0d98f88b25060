"""Eager's operators and bytes, views left out, weights apart."""

import torch
from torch import nn

from tvmcap.view.eager import count_eager, parameters


def test_block_is_three_kernels_and_views_are_free():
    x, w, b = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32)
    traffic = count_eager(
        lambda: nn.functional.gelu((x @ w + b).view(8, 4, 8).transpose(0, 1)), [w, b]
    )
    assert [k.name for k in traffic.kernels] == ["mm", "add", "gelu"]
    y = 8 * 32 * 4
    assert traffic.activations == 8 * 16 * 4 + 5 * y
    assert traffic.weight_reads == (16 * 32 + 32) * 4
    assert traffic.outputs == y and traffic.ratio == traffic.activations / y


def test_parameters_of_a_module_are_weights():
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    traffic = count_eager(lambda: module(torch.randn(4, 16)), parameters(module))
    assert [k.name for k in traffic.kernels] == ["randn", "addmm", "relu"]
    assert traffic.weight_reads == (16 * 32 + 32) * 4
    assert parameters(lambda x: x) == []


def test_in_place_operators_count():
    x = torch.ones(10)
    traffic = count_eager(lambda: x.add_(1))
    assert [k.name for k in traffic.kernels] == ["add_"] and traffic.activations == 80

"""Elementwise work on the matrices of products: what is rewritten computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from tests.capture.test_autograd import joint, run
from tvmcap.capture.flattening import flatten


def ranks(graph: fx.GraphModule, name: str) -> set[int]:
    """Ranks of the results of an operator."""
    found = [n for n in graph.graph.nodes if n.op == "call_function"]
    return {n.meta["val"].dim() for n in found if n.target.__name__.startswith(name)}


def _residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + F.linear(x, w)) * w[0]


def _normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.linear(x, w).tanh(), (8,)) + x[:, :1]


def _scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w) * x.sum((0, 1)) / x.amax()


def _merged(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.tanh().view(3, 40) @ torch.cat([w] * 5)).sigmoid().view(3, 2, 4)


@pytest.mark.parametrize("fn", [_residual, _normed, _scaled, _merged])
def test_the_graph_computes_the_same(fn: Callable[..., torch.Tensor]) -> None:
    x, w = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    graph = joint(fn, x, w).graph
    shapes = [n.meta["val"].shape for n in graph.graph.nodes if n.op == "placeholder"]
    values = [torch.randn(shape) for shape in shapes]
    before = run(graph, *values)
    flatten(graph.graph)
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"] is not None
    for ours, expected in zip(run(graph, *values), before, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_work_between_two_products_is_on_matrices() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    x = torch.randn(3, 5, 8, requires_grad=True)
    graph = joint(module, x, dynamic={0: {0: "B"}}).graph
    assert ranks(graph, "tanh") == {3}
    flatten(graph.graph)
    assert ranks(graph, "tanh") == {2}


def test_work_that_no_product_makes_is_left_alone() -> None:
    graph = joint(lambda x: x.tanh().sum(), torch.randn(3, 5, 8, requires_grad=True)).graph
    text = str(graph.graph)
    flatten(graph.graph)
    assert str(graph.graph) == text

"""Graphs of AOTAutograd to callables, as a backend of torch.compile uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import tvmcap
from tvmcap.base.config import Config
from tvmcap.capture.decompositions import for_training
from tvmcap.capture.partition import Pair, partition
from tvmcap.graph_library import compile_graph, compile_pair

CONFIG = Config(target="llvm", tune="none")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def backend(compiled: list[Any]) -> Any:
    def compile_one(graph: Any, example: Any) -> Any:
        compiled.append(compile_graph(graph, CONFIG))
        return compiled[-1]

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        pair = partition(joint, num_fwd_outputs, 1.0)
        return pair.forward, pair.backward

    return aot_autograd(
        fw_compiler=compile_one,
        bw_compiler=compile_one,
        partition_fn=cut,
        decompositions=for_training(),
    )


def test_every_batch_goes_through_one_forward_and_one_backward_graph() -> None:
    compiled: list[Any] = []
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = torch.compile(module, backend=backend(compiled), dynamic=True)
    for batch in (5, 9, 33):
        x = torch.randn(batch, 8, requires_grad=True)
        wanted = [x, *module.parameters()]
        ours = torch.autograd.grad(fast(x).pow(2).sum(), wanted)
        for a, b in zip(ours, torch.autograd.grad(module(x).pow(2).sum(), wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(compiled) == 2


def test_a_size_that_only_a_number_tells() -> None:
    compiled: list[Any] = []
    fast = torch.compile(lambda x: x.sum() * 2, backend=backend(compiled), dynamic=True)
    x = torch.randn(7, 3, requires_grad=True)
    fast(x).backward()
    torch.testing.assert_close(x.grad, torch.full((7, 3), 2.0))


def test_inputs_come_back_as_they_are_and_the_cache_serves_the_graph_again() -> None:
    from tests.capture.test_autograd import cut

    traced, pair = cut(lambda x: x * x, torch.randn(4, requires_grad=True))
    forward, backward = compile_pair(Pair(pair.forward, pair.backward), CONFIG)
    x = torch.randn(4)
    y, saved = forward(x)
    assert saved is x
    torch.testing.assert_close(y, x * x)
    (gradient,) = backward(saved, torch.ones(4))
    torch.testing.assert_close(gradient, 2 * x)
    again = compile_graph(pair.forward, CONFIG)
    assert again.executor.path == forward.executor.path
    assert traced.grads == (0,)


def test_the_library_of_a_graph_says_what_it_holds_as_that_of_a_function_does() -> None:
    from tests.capture.test_autograd import cut

    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    _, pair = cut(module, torch.randn(5, 8))
    own = compile_graph(pair.forward, CONFIG).executor.manifest
    args = (torch.randn(5, 8),)
    whole = tvmcap.build(module, args, backward=True, target="llvm", tune="none", verify=False)
    assert own.training is None and own.kernels is not None and own.arena is not None
    assert whole.manifest.kernels is None and set(whole.manifest.training.kernels) == {
        "forward",
        "backward",
    }
    rows = whole.manifest.training.kernels["forward"]["kernels"]
    assert len(own.kernels["kernels"]) == own.kernels_per_call == len(rows)
    assert own.arena == whole.manifest.training.forward.arena
    assert own.peak_bytes <= whole.manifest.peak_bytes
    named = {task["task"] for task in own.coverage}
    assert named == {row["name"] for row in own.kernels["kernels"]}

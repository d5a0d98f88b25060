"""How many kernels a quantized product is, by what makes its input and how that is scaled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.libs import values
from tvmcap import pipeline
from tvmcap.base import codegen
from tvmcap.base.config import make_config
from tvmcap.capture.export import capture
from tvmcap.graph.layers import layers
from tvmcap.graph.quantize import Plan, quantize

K, N = 128, 64
TARGETS = {"llvm": "llvm", "hopper": {"kind": "cuda", "arch": "sm_90a"}}
TOKEN, STATIC = Plan("int8"), Plan("int8", clip=3.0)


class Layer(nn.Module):
    """A product of what ``before`` makes of the arguments."""

    def __init__(self, before, k=K):
        super().__init__()
        self.before, self.up = before, nn.Linear(k, N)

    def forward(self, *args):
        return self.up(self.before(*args))


def kernels(captured, config, plan) -> int:
    """Count the kernels of a model whose products are all quantized."""

    def in_8_bits(mod):
        found = layers(mod, lambda weight: [])
        return quantize(mod, {layer.name: plan for layer in found} if plan else {}, found)

    goal, trace = codegen.make_target(config.target), pipeline.Trace()
    front = pipeline.front(goal, quantize=in_8_bits)
    steps = [*front, *pipeline.back(goal, lambda task: [], trace)]
    return pipeline.count_kernels(pipeline.run(captured.mod, steps, goal, config, trace))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("before", "shape", "by_row", "static"),
    [
        (nn.Identity(), (8, K), 1, 1),
        (nn.Flatten(), (8, 4, K // 4), 1, 1),
        (nn.RMSNorm(K), (8, K), 0, 0),
        (nn.GELU(), (8, K), 0, 0),
        (nn.Linear(K, K), (8, K), 1, 0),
        (lambda x: x.mean(1), (8, 3, K), 1, 0),
        (lambda x: x.transpose(1, 2), (8, K, 6), 2, 1),
        (lambda x: x.relu().transpose(1, 2).reshape(-1, K), (8, K // 4, 4), 1, 0),
    ],
    ids=["argument", "view", "norm", "elementwise", "product", "mean", "transposed", "heads"],
)
def test_kernels_that_a_quantized_product_takes_besides(
    before, shape, by_row, static, target
) -> None:
    torch.manual_seed(0)
    config = make_config(target=TARGETS[target], tune="none", dynamic={0: {0: "B"}})
    captured = capture(Layer(before).eval(), (values(*shape),), None, config)
    if isinstance(before, nn.Linear):  # its own input is an argument
        by_row, static = by_row + 1, static + 1
    whole = kernels(captured, config, None)
    assert kernels(captured, config, TOKEN) - whole == by_row
    assert kernels(captured, config, STATIC) - whole == static

"""Quantized libraries against torchao: same model, weights and inputs, at the same scheme."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.quantizing import build, data, sqnr_db

SLACK_DB = 0.5


def ao():
    """Return torchao, which a GPU's host may lack; without it the tests of the CPU fail."""
    import torchao.quantization

    return torchao.quantization


QUIET = {"set_inductor_config": False}  # it would change settings of the whole process


class Float8Linear(nn.Module):
    """A linear of torchao's e4m3 tensors, one scale a row of each, multiplied in float32.

    torchao's own dynamic float8 linear refuses CPUs.
    """

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = ao().Float8Tensor.from_hp(linear.weight.data), linear.bias

    def forward(self, x):
        x8 = ao().Float8Tensor.from_hp(x)
        return nn.functional.linear(x8.dequantize(), self.weight.dequantize(), self.bias)


class Net(nn.Module):
    """Two products, the rows of whose weights differ in size: one scale for all would be rough."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.head = nn.Linear(256, 512), nn.Linear(512, 192)
        with torch.no_grad():
            for linear in (self.up, self.head):
                linear.weight *= torch.logspace(-0.5, 0.5, linear.out_features)[:, None]

    def forward(self, x):
        return self.head(nn.functional.gelu(self.up(x), approximate="tanh"))


def float8_on_cpu(model):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, Float8Linear(child))


SCHEMES = {
    "int8": lambda m: ao().quantize_(m, ao().Int8DynamicActivationInt8WeightConfig(**QUIET)),
    "int8-weight-only": lambda m: ao().quantize_(m, ao().Int8WeightOnlyConfig(**QUIET)),
    "fp8": float8_on_cpu,
    "fp8-weight-only": lambda m: ao().quantize_(m, ao().Float8WeightOnlyConfig(**QUIET)),
}


def both(scheme, theirs, dtype, target, tmp_path):
    """Return what our library and torchao's model keep of the float64 result, in dB."""
    model, device = Net().eval(), "cuda" if target == "cuda" else "cpu"
    x = data(192, 256, seed=11)
    x *= torch.logspace(-0.5, 0.5, len(x))[:, None]  # so do the rows of activations
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
        model, x = model.to(dtype), x.to(dtype)
        lib = build(model, x, tmp_path, target=target, quantize=scheme, dynamic=None)
        other = copy.deepcopy(model).to(device)
        theirs(other)
        held = {type(m.weight).__name__ for m in (other.up, other.head)}
        assert held <= {"Int8Tensor", "Float8Tensor"}, "torchao left a layer as it was"
        return sqnr_db(want, lib(x.to(device))), sqnr_db(want, other(x.to(device)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_accurate_as_torchao_at_the_same_scheme(scheme, tmp_path) -> None:
    ours, torchao = both(scheme, SCHEMES[scheme], torch.float32, "llvm", tmp_path)
    assert torchao >= 20, "torchao's own result is no measure"
    assert ours >= torchao - SLACK_DB


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_as_accurate_as_torchao_on_a_gpu(scheme, tmp_path) -> None:
    pytest.importorskip("torchao", reason="needs torchao, of the dev extra")
    if scheme == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs sm_89")
    theirs = {
        "int8": SCHEMES["int8"],
        "fp8": lambda m: ao().quantize_(
            m, ao().Float8DynamicActivationFloat8WeightConfig(granularity=ao().PerRow(), **QUIET)
        ),
    }
    ours, torchao = both(scheme, theirs[scheme], torch.bfloat16, "cuda", tmp_path)
    assert ours >= torchao - SLACK_DB

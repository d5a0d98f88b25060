"""What cannot be quantized is refused with words that say what to do; at the limit it works."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from tests.quantizing import build, data
from tvmcap.base.errors import AccuracyError, ConfigError, QuantizeError
from tvmcap.base.quantization import MAX_K


class Linear(nn.Module):
    """One product, with a name."""

    def __init__(self, k=48, n=16):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(k, n, bias=False)

    def forward(self, x):
        return self.up(x)


def test_sums_that_int32_cannot_hold(tmp_path) -> None:
    model, x = Linear(MAX_K + 1, 1), torch.zeros(2, MAX_K + 1)
    with pytest.raises(QuantizeError, match=rf"'up.weight' sums {MAX_K + 1} .* keep=\('up.weight'"):
        build(model, x, tmp_path, quantize="int8")


def test_the_longest_sum_is_exact(tmp_path) -> None:
    """Its partial sums wrap on CPUs, where inputs are stored 128 up, and wrap back."""
    model = Linear(MAX_K, 2)
    with torch.no_grad():
        model.up.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, MAX_K))
    x = torch.ones(3, MAX_K) * torch.tensor([[1.0], [-2.0], [0.5]])
    lib = build(model, x, tmp_path, quantize="int8")
    want = MAX_K * torch.tensor([[1.0, -1.0], [-2.0, 2.0], [0.5, -0.5]])
    torch.testing.assert_close(lib(x), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_no_scale_covers(value, tmp_path) -> None:
    model = Linear()
    with torch.no_grad():
        model.up.weight[3, 5] = value
    with pytest.raises(QuantizeError, match=r"'up.weight' holds NaN or Inf.*keep="):
        build(model, data(8, 48, seed=3), tmp_path, quantize="int8")


def test_inputs_that_measure_nothing(tmp_path) -> None:
    x = data(8, 48, seed=3)
    with pytest.raises(QuantizeError, match=r"output 'out0' .* NaN or Inf everywhere .* held out"):
        build(Linear(), x, tmp_path, quantize="int8", calibration=[x, x * float("nan")])


def test_calibration_without_inputs(tmp_path) -> None:
    static = {"activations": "static"}
    for nothing in ([], iter(())):
        with pytest.raises(ConfigError, match="there are no inputs in it"):
            build(Linear(), data(8, 48, seed=3), tmp_path, quantize=static, calibration=nothing)


def test_constant_activations(tmp_path) -> None:
    x = torch.full((8, 48), 0.25)
    static = {"activations": "static"}
    with pytest.raises(QuantizeError, match=r"'up.weight' is 0.25 everywhere .*real inputs"):
        build(Linear(), x, tmp_path, quantize=static, calibration=[x, x])


def test_a_scheme_that_the_gpu_lacks(tmp_path) -> None:
    with pytest.raises(QuantizeError, match="sm_80 has no e4m3, which starts at sm_89; use 'int8'"):
        build(Linear(), data(8, 48, seed=3), tmp_path, quantize="fp8", target="cuda:sm_80")


def test_a_missed_budget_carries_its_report(tmp_path) -> None:
    with pytest.raises(AccuracyError, match="OUTSIDE the budget of 70 dB") as caught:
        build(Linear(), data(8, 48, seed=3), tmp_path, quantize={"budget_db": 70})
    assert "up.weight" in str(caught.value) and "keep=" in str(caught.value)
    report = pickle.loads(pickle.dumps(caught.value)).report
    assert not report.ok and report.layers[0].name == "up.weight"
    assert report.layers[0].sqnr_db < 70 and report.library_after is None

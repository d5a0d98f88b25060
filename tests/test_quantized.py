"""Quantized builds: accuracy by figure, size, what calibration reproduces, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from tvm import relax

import tvmcap
from tests.quantizing import build, data, sqnr_db
from tvmcap.base.errors import AccuracyError, QuantizeError
from tvmcap.base.quantization import MAX_K
from tvmcap.graph.layers import Layer
from tvmcap.verify.plans import check_target, choose

K, N = 4096, 64
OUTLIERS = [3, 77, 500, 1024, 2000, 4000]


class Block(nn.Module):
    """A linear with the tanh form of GELU; weights normal, so that sums are about 1."""

    def __init__(self, k=K, n=N):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(k, n)
        nn.init.normal_(self.up.weight, std=k**-0.5)

    def forward(self, x):
        return nn.functional.gelu(self.up(x), approximate="tanh")


class Model(nn.Module):
    """Three layers, two of them reading one norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(48)
        self.up, self.gate, self.head = nn.Linear(48, 80), nn.Linear(48, 80), nn.Linear(80, 16)

    def forward(self, x):
        h = self.norm(x)
        return self.head(nn.functional.silu(self.gate(h)) * self.up(h))


def rough(rows, seed):
    """Return inputs of ``Block`` whose channels differ in size."""
    x = data(rows, K, seed=seed)
    x[:, OUTLIERS] *= 40
    return x


def kept_db(model, lib, x):
    """Return what a library keeps of the float64 result, in dB."""
    with torch.no_grad():
        want = model.double()(x.double())
    model.float()
    return sqnr_db(want, lib(x))


def samples(count, rows, k):
    return [data(rows, k, seed=100 + i) for i in range(count)]


def test_gaussian_data_keeps_37_db_and_a_quarter_of_the_bytes(tmp_path) -> None:
    model, x = Block(), data(64, K, seed=0)
    lib = build(model, x, tmp_path, quantize="int8", verify=True)
    assert kept_db(model, lib, data(50, K, seed=1)) >= 37
    (out,), (up,) = lib.accuracy.outputs, lib.accuracy.layers
    assert out.sqnr_db >= 37 and out.cosine >= 0.9997 and up.saturation == 0
    assert (up.name, up.scheme) == ("up.weight", "int8")
    assert up.bytes_after <= 0.27 * up.bytes_before
    score = lib.scoreboard(baselines=False)
    assert score.kernels == 2 and score.weight_bytes <= 0.27 * 4 * (K * N + N)
    assert lib.manifest.verified
    served = {task["served_by"] for task in lib.manifest.coverage}
    assert "template:cpu_gemm" in served
    assert "up.weight" in lib.explain() and "SQNR dB" in lib.explain()


def test_outlier_channels_keep_33_db_with_smoothing_alone(tmp_path) -> None:
    model, x = Block(), rough(64, 0)
    plain = build(model, x, tmp_path, quantize="int8")
    assert kept_db(model, plain, x) < 25
    lib = build(
        model,
        x,
        tmp_path,
        quantize={"smooth": 0.5},
        calibration=[rough(48, 100 + i) for i in range(4)],
    )
    assert kept_db(model, lib, rough(50, 1)) >= 33
    assert lib.accuracy.outputs[0].cosine >= 0.9997


@pytest.mark.parametrize(
    ("quantize", "least"),
    [
        ("int8-weight-only", 40),
        ({"activations": "static", "method": "mse"}, 30),
        ({"scheme": "fp8", "activations": "static"}, 23),
    ],
    ids=str,
)
def test_every_scheme_is_as_accurate_as_its_bits(quantize, least, tmp_path) -> None:
    model, x = Block(48), data(24, 48, seed=0)
    calibration = samples(4, 64, 48) if isinstance(quantize, dict) else None
    lib = build(model, x, tmp_path, quantize=quantize, calibration=calibration)
    for rows in (1, 7, 130):
        assert kept_db(model, lib, data(rows, 48, seed=rows)) >= least - 2
    assert lib.accuracy.outputs[0].sqnr_db >= least


def test_half_precision_models_keep_their_dtype(tmp_path) -> None:
    model, x = Block(1024).to(torch.bfloat16), data(24, 1024, seed=0).bfloat16()
    lib = build(model, x, tmp_path, quantize="int8")
    assert lib(x).dtype == torch.bfloat16 and lib.accuracy.ok
    assert lib.accuracy.bytes_after <= 0.53 * lib.accuracy.bytes_before
    score = lib.scoreboard(baselines=False)
    assert score.weight_bytes <= 0.53 * 2 * (1024 * N + N)


def test_saved_ranges_give_the_same_library(tmp_path) -> None:
    model, x = Block(48), data(24, 48, seed=0)
    options = {"quantize": {"activations": "static", "smooth": 0.5, "method": "percentile"}}
    options["dynamic"] = None
    lib = build(model, x, tmp_path, **options, calibration=samples(4, 24, 48), verify=True)
    assert lib.manifest.verified  # on values like these, and not on larger ones
    path = lib.ranges.save(tmp_path / "ranges.json")
    assert path.stat().st_size < 8192
    again = build(model, x, tmp_path, **options, calibration=path)
    assert torch.equal(lib(x), again(x)) and again.ranges == lib.ranges
    loaded = tvmcap.load(lib.export(tmp_path / "model.so"))
    assert loaded.ranges == lib.ranges and loaded.accuracy == lib.accuracy
    assert torch.equal(loaded(x), lib(x))


def test_layers_stay_out_by_name_and_where_auto_has_to() -> None:
    weight = relax.const(np.ones((48, 2), np.float32))
    found = [Layer(f"{name}.weight", None, None, weight) for name in ("up", "gate", "head")]
    chosen = choose(found, tvmcap.Quantize(keep=("head", "g*")))
    assert [x.name for x in chosen] == ["up.weight"]
    wide = Layer("wide", None, None, relax.const(np.ones((MAX_K + 1, 1), np.float16)))
    with pytest.raises(QuantizeError, match=f"'wide' sums {MAX_K + 1} products .* at most {MAX_K}"):
        choose([*found, wide], tvmcap.Quantize())
    assert choose([*found, wide], tvmcap.Quantize(auto=True)) == found
    assert choose([wide], tvmcap.Quantize(scheme="int8-weight-only")) == [wide]


class Rough(nn.Module):
    """A layer that int8 spoils, for one channel is a thousand times the others, and one it suits.

    That channel's weights are small, so that the others decide the result.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 16)
        with torch.no_grad():
            self.first.weight[:, 0] *= 1e-4

    def forward(self, x):
        factor = torch.ones(64)
        factor[0] = 1000.0
        return self.second(torch.relu(self.first(x * factor)))


def test_the_example_that_is_measured_on_is_part_of_the_build(tmp_path) -> None:
    """The compile cache does not answer with a report of other values, nor skip the budget."""
    model, x = Block(48), data(24, 48, seed=0)
    rough = x.clone()
    rough[:, 3] *= 1000
    with torch.no_grad():
        model.up.weight[:, 3] *= 1e-4  # the others decide the result
    limited = {"quantize": {"budget_db": 28}, "dynamic": None}
    lib = build(model, x, tmp_path, **limited)
    assert build(model, x.clone(), tmp_path, **limited).from_cache
    with pytest.raises(AccuracyError, match="OUTSIDE the budget of 28 dB"):
        build(model, rough, tmp_path, **limited)
    assert lib.accuracy.outputs[0].sqnr_db >= 28
    held = {"quantize": "int8", "calibration": samples(2, 24, 48), "dynamic": None}
    assert not build(model, x, tmp_path, **held).from_cache
    assert build(model, rough, tmp_path, **held).from_cache  # not measured on the example


def test_auto_keeps_out_what_misses_the_budget(tmp_path) -> None:
    model, x = Rough(), data(24, 64, seed=0)
    options = {"quantize": {"scheme": "int8", "budget_db": 28, "auto": True}, "dynamic": None}
    lib = build(model, x, tmp_path, **options)
    held = {a.name: a.scheme for a in lib.accuracy.layers}
    assert held == {"first.weight": "kept", "second.weight": "int8"}
    assert lib.ranges.kept == ("first.weight",) and kept_db(model, lib, x) >= 28
    again = build(model, x, tmp_path, **options, calibration=lib.ranges)
    assert torch.equal(again(x), lib(x))


def test_calibration_that_is_missing_or_does_not_fit(tmp_path) -> None:
    model, x = Block(48), data(24, 48, seed=0)
    static = {"activations": "static"}
    with pytest.raises(QuantizeError, match="needs inputs to calibrate on: pass calibration="):
        build(model, x, tmp_path, quantize=static)
    with pytest.raises(QuantizeError, match="smooth= needs inputs"):
        build(model, x, tmp_path, quantize={"smooth": 0.5})
    with pytest.raises(QuantizeError, match="calibration input 1: x: expected float32"):
        bad = [x, x.double()]
        build(model, x, tmp_path, quantize=static, calibration=bad)
    with pytest.raises(QuantizeError, match=r"NaN or Inf in the input of layer '\w+\.weight'"):
        build(model, x, tmp_path, quantize=static, calibration=[x * np.nan, x])
    with pytest.raises(QuantizeError, match="is 0 everywhere"):
        build(model, x, tmp_path, quantize=static, calibration=[x * 0, x])
    with pytest.raises(QuantizeError, match="static clips for no such scheme"):
        build(model, x, tmp_path, quantize=static, calibration=tvmcap.Ranges())


def test_models_and_layers_that_cannot_be_quantized(tmp_path) -> None:
    x = data(4, 48, seed=0)
    with pytest.raises(QuantizeError, match="nothing to quantize: this model has no product"):
        build(nn.GELU(), x, tmp_path, quantize="int8")
    with pytest.raises(QuantizeError, match=r"names every layer: up\.weight"):
        build(Block(48), x, tmp_path, quantize={"keep": "*"})
    with pytest.raises(QuantizeError, match=r"keep='down' names no layer; layers: up\.weight"):
        build(Block(48), x, tmp_path, quantize={"keep": ("down",)})


def test_a_scheme_that_the_target_lacks() -> None:
    target = tvmcap.base.codegen.make_target({"kind": "cuda", "arch": "sm_80"})
    with pytest.raises(QuantizeError, match="sm_80 has no e4m3"):
        check_target(tvmcap.Quantize(scheme="fp8"), target)
    check_target(tvmcap.Quantize(), target)


def test_arguments_are_quantized_where_they_are_constant(tmp_path) -> None:
    def product(x, w):
        return x @ w

    x, w = data(8, 48, seed=0), data(48, 20, seed=1)
    with pytest.raises(QuantizeError, match="constants="):
        tvmcap.build(product, (x, w), target="llvm", quantize="int8", cache_dir=str(tmp_path))
    lib = tvmcap.build(
        product,
        (x, w),
        target="llvm",
        quantize="int8",
        constants=("w",),
        cache_dir=str(tmp_path),
    )
    assert lib.accuracy.layers[0].name == "w" and lib.accuracy.ok


class Deep(nn.Module):
    """Two products of one width: what quantizes the second's input must not join the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.b(self.a(x))


def test_products_keep_their_kernel_and_non_finite_rows_stay(tmp_path) -> None:
    model, x = Deep(), data(8, 64, seed=0)
    lib = build(model, x, tmp_path, quantize="int8")
    calls = {t["served_by"]: t["calls"] for t in lib.manifest.coverage}
    assert calls == {"template:cpu_gemm": 2, "rule:cpu": 2}
    assert tvmcap.verify(lib, level="full").ok
    x[2, 3], x[5, 0] = float("nan"), float("inf")
    finite = torch.isfinite(lib(x)).all(dim=1)
    assert finite.tolist() == [True, True, False, True, True, False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("quantize", "least"),
    [("int8", 34), ("int8-weight-only", 40), ("fp8", 22), ({"activations": "static"}, 30)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_the_report_says(quantize, least, dtype, tmp_path) -> None:
    if quantize == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs sm_89")
    model, x = Model().to(dtype), data(64, 48, seed=0).to(dtype)
    calibration = [t.to(dtype) for t in samples(4, 64, 48)] if quantize != "int8" else None
    lib = build(model, x, tmp_path, target="cuda", quantize=quantize, calibration=calibration)
    for rows in (1, 17, 300):
        fresh = data(rows, 48, seed=rows).to(dtype)
        db = sqnr_db(model(fresh).detach(), lib(fresh.cuda()))
        assert db >= least - 2 and abs(db - lib.accuracy.outputs[0].sqnr_db) < 4

"""Convolutions in int8: right whatever the shape, by the noise that eight bits have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.quantizing import build, data, sqnr_db
from tvmcap.base.errors import QuantizeError
from tvmcap.base.manifest import read_manifest

CONVOLUTIONS = {
    "pointwise": nn.Conv2d(32, 24, 1),
    "strided": nn.Conv2d(32, 17, (3, 5), stride=(2, 3), padding=(0, 2)),
    "dilated": nn.Conv2d(32, 16, 3, padding=(2, 0), dilation=(2, 3)),
    "grouped": nn.Conv2d(32, 12, 3, padding=1, groups=4),
    "depthwise": nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=32),
    "few": nn.Conv2d(32, 3, (1, 3), padding=(0, 4), dilation=(1, 4)),
}
PRODUCTS = ("pointwise", "strided", "dilated")  # others are nests
FEW = ("strided", "grouped", "depthwise")


class Branches(nn.Module):
    """One input, a result for each convolution."""

    def __init__(self, convolutions):
        super().__init__()
        self.each = nn.ModuleDict(convolutions)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)

    def forward(self, x):
        return tuple(torch.relu(conv(x)) for conv in self.each.values())


@pytest.mark.parametrize(
    ("quantize", "least", "names"),
    [
        ("int8", 34, tuple(CONVOLUTIONS)),
        ("int8-weight-only", 40, FEW),
        ({"activations": "static", "smooth": 0.5}, 30, FEW),
    ],
    ids=str,
)
@torch.no_grad()
def test_every_convolution_keeps_what_eight_bits_can(quantize, least, names, tmp_path) -> None:
    """Scales of outputs are a channel's own; smoothing is for products and leaves them alone."""
    model, x = Branches({n: CONVOLUTIONS[n] for n in names}), data(3, 32, 11, 9, seed=0)
    batches = [data(4, 32, 11, 9, seed=10 + i) for i in range(4)]
    calibration = batches if isinstance(quantize, dict) else None
    lib = build(model, x, tmp_path, quantize=quantize, calibration=calibration)
    for rows in (1, 5):
        fresh = data(rows, 32, 11, 9, seed=rows)
        for name, want, got in zip(names, model(fresh), lib(fresh), strict=True):
            assert sqnr_db(want, got) >= least, name
    assert {a.name for a in lib.accuracy.layers} == {f"each.{name}.weight" for name in names}
    assert all(a.own_db > least for a in lib.accuracy.layers)
    assert lib.accuracy.bytes_after <= 0.3 * lib.accuracy.bytes_before
    products = sum(t["calls"] for t in lib.manifest.coverage if "template" in t["served_by"])
    wanted = 0 if quantize == "int8-weight-only" else len({*names} & {*PRODUCTS})
    assert products == wanted


@torch.no_grad()
def test_one_and_three_dimensions_and_16_bit_floats(tmp_path) -> None:
    for i, (conv, shape) in enumerate(
        [
            (nn.Conv1d(8, 16, 5, padding=2, stride=2), (2, 8, 33)),
            (nn.Conv3d(4, 16, (3, 2, 1), padding=(1, 0, 2), groups=2), (2, 4, 5, 6, 3)),
        ]
    ):
        model = Branches({"conv": conv}).to(torch.bfloat16 if i == 0 else torch.float32)
        x = data(*shape, seed=i).to(next(model.parameters()).dtype)
        (got,) = build(model, x, tmp_path, quantize="int8", dynamic=None)(x)
        assert got.dtype == x.dtype and sqnr_db(model.float()(x.float())[0], got) >= 34


@torch.no_grad()
def test_samples_have_scales_of_their_own(tmp_path) -> None:
    """What one sample holds, NaN included, does not reach another."""
    model, x = Branches({"conv": nn.Conv2d(8, 16, 3, padding=1)}), data(4, 8, 6, 7, seed=0)
    lib = build(model, x, tmp_path, quantize="int8")
    alone = [lib(x[i : i + 1].clone())[0] for i in range(4)]
    odd = x.clone()
    odd[1] *= 1e4
    odd[2, 3, 2, 2] = torch.nan
    (got,) = lib(odd)
    assert torch.equal(got[:1], alone[0]) and torch.equal(got[3:], alone[3])
    assert sqnr_db(model(odd[1:2])[0], got[1:2]) >= 34
    assert not torch.isfinite(got[2]).all()


def test_convolutions_that_stay_as_they_are(tmp_path) -> None:
    model, x = Branches({"conv": nn.Conv2d(8, 16, 3)}), data(2, 8, 6, 7, seed=0)
    with pytest.raises(
        QuantizeError, match=r"'fp8' is for products.* only convolutions; use 'int8"
    ):
        build(model, x, tmp_path, quantize="fp8")
    with pytest.raises(QuantizeError, match=r"names every layer: each\.conv\.weight"):
        build(model, x, tmp_path, quantize={"keep": "each.conv"})
    still = {"activations": "static"}
    with pytest.raises(QuantizeError, match=r"'each\.conv\.weight' is 0 everywhere"):
        build(model, x, tmp_path, quantize=still, calibration=[x * 0, x])


@pytest.mark.parametrize(
    ("arch", "names"), [("sm_90a", ("strided",)), ("sm_80", ("strided", "grouped"))]
)
def test_convolutions_compile_for_gpus(arch, names, tmp_path) -> None:
    chosen = {name: CONVOLUTIONS[name] for name in names}
    options = {"target": {"kind": "cuda", "arch": arch}, "quantize": "int8"}
    lib = build(Branches(chosen), data(3, 32, 11, 9, seed=0), tmp_path, **options)
    served = [t["served_by"] for t in read_manifest(lib.path).coverage]
    assert ("template:hopper_gemm" in served) == (arch == "sm_90a")


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_computes_every_convolution(tmp_path) -> None:
    model, x = Branches(CONVOLUTIONS), data(3, 32, 11, 9, seed=0)
    lib = build(model, x, tmp_path, target="cuda", quantize="int8")
    for rows in (1, 5):
        fresh = data(rows, 32, 11, 9, seed=rows)
        for name, want, got in zip(CONVOLUTIONS, model(fresh), lib(fresh.cuda()), strict=True):
            assert sqnr_db(want, got) >= 34, name

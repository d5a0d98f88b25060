"""The Hopper GEMM template: what it takes, what fits the machine, its defaults and its features."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import tirx

from tests.schedules.products import TARGET, product, source_of
from tvmcap.base import codegen
from tvmcap.base.errors import RecordError
from tvmcap.kernel import spaces
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules import hopper_kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_takes_a_product_with_its_epilogue(dtype, layout) -> None:
    gemm = hopper.match(product(dtype=dtype, layout=layout), TARGET)
    assert gemm is not None and gemm.layout == layout and (gemm.n, gemm.k) == (128, 64)
    template, problem = spaces.find(product(dtype=dtype, layout=layout), TARGET)
    assert template is hopper.TEMPLATE and problem.key() == gemm.key()


def test_leaves_alone_what_it_cannot_do() -> None:
    assert hopper.match(product(dtype="float32", out="float32"), TARGET) is None
    assert hopper.match(product(n=100), TARGET) is None  # rows of 200 bytes: no multiple of 16
    assert hopper.match(product(k=60), TARGET) is None
    assert hopper.match(product(batch=(2,), gelu=False), TARGET) is None
    for other in (
        {"kind": "cuda", "arch": "sm_80"},
        {"kind": "cuda", "arch": "sm_90"},
        {"kind": "llvm"},
    ):
        assert hopper.match(product(), codegen.make_target(other)) is None
    elementwise = product()
    stripped = tirx.PrimFunc([], tirx.Evaluate(0))
    assert hopper.match(stripped, TARGET) is None and hopper.match(elementwise, TARGET) is not None


@pytest.mark.parametrize("n", [8, 64, 128, 4096])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_the_space_holds_only_what_fits(n, out) -> None:
    gemm = hopper.match(product(n=n, out=out), TARGET)
    points = hopper.space(gemm, TARGET)
    assert points and len(set(points)) == len(points)
    for knobs in points:
        ring = knobs.stages * (128 + knobs.bn) * knobs.bk * 2
        staged = 128 * knobs.bn * 2 if knobs.tma_store else 0
        assert (
            ring + staged
            <= hopper_kernel.SHARED_BYTES
            <= int(TARGET.attrs["max_shared_memory_per_block"])
        )
        assert not (knobs.tma_store and out == "float32")  # the store path is for 16-bit results
        assert knobs.bn <= max(64, n)
    if n == 4096:
        assert {k.bn for k in points} == {64, 128, 192, 256}


@pytest.mark.parametrize(
    ("rows", "n"), itertools.product([1, 256, 257, 4096, "B"], [8, 64, 1000, 4096])
)
def test_defaults_are_in_the_space(rows, n) -> None:
    gemm = hopper.match(product(rows=rows, n=n), TARGET)
    points = set(hopper.space(gemm, TARGET))
    assert hopper.default(gemm, TARGET) in points
    ranged = hopper.ranges(gemm, TARGET)
    assert all(knobs in points for _, knobs in ranged)
    assert ranged[-1][0] is None and all(bound is not None for bound, _ in ranged[:-1])
    assert len({knobs for _, knobs in ranged}) == len(ranged)


def test_features_tell_settings_apart() -> None:
    gemm = hopper.match(product(n=4096), TARGET)
    points = hopper.space(gemm, TARGET)
    table = hopper.features(gemm, points, TARGET)
    assert table.shape == (len(points), len(hopper.FEATURES)) and table.dtype == np.float32
    assert np.isfinite(table).all() and len(np.unique(table, axis=0)) == len(points)
    assert hopper.features(gemm, [], TARGET).shape == (0, len(hopper.FEATURES))


def test_knobs_are_canonical_json() -> None:
    knobs = hopper.Knobs(bn=192, late=True)
    text = hopper.TEMPLATE.knobs_to_json(knobs)
    assert hopper.TEMPLATE.knobs_from_json(text) == knobs
    for wrong in ("{}", text.replace("192", '"192"'), text.replace("true", "1"), "[]", "nonsense"):
        with pytest.raises(RecordError):
            hopper.TEMPLATE.knobs_from_json(wrong)


def test_the_key_forgets_rows_and_knows_the_epilogue() -> None:
    def key(**kwargs):
        func = product(**kwargs)
        return {k: v for k, v in hopper.match(func, TARGET).key().items() if k != "rows"}

    assert (
        key() != key(gelu=False)
        and key() != key(n=256)
        and key() != key(dtype="float16")
        and key() != key(layout="nk")
    )
    sizes = {"B": 7}
    assert hopper.match(product(), TARGET).flops(sizes) == 2 * 7 * 128 * 64


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tma_store": False},
        {"bn": 64, "bk": 128, "stages": 3},
        {"bn": 192, "late": True, "stages": 3},
        {"bn": 256, "stages": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_source_of_a_setting(change, layout) -> None:
    """The PrimFunc's parameters, wgmma of the tile asked for, TMA loads, stores as asked."""
    func = product(n=512, layout=layout)
    gemm = hopper.match(func, TARGET)
    knobs = dataclasses.replace(hopper.Knobs(), **change)
    assert hopper.fits(gemm, knobs)
    kernel = hopper.lower(func, gemm, knobs, TARGET)
    assert kernel.attrs["tirx.is_scheduled"] and list(kernel.params) == list(func.params)
    source = source_of(kernel)
    assert f"m64n{knobs.bn}k16.f32.bf16.bf16" in source
    assert "cp.async.bulk.tensor.2d.shared" in source
    assert ("cp.async.bulk.tensor.2d.global" in source) == knobs.tma_store


@pytest.mark.parametrize("tma_store", [True, False])
def test_a_residual_over_rows_of_two_dimensions(tma_store) -> None:
    """The epilogue reads a tensor of three dimensions by its own indices."""
    func = product(lead=("T",), n=256, residual=True)
    gemm = hopper.match(func, TARGET)
    assert len(gemm.row_dims) == 2 and len(gemm.fused.epilogue.reads) == 2
    source = source_of(hopper.lower(func, gemm, hopper.Knobs(tma_store=tma_store), TARGET))
    assert "wgmma" in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 128, 257, 2049])
def test_computes_the_block(dtype, rows) -> None:
    import tvmcap

    make = torch.Generator().manual_seed(rows)
    x, w, b = (
        torch.randn(s, generator=make).to(dtype).cuda() for s in ((rows, 192), (192, 328), (328,))
    )
    w = w / 14
    lib = tvmcap.build(
        lambda x, w, b: F.gelu(x @ w + b),
        (x, w, b),
        dynamic={"x": {0: "B"}},
        target="cuda",
        tune="none",
        verify=False,
    )
    wanted = F.gelu(x.double() @ w.double() + b.double())
    error = (lib(x, w, b).double() - wanted).abs().max()
    eager = (F.gelu(x @ w + b).double() - wanted).abs().max()
    assert error <= 2 * eager + torch.finfo(dtype).eps

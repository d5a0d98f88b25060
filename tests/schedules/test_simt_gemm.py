"""The SIMT GEMM template: what it takes, what fits the machine, its defaults and its source."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.libs import quick
from tests.schedules.products import TARGET, product, source_of
from tvmcap.base import codegen
from tvmcap.kernel import spaces
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules import simt_gemm as simt
from tvmcap.schedules.simt_kernel import shared_floats

SHARED_BYTES = 48 * 1024  # what a block gets without asking for more


@pytest.mark.parametrize("a_layout", ["mk", "km"])
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("batch", [(), (3,), ("H", 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_takes_any_layout_batch_and_size(a_layout, layout, batch, dtype) -> None:
    func = product(n=101, k=37, dtype=dtype, a_layout=a_layout, layout=layout, batch=batch)
    gemm = simt.match(func, TARGET)
    assert (gemm.a_layout, gemm.layout) == (a_layout, layout)
    assert len(gemm.batch) == len(batch) and (gemm.n, gemm.k) == (101, 37)
    if dtype == "float32":
        assert spaces.find(func, TARGET)[0] is simt.TEMPLATE


@pytest.mark.parametrize("symbolic", [{"n": "N"}, {"k": "K"}, {"rows": 24, "n": "8*N"}], ids=str)
def test_takes_symbolic_sizes(symbolic) -> None:
    func = product(dtype="float32", **symbolic)
    template, gemm = spaces.find(func, TARGET)
    assert template is simt.TEMPLATE and simt.default(gemm, TARGET) in simt.space(gemm, TARGET)


def test_leaves_tensor_cores_and_other_targets_their_own() -> None:
    assert spaces.find(product(), TARGET)[0] is hopper.TEMPLATE
    func = product(dtype="float32")
    assert simt.match(func, codegen.make_target({"kind": "llvm"})) is None
    older = codegen.make_target({"kind": "cuda", "arch": "sm_80"})
    assert simt.match(func, older) is not None and spaces.find(func, older)[0] is simt.TEMPLATE


@pytest.mark.parametrize(
    ("rows", "n", "batch"),
    itertools.product([1, 16, 300, 4096, "B"], [1, 100, 4096], [(), (64,), ("H",)]),
)
def test_space_and_defaults_fit_any_card(rows, n, batch) -> None:
    gemm = simt.match(product(rows=rows, n=n, dtype="float32", batch=batch, gelu=False), TARGET)
    points, ranged = simt.space(gemm, TARGET), simt.ranges(gemm, TARGET)
    assert len(set(points)) == len(points) > 1
    for knobs in [*points, simt.default(gemm, TARGET), *(k for _, k in ranged)]:
        assert knobs.bm % knobs.tm == 0 and knobs.bn % knobs.tn == 0
        assert 32 <= knobs.threads <= 1024 and knobs.threads % 32 == 0
        assert 4 * shared_floats(knobs) <= SHARED_BYTES
    bounds = [bound for bound, _ in ranged]
    assert bounds[-1] is None and bounds[:-1] == sorted(set(bounds[:-1]))
    last = simt.default(gemm, TARGET)
    wanted = next(k for b, k in ranged if isinstance(rows, str) or b is None or rows <= b)
    assert last == (ranged[-1][1] if isinstance(rows, str) else wanted)


def test_features_tell_settings_apart() -> None:
    gemm = simt.match(product(n=4096, dtype="float32", batch=("H",)), TARGET)
    points = simt.space(gemm, TARGET)
    table = simt.features(gemm, points, TARGET)
    assert table.shape == (len(points), len(simt.FEATURES)) and table.dtype == np.float32
    assert np.isfinite(table).all() and len(np.unique(table, axis=0)) == len(points)
    assert simt.features(gemm, [], TARGET).shape == (0, len(simt.FEATURES))


@pytest.mark.parametrize(
    "knobs",
    [simt.Knobs(8, 32, 16, 8, 1, 8), simt.Knobs(32, 64, 16, 4, 4, 2), simt.Knobs()],
    ids=str,
)
@pytest.mark.parametrize(
    "case",
    [
        {"layout": "kn", "n": 101, "k": 37},
        {"layout": "nk", "n": 101, "k": 37},
        {"layout": "kn", "n": 128, "k": 64, "batch": ("H", 2)},
        {"layout": "nk", "n": 128, "k": 61, "batch": (3,), "dtype": "bfloat16"},
        {"layout": "kn", "n": 60, "k": 64, "dtype": "bfloat16", "lead": ("T",), "residual": True},
        {"a_layout": "km", "layout": "kn", "n": 101, "k": 37, "batch": (3,)},
        {"a_layout": "km", "layout": "nk", "n": 60, "k": "K", "batch": (3,), "shared": "a"},
        {"a_layout": "km", "layout": "nk", "n": "N", "k": 24, "batch": (3,), "shared": "b"},
    ],
    ids=str,
)
def test_source_of_a_setting(case, knobs) -> None:
    """A kernel of the PrimFunc's parameters with the threads and the shared memory asked for."""
    case = {"dtype": "float32", **case}
    func = product(**case)
    gemm = simt.match(func, TARGET)
    kernel = simt.lower(func, gemm, knobs, TARGET)
    assert kernel.attrs["tirx.is_scheduled"] and list(kernel.params) == list(func.params)
    source = source_of(kernel)
    assert f"__launch_bounds__({knobs.threads})" in source
    is_half = case["dtype"] == "bfloat16"  # stored so; tanh then needs fewer digits
    body = source.split('extern "C" __global__')[-1]
    assert ("nv_bfloat16" in body) == ("tanhf(" not in body) == is_half
    assert "mma" not in source


def test_nvcc_takes_it(without_gpu: None) -> None:
    x, w = torch.zeros(3, 5, 37), torch.zeros(3, 37, 101)
    target = {"kind": "cuda", "arch": "sm_80"}
    lib = quick(torch.matmul, x, w, dynamic={0: {1: "T"}}, target=target)
    assert [task["served_by"] for task in lib.manifest.coverage] == ["template:simt_gemm"]
    assert lib.executor is None and b"sm_80" in lib.path.read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 130, 1025])
def test_computes_products_with_tails(dtype, rows) -> None:
    make = torch.Generator().manual_seed(rows)
    shapes = (3, rows, 37), (3, 101, 37), (37, rows), (rows, 61)
    x, w, v, u = (torch.randn(s, generator=make).to(dtype).cuda() for s in shapes)

    def fn(x, w, v, u):
        """Both operands in a batch; one matrix for the batch, on the left; sums over rows."""
        return torch.relu(x @ w.mT), v.T @ w.mT, x.mT @ u, torch.tanh(u.T @ x)

    dynamic = {"x": {1: "T"}, "v": {1: "T"}, "u": {0: "T"}}
    lib = quick(fn, x, w, v, u, dynamic=dynamic, target="cuda")
    args = (x, w, v, u)
    for ours, eager, wanted in zip(
        lib(*args), fn(*args), fn(*(t.double() for t in args)), strict=True
    ):
        error, budget = ((y.double() - wanted).abs().max() for y in (ours, eager))
        assert error <= 2 * budget + torch.finfo(dtype).eps

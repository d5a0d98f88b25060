"""How many kernels a quantized model is on a Hopper GPU, and what lies between them in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmcap
from tests.libs import B, values
from tests.quantizing import sqnr_db
from tvmcap import pipeline
from tvmcap.base import codegen
from tvmcap.base.config import make_config
from tvmcap.capture.export import capture
from tvmcap.graph.layers import layers
from tvmcap.graph.quantize import Plan, quantize

HOPPER = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})
TOKEN, STATIC, FP8 = Plan("int8"), Plan("int8", clip=3.0), Plan("float8_e4m3fn")
TEMPLATES = ("template:hopper_gemm", "template:row_norm")
K, N = 128, 256


class Block(nn.Module):
    """A linear and GELU, after a norm where there is one."""

    def __init__(self, norm=None):
        super().__init__()
        self.norm, self.up = norm or nn.Identity(), nn.Linear(K, N)

    def forward(self, x):
        return nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")


class Mlp(Block):
    """Two layers and the residual around them."""

    def __init__(self, norm=None):
        super().__init__(norm)
        self.down = nn.Linear(N, K)

    def forward(self, x):
        return x + self.down(super().forward(x))


class Heads(nn.Module):
    """Two layers that read one norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.RMSNorm(K), nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x):
        h = self.norm(x)
        return self.q(h), self.k(h)


def passed(model, plan, dtype, shape=(8, K)):
    """Quantize every layer of a model; returns its fused and its planned module, and coverage."""
    torch.manual_seed(0)
    config = make_config(target="cuda:sm_90a", tune="none", dynamic=B)
    captured = capture(model().to(dtype).eval(), (values(*shape, dtype=dtype),), None, config)

    def in_8_bits(mod):
        found = layers(mod, lambda weight: [])
        return quantize(mod, {layer.name: plan for layer in found}, found)

    trace = pipeline.Trace()
    front = pipeline.front(HOPPER, quantize=in_8_bits)
    fused = pipeline.run(captured.mod, front, HOPPER, config, trace)
    back = pipeline.back(HOPPER, lambda task: [], trace)
    return fused, pipeline.run(fused, back, HOPPER, config, trace), trace.coverage


def written(fused):
    """Return the dtypes of all that one kernel writes and another reads, but for scales of rows."""
    main = fused["main"]
    inner = [b.value for x in main.body.blocks for b in x.bindings if hasattr(b.value, "op")]
    read = {v for call in inner for v in call.args[1].fields} if inner else set()
    found = [
        str(b.var.ty.dtype.dtype)
        for x in main.body.blocks
        for b in x.bindings
        if b.var in read and int(b.var.ty.shape.values[-1]) > 1
    ]
    return sorted(found)


@pytest.mark.parametrize(
    ("model", "plan", "kernels", "between"),
    [
        (Block, TOKEN, 2, ["int8"]),
        (Block, FP8, 2, ["float8_e4m3fn"]),
        (lambda: Block(nn.RMSNorm(K)), TOKEN, 2, ["int8"]),
        (lambda: Block(nn.LayerNorm(K)), FP8, 2, ["float8_e4m3fn"]),
        (Heads, TOKEN, 3, ["int8"]),
        (lambda: Mlp(nn.LayerNorm(K)), TOKEN, 4, ["bfloat16", "int8", "int8"]),
        (Block, STATIC, 2, ["int8"]),
        (lambda: Mlp(nn.RMSNorm(K)), STATIC, 3, ["int8", "int8"]),
    ],
    ids=["plain", "plain, fp8", "rms", "layer norm, fp8", "shared", "mlp", "static", "static mlp"],
)
def test_at_most_two_kernels_a_layer_and_one_where_the_scale_is_static(
    model, plan, kernels, between
) -> None:
    """What makes the input of a layer also quantizes it, so that bytes go to memory."""
    fused, planned, coverage = passed(model, plan, torch.bfloat16)
    assert pipeline.count_kernels(planned) == kernels
    assert written(fused) == between
    others = [s for s in coverage if s.served_by not in TEMPLATES]
    assert len(others) == (model is Block and plan is STATIC)  # it only rounds its input


def test_rows_may_have_several_dimensions() -> None:
    _, planned, coverage = passed(Block, TOKEN, torch.bfloat16, shape=(4, 6, K))
    assert {s.served_by for s in coverage} == set(TEMPLATES)
    assert pipeline.count_kernels(planned) == 2


@pytest.mark.skipif(codegen.find_nvcc() is None, reason="no nvcc")
def test_a_cross_compiled_layer_is_two_kernels(tmp_path) -> None:
    model = Block(nn.RMSNorm(K)).bfloat16().eval()
    lib = tvmcap.build(
        model, (values(8, K, dtype=torch.bfloat16),), target="cuda:sm_90a", dynamic=B,
        quantize="int8", verify=False, tune="none", cache_dir=str(tmp_path),
    )  # fmt: skip
    assert lib.manifest.kernels_per_call == 2 and lib.accuracy.ok


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(K)], ids=["none", "norm"])
@torch.no_grad()
def test_what_fuses_is_right_in_16_bits(norm, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Mlp(norm).bfloat16().eval(), values(33, K, dtype=torch.bfloat16, seed=5)
    lib = tvmcap.build(
        model, (values(33, K, dtype=torch.bfloat16),), target="llvm", quantize="int8",
        verify=False, tune="none", cache_dir=str(tmp_path),
    )  # fmt: skip
    got, want = lib(x).double(), model.double()(x.double())
    noise = (got - want).square().sum() / (want - x.double()).square().sum()
    assert float(-10 * torch.log10(noise)) >= 30


def int8_block(folder, target, rows=40):
    torch.manual_seed(0)
    x = values(rows, K, dtype=torch.bfloat16)
    model = Block().bfloat16().eval()
    lib = tvmcap.build(
        model, (x,), target=target, dynamic=B, quantize="int8", verify=False, tune="none",
        cache_dir=str(folder),
    )  # fmt: skip
    return model, lib


@pytest.mark.parametrize("arch", ["sm_75", "sm_89"])
def test_int8_runs_on_tensor_cores_before_hopper(arch, tmp_path) -> None:
    """TVM's own rule for int8 makes a pipeline that does not lower."""
    _, lib = int8_block(tmp_path, f"cuda:{arch}")
    (served,) = (s for s in lib.manifest.coverage if "matmul" in s["task"])
    assert served["served_by"] == "rule:tensor-core"


@pytest.mark.gpu
def test_int8_without_wgmma_is_right_on_a_gpu(tmp_path) -> None:
    arch = str(codegen.gpu_architecture()).rstrip("a")
    model, lib = int8_block(tmp_path, {"kind": "cuda", "arch": arch})
    assert "rule:tensor-core" in lib.explain()
    for rows in (1, 16, 40, 333):
        x = values(rows, K, dtype=torch.bfloat16)
        with torch.no_grad():
            assert sqnr_db(model.double()(x.double()), lib(x.cuda())) >= 35
        model.bfloat16()

"""Small forms of the example models build and verify on llvm in 32 and 16 bits."""

from __future__ import annotations

import pytest
import torch

import tvmcap
from examples.models import MLP, ConvNet, NormMLP, SelfAttention

MODELS = {
    "mlp": (lambda: MLP(48, 2), (9, 48)),
    "norm_mlp": (lambda: NormMLP(40), (9, 40)),
    "convnet": (lambda: ConvNet(6), (3, 3, 14, 14)),
    "attention": (lambda: SelfAttention(64, 4), (3, 10, 64)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("attention", torch.float32),
        ("attention", torch.bfloat16),
        ("norm_mlp", torch.bfloat16),
        ("norm_mlp", torch.float16),
        ("convnet", torch.bfloat16),
        ("mlp", torch.float16),
    ],
)
def test_builds_and_verifies(name, dtype, tmp_path):
    """The build verifies itself at several batches; a fused reshape leaves no kernel."""
    make, shape = MODELS[name]
    generator = torch.Generator().manual_seed(11)
    torch.manual_seed(11)
    model = make().eval().to(dtype)
    x = torch.randn(shape, generator=generator).to(dtype)
    lib = tvmcap.build(
        model,
        (x,),
        dynamic={"x": {0: "B"}},
        target="llvm",
        tune="none",
        verify=True,
        cache_dir=tmp_path,
    )
    assert lib.manifest.verified
    assert not any("reshape" in served["task"] for served in lib.manifest.coverage)

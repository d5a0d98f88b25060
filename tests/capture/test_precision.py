"""16-bit graphs: float32 inside kernels, 16 bits between them, and no worse than eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import tvm
from running import compiled
from torch import nn
from tvm import relax

from tvmcap.base.config import Config
from tvmcap.capture.export import capture
from tvmcap.capture.precision import widen


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


def fused(captured):
    """Fuse the widened module as the back end does; return its kernels' output types and names."""
    mod = widen(captured.mod)
    mod = relax.transform.FoldConstant()(relax.transform.LegalizeOps()(mod))
    mod = relax.transform.FuseOps()(relax.transform.AnnotateTIROpPattern()(mod))
    mod = relax.transform.FuseTIR()(relax.transform.DeadCodeElimination(["main"])(mod))
    calls = [
        b
        for block in mod["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
    ]
    return [(b.value.args[0].name_hint, str(b.var.ty.dtype.dtype)) for b in calls]


ROWS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "group_norm": lambda x: F.group_norm(x.view(-1, 4, 16), 2),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "rsqrt": lambda x: torch.rsqrt(x * x + 1),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.sum(-1),
    "var": lambda x: x.var(-1),
    "exp": torch.exp,
    "log1p": lambda x: torch.log1p(x * x),
    "cumsum": lambda x: x.cumsum(-1),
    "pool": lambda x: F.avg_pool2d(x.view(1, -1, 8, 8), 4),
    "chain": lambda x: F.silu(x * 1.7 + 0.3) * torch.sigmoid(x) - torch.tanh(x),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_eagers(dtype):
    x = (torch.randn(16, 64) * 3).to(dtype)
    got = compiled(capture(lambda x: {name: fn(x) for name, fn in ROWS.items()}, (x,)))(x)
    for name, fn in ROWS.items():
        exact = fn(x.double())
        mine, eager = ((y.double() - exact).abs().max().item() for y in (got[name], fn(x)))
        ulp = torch.finfo(dtype).eps * exact.abs().max().item()
        assert mine <= 2 * eager + ulp, (name, mine, eager)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_block_is_one_kernel(approximate):
    x, w, b = (torch.randn(s, dtype=torch.bfloat16) for s in ((4, 16), (16, 32), (32,)))
    captured = capture(
        lambda x, w, b: F.gelu(x @ w + b, approximate=approximate),
        (x, w, b),
        config=Config(dynamic={0: {0: "B"}}),
    )
    assert [dtype for _, dtype in fused(captured)] == ["bfloat16"]
    text = widen(captured.mod).script()
    assert text.count("R.astype(") == 2  # the bias in, the result out
    assert 'R.matmul(x, w, out_dtype="float32")' in text


def test_residuals_stay_in_16_bits_between_kernels():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            y = x + self.down(F.silu(self.up(self.norm(x))))
            return y + torch.tanh(self.norm(y))

    model = Block().bfloat16()
    captured = capture(
        model, (torch.randn(4, 16).bfloat16(),), config=Config(dynamic={0: {0: "B"}})
    )
    kernels = fused(captured)
    assert {dtype for _, dtype in kernels} == {"bfloat16"}
    assert len(kernels) == 4, kernels
    assert not any(name.startswith(("cast", "astype")) for name, _ in kernels)


def test_two_products_added_are_two_kernels_in_16_bits():
    x = torch.randn(4, 16).bfloat16()
    captured = capture(
        lambda x, v, w: torch.relu(x @ v + x @ w), (x, *torch.randn(2, 16, 16).bfloat16())
    )
    assert [dtype for _, dtype in fused(captured)] == ["bfloat16", "bfloat16"]


def test_rounding_that_the_user_wrote_stays():
    x = torch.randn(64)
    got = compiled(capture(lambda x: x.half().float() * 2, (x,)))(x)
    assert torch.equal(got, x.half().float() * 2)


def test_float32_is_left_alone():
    captured = capture(lambda x: torch.softmax(F.gelu(x), -1), (torch.randn(4, 8),))
    tvm.ir.assert_structural_equal(widen(captured.mod), captured.mod)

"""Models import right: equal to eager at the captured sizes and at others, in 32 and 16 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import tvm
from running import check, compiled, same
from torch import nn
from tvm import relax

from tvmcap.base.config import Config
from tvmcap.base.signature import evaluate
from tvmcap.capture.export import capture

HALF = [torch.float32, torch.bfloat16]
ALL = [*HALF, torch.float16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def gelu_block(x, w, b):
    return F.gelu(x @ w + b)


def tanh_block(x, w, b):
    return F.gelu(x @ w + b, approximate="tanh")


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("fn", [gelu_block, tanh_block])
def test_block(fn, dtype):
    w, b = (torch.randn(16, 32) / 4).to(dtype), torch.randn(32).to(dtype)
    sizes = [(torch.randn(rows, 16).to(dtype), w, b) for rows in (4, 1, 9)]
    captured = check(fn, *sizes, dynamic={"x": {0: "B"}})
    assert captured.signature.outputs[0].shape == ("B", 32)
    frozen = capture(fn, sizes[0], config=Config(dynamic={0: {0: "B"}}, constants=("w", "b")))
    assert frozen.frozen == ("w", "b") and frozen.signature.arg_names == ("x",)
    same(compiled(frozen)(sizes[2][0]), fn(*sizes[2]))
    same(frozen.eager(sizes[2][0]), fn(*sizes[2]))


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.qkv, self.out, self.mode = nn.Linear(16, 48), nn.Linear(16, 16), mode

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if self.mode == "hand":
            y = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.mode == "causal")
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def mlp():
    return nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)
    )


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "make", [mlp, RMSNorm, lambda: nn.RMSNorm(16)], ids=["mlp", "rms", "nn.rms"]
)
def test_rows(make, dtype):
    model = make().eval().to(dtype)
    check(model, *((torch.randn(rows, 16).to(dtype),) for rows in (4, 1)), dynamic={0: {0: "B"}})


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_convnet(dtype):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    images = [(torch.randn(n, 3, 12, 12).to(dtype),) for n in (2, 5)]
    check(model.to(dtype), *images, dynamic={"input": {0: "B"}})


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("mode", ["hand", "causal"])
def test_attention(mode, dtype):
    sizes = [(torch.randn(b, t, 16).to(dtype),) for b, t in ((2, 6), (3, 5))]
    check(Attention(mode).to(dtype), *sizes, dynamic={"x": {0: "B", 1: "T"}})


def test_attention_forms():
    check(Attention("plain"), (torch.randn(2, 6, 16),))
    check(
        MultiHead().eval(),
        (torch.randn(2, 6, 16),),
        (torch.randn(3, 6, 16),),
        dynamic={"x": {0: "B"}},
    )
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)

    def grouped(q, k, m):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=m, enable_gqa=True, scale=0.3)

    check(grouped, (q, k, torch.ones(5, 5).tril().bool()))
    check(grouped, (q, k, torch.randn(5, 5)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("form", ["bool", "float"])
def test_queries_that_see_no_key_come_to_zero(form, dtype):
    """A mask hides all from some queries, as padding does in a batch."""
    seen = torch.rand(2, 1, 4, 5) < 0.6
    seen[0, 0, 2] = seen[1] = False
    seen[1, 0, 3, 4] = True
    mask = seen if form == "bool" else torch.randn(2, 1, 4, 5).masked_fill(~seen, -torch.inf)
    q, k = torch.randn(2, 3, 4, 8).to(dtype), torch.randn(2, 3, 5, 8).to(dtype)
    mask = mask if form == "bool" else mask.to(dtype)

    def attend(q, k, m):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=m)

    assert (attend(q, k, mask) == 0).sum() == (1 + 3) * 3 * 8
    check(attend, (q, k, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_encoder_layer(dtype):
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().to(dtype)
    check(model, *((torch.randn(b, 6, 16).to(dtype),) for b in (2, 3)), dynamic={"src": {0: "B"}})


def test_structures():
    def nested(d, pair, flag=True):
        return {
            "a": d["x"] + pair[0] * d["n"],
            "b": (pair[1] * 2, [d["x"]]),
            "c": None if flag else 1,
        }

    args = ({"x": torch.randn(3, 4), "n": 3}, (torch.randn(3, 4), torch.randn(5)))
    captured = check(nested, args)
    assert [s.name for s in captured.signature.inputs] == ["d.x", "pair.0", "pair.1"]
    assert captured.signature.in_tree["items"][0]["items"][1] == {"kind": "const", "value": 3}

    def twice(x):
        y = x + 1
        return y, y, x

    check(twice, (torch.randn(3, 4),), (torch.randn(1, 4),), dynamic={"x": {0: "B"}})
    check(lambda x, s: x * s + s, (torch.randn(3, 4), torch.randn(())))
    check(
        lambda m, i, x: torch.where(m, x, 0)[:, i],
        (torch.rand(3, 4) > 0.5, torch.tensor([1, -1]), torch.randn(3, 4)),
    )
    check(lambda a, b: a @ b, *[(x, x) for x in [torch.randn(4, 4)]])


def test_sizes_in_shapes():
    x, y = torch.randn(3, 8), torch.randn(4, 8)
    captured = check(
        lambda x, y: (x.view(x.shape[0] * 4, 2), torch.cat([x, y]).flatten(), x.reshape(-1, 2, 4)),
        (x, y),
        (torch.randn(5, 8), torch.randn(1, 8)),
        dynamic={"x": {0: "A"}, "y": {0: "C"}},
    )
    sizes = [
        [evaluate(s, {"A": 5, "C": 2}) for s in spec.shape] for spec in captured.signature.outputs
    ]
    assert sizes == [[20, 2], [56], [5, 2, 4]]


def test_tied_weights_are_one_constant():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, i):
            return self.head(self.table(i))

    captured = check(
        Tied(),
        (torch.randint(0, 20, (4,)),),
        (torch.randint(0, 20, (1,)),),
        dynamic={"i": {0: "B"}},
    )
    assert len(captured.frozen) == 1
    tables = []

    def visit(e):
        if isinstance(e, tvm.ir.GenericConst) and tuple(e.value.shape) == (20, 16):
            tables.append(e)

    relax.analysis.post_order_visit(captured.mod["main"], visit)
    assert len({hash(table) for table in tables}) == 1


def test_exported_program_and_file(tmp_path):
    model = mlp().eval()
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(model, (torch.randn(4, 16),), dynamic_shapes=({0: batch},))
    captured = capture(program)
    assert captured.signature.dims[0].max == 64
    same(compiled(captured)(x := torch.randn(9, 16)), model(x))
    torch.export.save(program, tmp_path / "m.pt2")
    loaded = capture(tmp_path / "m.pt2", config=Config(dynamic={0: {0: "B"}}))
    assert loaded.signature.outputs[0].shape == ("B", 16)
    same(compiled(loaded)(x), model(x))


def test_numpy_and_closures():
    layer, scale = nn.Linear(8, 4), torch.randn(4)
    captured = capture(lambda x: layer(x) * scale, (torch.randn(3, 8).numpy(),))
    assert set(captured.frozen) == {"layer.weight", "layer.bias", "scale"}
    assert isinstance(captured.args[0], torch.Tensor)


def test_capture_disturbs_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.train()
    state = torch.get_rng_state()
    capture(model, (torch.randn(2, 4),))
    torch.randn(8)
    assert model.training and torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()
    torch.set_rng_state(state)
    a = torch.randn(2, 4)
    torch.set_rng_state(state)
    x = torch.randn(2, 4)
    capture(model, (x,))
    b = torch.randn(3)
    torch.set_rng_state(state)
    torch.randn(2, 4)
    assert torch.equal(a, x) and torch.equal(torch.randn(3), b)

"""Operators against eager, many outputs a graph, so that one compile checks them all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from running import check

from tvmcap.capture import ir
from tvmcap.capture.decompositions import missing_in_torch
from tvmcap.capture.operators import decompose


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def together(operators):
    return lambda x: {name: fn(x) for name, fn in operators.items()}


def of(name, prepare):
    return lambda x: getattr(torch, name)(prepare(x))


UNARY = {
    **{
        name: getattr(torch, name)
        for name in "abs ceil floor round sign exp expm1 sin cos tan sinh cosh tanh atan asinh erf"
        " sigmoid neg square relu trunc isnan".split()
    },
    **{
        name: getattr(F, name)
        for name in "elu celu selu softplus softsign mish hardswish hardsigmoid hardtanh relu6"
        " leaky_relu silu logsigmoid tanhshrink softshrink hardshrink gelu glu".split()
    },
    **{
        name: of(name, lambda x: x.abs() + 0.1)
        for name in "log log2 log10 log1p sqrt rsqrt reciprocal".split()
    },
    **{name: of(name, lambda x: x / 8) for name in "asin acos atanh".split()},
    "elu_scaled": lambda x: F.elu(x, alpha=0.7),
    "celu_scaled": lambda x: F.celu(x, alpha=0.7),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
}

BINARY = {
    "alpha": lambda x: torch.add(x, x, alpha=2.5),
    "subtract_alpha": lambda x: torch.sub(x, x, alpha=2.5),
    "reversed": lambda x: torch.rsub(x, 2.0, alpha=3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "power": lambda x: x**3,
    "scalar_power": lambda x: 2.0**x,
    "fmod": lambda x: torch.fmod(x, 1.5),
    "remainder": lambda x: x % 1.5,
    "floor": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "trunc": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "clamp": lambda x: (x.clamp(-1, 1), x.clamp(min=0.2), x.clamp(min=x * 0.5, max=x.abs())),
    "where": lambda x: torch.where(x > 0, x, 1.0),
    "fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "types": lambda x: (x.to(torch.int32), x > 0.5, x.bool()),
}

INTEGER = {
    "times": lambda i: i * 0.5,
    "divide": lambda i: (i / 2, i // 2, i // -3, torch.div(i, -2, rounding_mode="trunc")),
    "modulo": lambda i: i % 3,
    "subtract": lambda i: 1.5 - i,
    "power": lambda i: i**2,
    "compare": lambda i: (i > 0.5, i == 2, (i > 0) & (i < 5) | ~(i > 3)),
    "bits": lambda i: (i & 3) | (i ^ 1),
    "one_hot": lambda i: F.one_hot(i.abs(), 12),
    "sum": lambda i: (i.sum(), (i > 0).sum(), i.cumsum(-1)),
}

REDUCE = {
    "norm": lambda x: (F.normalize(x, dim=-1), x.norm(dim=-1)),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "variance": lambda x: (x.var(-1), x.var(-1, correction=0), x.std(), *torch.var_mean(x, -1)),
    "extremes": lambda x: (x.max(), x.amax(-1), x.amin((0, 1))),
    "products": lambda x: (x.prod(-1), x.cumsum(-1)),
    "any": lambda x: ((x > 0).any(-1), (x > 0).all(-1)),
    "softmin": lambda x: (F.softmin(x, -1), F.log_softmax(x, -1)),
    "losses": lambda x: (F.cross_entropy(x, torch.arange(4)), F.mse_loss(x, x * 2)),
}

MOVE = {
    "select": lambda x: (x[-1], x[:, 3], x[:, 1:-1:2], x[-2:]),
    "parts": lambda x: (*x.chunk(3, -1), *x.split([3, 5], -1), *x.unbind(0)),
    "join": lambda x: (torch.stack([x, x * 2], 1), x.repeat(2, 1), x.repeat_interleave(2, dim=1)),
    "shape": lambda x: (
        x[:, None].expand(4, 3, 8),
        x.unflatten(-1, (2, 4)),
        x.flip(-1),
        x.roll(2, -1),
    ),
    "gather": lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.long)),
    "negative": lambda x: x[:, torch.tensor([-1, 0])],
    "two": lambda x: x[torch.tensor([0, 1]), torch.tensor([-1, 2])],
    "middle": lambda x: x.view(2, 2, 4, 2)[:, torch.tensor([0, 1, -1]), torch.tensor([[3], [0]])],
    "triangle": lambda x: (x.tril(), x.triu(1)),
    "create": lambda x: x + torch.arange(8) + torch.ones_like(x) + torch.full((4, 1), 0.5),
    "create_infinite": lambda x: (
        x + torch.full((4, 1), float("-inf")),
        torch.full_like(x, float("inf")),
        x.new_full((2, 3), float("inf"), dtype=torch.float64),
    ),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "scatter": lambda x: torch.zeros(4, 10).scatter(1, torch.arange(8).expand(4, 8), x),
}

PRODUCT = {
    "einsum": lambda x: torch.einsum("bi,bj->ij", x, x),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "bmm": lambda x: torch.bmm(x[:, :, None], x[:, None]),
    "baddbmm": lambda x: torch.baddbmm(
        x[:, :, None], x[:, :, None], x[:, None, :], beta=0.5, alpha=2.0
    ),
    "addmm": lambda x: (
        torch.addmm(x, x, x.T @ x, beta=0.5, alpha=2.0),
        torch.addmm(x, x, x.T @ x, beta=0),
    ),
    "vectors": lambda x: (x @ x[0], x[:, 0] @ x, x[0] @ x[1]),
}

IMAGE = {
    "average": lambda x: (
        F.avg_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (4, 2)),
    "maximum": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "norms": lambda x: (F.group_norm(x, 2), F.instance_norm(x), F.layer_norm(x, (8, 8))),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "resize": lambda x: (
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, scale_factor=2, mode="bilinear"),
    ),
    "grouped": lambda x: F.conv2d(x, torch.ones(8, 2, 3, 3), torch.ones(8), groups=2),
    "same": lambda x: F.conv2d(x, torch.ones(8, 4, 3, 3), padding="same"),
    "conv1d": lambda x: F.conv1d(
        x[:, 0], torch.ones(5, 8, 3), torch.ones(5), padding=1, dilation=2
    ),
    "transposed": lambda x: F.conv_transpose2d(
        x, torch.ones(4, 3, 3, 3), torch.ones(3), stride=2, padding=1, output_padding=1
    ),
}


@pytest.mark.parametrize(
    "operators",
    [UNARY, BINARY, REDUCE, MOVE, PRODUCT],
    ids="unary binary reduce move product".split(),
)
def test_matrix(operators):
    check(together(operators), (torch.randn(4, 8) * 2,))


EXTREMES = {
    "max": lambda x: (*x.max(-1), *x.max(0), *x.max(1, keepdim=True)),
    "min": lambda x: (*x.min(-1), *x.min(0), *x.min(-2, keepdim=True)),
    "argmax": lambda x: (x.argmax(-1), x.argmax(0, keepdim=True), x.argmax()),
    "argmin": lambda x: (x.argmin(-1), x.argmin(0, keepdim=True), x.argmin(keepdim=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_extremes_and_where_they_first_stand(dtype):
    """With ties, and rows and columns of nothing but the least or the greatest value there is."""
    x = torch.randint(-3, 4, (6, 8)).to(dtype)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    x[1], x[2] = limits.min, limits.max
    check(together(EXTREMES), (x,))


ORDER = {
    "sort": lambda x: (*x.sort(-1), x.sort(0, descending=True)[0]),
    "stable": lambda x: x.sort(dim=-1, stable=True, descending=True),
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: (*x.topk(3, -1), *x.topk(2, 0, largest=False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sorting(dtype):
    x = torch.randperm(48).view(6, 8).to(dtype)  # all different, also in bfloat16
    x = x - 20
    if dtype.is_floating_point:
        x[0, 3] = x[4, 3] = float("nan")
        x[5, 2] = -float("inf")
    check(together(ORDER), (x,))


def test_integers():
    check(together(INTEGER), (torch.randint(-5, 9, (4, 8)),))


def test_images():
    check(together(IMAGE), (torch.randn(2, 4, 8, 8),))


def test_small_and_special_values():
    x = torch.tensor([0.0, 1e-8, -1e-6, 3e-4, -0.05, 0.2, float("inf"), float("nan")])
    check(lambda x: (torch.expm1(x), torch.log1p(x)), (x,), tolerance=1e-6)


def test_an_index_outside_reads_no_foreign_memory():
    table = torch.randn(5, 4)
    captured = check(lambda i: F.embedding(i, table), (torch.tensor([0, 4]),))
    from running import compiled

    assert torch.isfinite(compiled(captured)(torch.tensor([10**9, -(10**9)]))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_as_a_gpu_spells_it(dtype) -> None:
    """``rms_norm`` of a CUDA tensor is one operator, which some versions cannot decompose."""
    fused = torch.ops.aten._fused_rms_norm
    x, w = torch.randn(3, 4, 6).to(dtype), torch.randn(6).to(dtype)
    forms = {
        "weight": lambda x: fused(x, [6], w, 1e-5)[0],
        "plain": lambda x: fused(x, [6], None, None)[0],
        "two dimensions": lambda x: fused(x, [4, 6], None, 1e-3)[0],
    }
    check(together(forms), (x,))
    assert fused.default in missing_in_torch()


def test_rms_norm_never_becomes_the_operator_of_gpus() -> None:
    """Versions that keep ``_fused_rms_norm`` whole must not meet it."""
    x, w = torch.randn(3, 6), torch.randn(6)
    program = torch.export.export(Rms(), (x, w))
    names = {str(node.target) for node in decompose(program, ir.known_operators()).graph.nodes}
    assert "aten.rsqrt.default" in names and not any("rms_norm" in name for name in names)


class Rms(torch.nn.Module):
    """The operator as ``torch.export`` keeps it, before decomposition."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Normalise the rows of x."""
        return F.rms_norm(x, (6,), w)

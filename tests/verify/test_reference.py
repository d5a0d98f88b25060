"""The reference runs the user's code in higher precision, whatever the code holds or casts."""

import pytest
import torch
from torch import nn

from tests.verify.fakes import block, block_case
from tvmcap.base.errors import VerifyError
from tvmcap.base.numerics import to_numpy
from tvmcap.verify.reference import (
    in_parts,
    reference_dtype,
    run_eager,
    run_reference,
    split_axes,
)


def test_precision_follows_the_widest_float():
    half, single = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert reference_dtype([half]) == torch.float32
    assert reference_dtype([half, single]) == torch.float64
    assert reference_dtype([torch.zeros(1, dtype=torch.int64)]) == torch.float64


def test_function_is_computed_in_float64():
    args, _ = block_case()
    wide = block(*(a.double() for a in args))
    result = run_reference(block, args, {})
    assert result.dtype == torch.float64 and torch.equal(result, wide)


def test_closures_casts_factories_and_dtype_arguments_are_widened():
    w = torch.randn(16, 16, dtype=torch.bfloat16)

    def fn(x):
        y = (x @ w).float().to(torch.bfloat16)
        return (
            y
            + torch.full((16,), 0.1, dtype=torch.bfloat16)
            + y.sum(-1, keepdim=True, dtype=torch.bfloat16)
        )

    x = torch.randn(4, 16, dtype=torch.bfloat16)
    y = x.float() @ w.float()
    assert torch.allclose(
        run_reference(fn, (x,), {}), y + 0.1 + y.sum(-1, keepdim=True), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 5, 32)),
        (nn.MultiheadAttention(32, 4, batch_first=True), (2, 5, 32)),
        (
            nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
            ),
            (2, 3, 9, 9),
        ),
        (nn.LSTM(8, 8, batch_first=True), (2, 5, 8)),
    ],
)
def test_modules_give_what_their_double_gives_and_stay_as_they_were(module, shape):
    module = module.eval()
    x = torch.randn(shape)
    args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    got = run_reference(module, args, {})
    want = module.double()(*(a.double() for a in args))
    got, want = (v[0] if isinstance(v, tuple) else v for v in (got, want))
    assert got.dtype == torch.float64
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


def test_exported_programs_run_too():
    args, _ = block_case()
    exported = torch.export.export(nn.Sequential(nn.Linear(64, 48), nn.GELU()), (args[0],)).module()
    wide = run_reference(exported, (args[0],), {})
    assert wide.dtype == torch.float64
    assert (wide - exported(args[0])).abs().max() < 1e-5


def test_integers_pass_and_operators_without_the_precision_run_as_written():
    table = torch.randn(10, 4)
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(run_reference(lambda i: table[i], (ids,), {}), table[ids].double())


def test_parts_along_the_batch_equal_the_whole():
    args, sig = block_case(m=37)
    leaves = list(args)
    want = run_reference(block, args, {})
    got = in_parts(
        lambda p: block(*p),
        leaves,
        sig,
        5,
        [to_numpy(block(*args))],
        lambda t: run_reference(t, (), {}, torch.float64),
    )
    assert abs(got[0] - want.numpy()).max() < 1e-12


def test_parts_that_depend_on_each_other_are_refused():
    args, sig = block_case(m=37)

    def normalized(x, w, b):
        y = block(x, w, b)
        return y / y.abs().sum(0)

    with pytest.raises(VerifyError, match="independent parts"):
        in_parts(
            lambda p: normalized(*p),
            list(args),
            sig,
            5,
            [to_numpy(normalized(*args))],
            lambda t: t(),
        )


def test_split_axes_wants_the_dimension_alone():
    _, sig = block_case()
    assert split_axes(sig.inputs, "B") == [0, None, None]
    assert split_axes([type(sig.inputs[0])("y", "float32", ("B*2", 3))], "B") is None
    assert split_axes([type(sig.inputs[0])("y", "float32", ("BB", 3))], "B") == [None]


def cut(tensor):
    """Round float32 toward zero to 10 bits of mantissa."""
    mantissa, exponent = torch.frexp(tensor.double())
    return torch.ldexp(torch.trunc(mantissa * 2**11) / 2**11, exponent).float()


@pytest.mark.parametrize(
    ("fn", "shapes", "plain"),
    [
        (lambda a, b: a @ b, [(5, 64), (64, 7)], ()),
        (lambda a, b: a @ b, [(5, 64), (64,)], ()),
        (torch.bmm, [(3, 5, 64), (3, 64, 7)], ()),
        (nn.functional.linear, [(2, 5, 64), (7, 64), (7,)], (2,)),
        (torch.addmm, [(7,), (5, 64), (64, 7)], (0,)),
        (torch.baddbmm, [(3, 5, 7), (3, 5, 64), (3, 64, 7)], (0,)),
        (lambda a, b: torch.einsum("bik,jk->bij", a, b), [(3, 5, 64), (7, 64)], ()),
    ],
)
def test_products_in_tf32_cut_their_factors_and_nothing_else(fn, shapes, plain):
    make = torch.Generator().manual_seed(len(shapes))
    args = [torch.randn(shape, generator=make) for shape in shapes]
    got = run_eager(lambda *a: fn(*a) + 1e-5, args, {}, tf32=True)
    factors = [a.double() if i in plain else cut(a).double() for i, a in enumerate(args)]
    want = fn(*factors) + 1e-5
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)
    exact = fn(*(a.double() for a in args)) + 1e-5
    assert 1e-4 < (got - exact).abs().max() < 0.1
    # the error that tf32 may make: each product is off by less than 2^-9
    bound = fn(*(a.double().abs() for a in args)) * 2**-9
    assert ((got - exact).abs() <= bound + 1e-5).all()


def test_attention_and_special_values_in_tf32():
    q, k, v = torch.randn(3, 2, 4, 16, 32, generator=torch.Generator().manual_seed(1))
    sdpa = nn.functional.scaled_dot_product_attention
    got = run_eager(sdpa, (q, k, v), {}, tf32=True)
    exact = sdpa(*(t.double() for t in (q, k, v)))
    assert 1e-5 < (got - exact).abs().max() < 1e-2
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0]])
    eye = torch.eye(2)
    assert torch.equal(run_eager(torch.mm, (x, eye), {}, tf32=True).isnan(), (x @ eye).isnan())
    half = torch.randn(4, 8, dtype=torch.bfloat16)
    assert torch.equal(run_eager(torch.mm, (half, half.T), {}, tf32=True), half @ half.T)

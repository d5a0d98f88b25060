"""The host function of an entry computes what `main` does, on memory of its caller."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.hosted import Hosted, dtype_of, filled, tensor
from tests.library.test_plan import OF_ROWS, Before, variants
from tests.planned import TARGET, fused, mlp, mlp_reference, module, numbers, planned
from tvmcap.library.plan import plan

WIDTHS = (8, 16, 16, 4)


@pytest.fixture
def hosted(tmp_path):
    return lambda mod: Hosted(mod, tmp_path)


def layers(seed: int = 0):
    """Weights of ``mlp(WIDTHS)``."""
    return [numbers(a, b, seed=seed) / a**0.5 for a, b in itertools.pairwise(WIDTHS)]


def test_one_kernel(hosted) -> None:
    run = hosted(planned(module(lambda b, x: [b.emit(relax.op.exp(x))], ("B", 3))))
    assert run.sizes == run.constants == ()
    for rows in (1, 7, 64):
        x = numbers(rows, 3)
        (got,) = run([x], [(rows, 3)])
        np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=1e-6)


def test_intermediates_lie_in_storages_of_the_caller(hosted) -> None:
    run = hosted(planned(mlp(WIDTHS)))
    assert len(run.sizes) == 2
    for rows in (5, 1, 33, 0):
        x, weights = numbers(rows, 8), layers(seed=rows)
        (got,) = run([x, *weights], [(rows, 4)], B=rows)
        np.testing.assert_allclose(got, mlp_reference(x, weights), atol=2e-6)


def test_storages_may_be_larger_than_needed_and_are_what_kernels_write(hosted) -> None:
    run = hosted(planned(mlp(WIDTHS)))
    x, weights, out = numbers(3, 8), layers(), filled((3, 4), "float32")
    storages = run.storages(B=100)
    run.function(tensor(x), *map(tensor, weights), out, *storages, 0)
    np.testing.assert_allclose(out.numpy(), mlp_reference(x, weights), atol=2e-6)
    for storage in storages:
        used = storage.numpy()[: 3 * 16 * 4].view(np.float32)
        assert np.isfinite(used).all() and (storage.numpy()[3 * 16 * 4 :] == 255).all()


def test_views_between_kernels_and_an_output_written_through_one(hosted) -> None:
    def make(b, x, w):
        product = b.emit(relax.op.matmul(x, w))
        rows = product.ty.shape.values[0]
        flat = b.emit(relax.op.reshape(product, (rows * 4,)))
        last = b.emit(relax.op.matmul(b.emit(relax.op.reshape(flat, (rows, 4))), w))
        return [b.emit(relax.op.reshape(last, (rows * 2, 2)))]

    run = hosted(planned(module(make, ("B", 4), (4, 4))))
    for rows in (5, 2):
        x, w = numbers(rows, 4), numbers(4, 4)
        (got,) = run([x, w], [(2 * rows, 2)], B=rows)
        wanted = (x.astype(np.float64) @ w @ w).reshape(-1, 2)
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_views_duplicates_and_arguments_as_outputs(hosted) -> None:
    def make(b, x):
        y = b.emit(relax.op.exp(x))
        size = x.ty.shape.values[0] * 4
        return [x, y, y, b.emit(relax.op.reshape(x, (size,))), b.emit(relax.op.reshape(y, (size,)))]

    x = numbers(3, 4)
    y = np.exp(x.astype(np.float64))
    got = hosted(planned(module(make, ("B", 4))))([x], [(3, 4)] * 3 + [(12,)] * 2, B=3)
    for mine, wanted in zip(got, [x, y, y, x.reshape(-1), y.reshape(-1)], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)


def test_constants_come_from_a_function_of_their_own(hosted) -> None:
    mod, weights = mlp((8, 16, 16, 16, 4)), layers(seed=4)
    first, twice, last = map(relax.const, weights)
    named = {"w0": first, "w1": twice, "w2": twice, "w3": last}
    run = hosted(plan_of(relax.transform.BindParams("main", named)(mod)))
    assert sorted(c.numpy().tobytes() for c in run.constants) == sorted(
        w.tobytes() for w in weights
    )
    for rows in (3, 20):
        x = numbers(rows, 8)
        (got,) = run([x], [(rows, 4)], B=rows)
        wanted = mlp_reference(x, [weights[0], weights[1], weights[1], weights[2]])
        np.testing.assert_allclose(got, wanted, atol=2e-6)


def plan_of(mod):
    with TARGET:
        return plan(fused(mod))


def test_the_number_of_rows_chooses_among_variants(hosted) -> None:
    run = hosted(plan(variants(Before)))
    for rows, wanted in OF_ROWS:
        x = numbers(rows, 16)
        (got,) = run([x], [(rows, 16)], B=rows)
        np.testing.assert_allclose(got, wanted(x.astype(np.float64)), rtol=1e-5, atol=1e-5)


@I.ir_module
class Numbers:
    """Kernels that take sizes as numbers."""

    @T.prim_func(private=True, s_tir=True)
    def plus(xh: T.handle, n: T.int64, oh: T.handle):
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(4)))
        o = T.match_buffer(oh, (B, T.int64(4)))
        for i, j in T.grid(B, T.int64(4)):
            with T.sblock("plus"):
                vi, vj = T.axis.remap("SS", [i, j])
                o[vi, vj] = x[vi, vj] + T.Cast("float32", n)

    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        cls = Numbers
        with R.dataflow():
            a = R.call_tir(cls.plus, (x, B), out_ty=R.Tensor((B, 4), "float32"))
            n = R.prim_value(B * 2 + 1)
            y = R.call_tir(cls.plus, (a, n), out_ty=R.Tensor((B, 4), "float32"))
            R.output(y)
        return y


def test_sizes_are_passed_as_numbers(hosted) -> None:
    run = hosted(plan(Numbers))
    for rows in (1, 6):
        x = numbers(rows, 4)
        (got,) = run([x], [(rows, 4)], B=rows)
        np.testing.assert_allclose(got, x + np.float64(3 * rows + 1), rtol=1e-6)


def test_a_size_may_be_known_from_a_later_argument_alone(hosted) -> None:
    """The first argument has twice the rows of the second."""
    builder, rows = relax.BlockBuilder(), tirx.Var("B", "int64")
    shapes = ([rows * 2, 4], [rows, 4])
    twice, once = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in zip(("twice", "once"), shapes, strict=True)
    )
    with builder.function("main", [twice, once]):
        with builder.dataflow():
            both = builder.emit(relax.op.concat([once, once], axis=0))
            result = builder.emit_output(relax.op.multiply(twice, both))
        builder.emit_func_output(result)
    run = hosted(planned(builder.get()))
    for count in (1, 5):
        x, y = numbers(2 * count, 4), numbers(count, 4)
        (got,) = run([x, y], [(2 * count, 4)], B=count)
        np.testing.assert_allclose(got, x.astype(np.float64) * np.concatenate([y, y]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_narrow_tensors_through_views(hosted, dtype: str) -> None:
    """In storages, through views of them, and into an output through one."""

    def make(b, x):
        rows = x.ty.shape.values[0]
        first = b.emit(relax.op.sum(x, axis=[1], keepdims=True))
        spread = b.emit(relax.op.reshape(b.emit(relax.op.subtract(x, first)), (rows * 2, 4)))
        second = b.emit(relax.op.max(spread, axis=[1], keepdims=True))
        return [b.emit(relax.op.reshape(b.emit(relax.op.add(spread, second)), (rows * 8,)))]

    run = hosted(planned(module(make, ("B", 8), dtype=dtype)))
    assert run.sizes
    for rows in (1, 6):
        x = np.random.default_rng(rows).integers(-2, 3, (rows, 8))  # sums are exact in each dtype
        (got,) = run([x.astype(dtype_of(dtype))], [(rows * 8,)], [dtype], B=rows)
        spread = (x - x.sum(1, keepdims=True)).reshape(-1, 4)
        assert (got.astype(np.int64) == (spread + spread.max(1, keepdims=True)).ravel()).all()


def test_a_kernel_with_two_results(hosted) -> None:
    def make(b, x, w):
        pair = b.emit(relax.op.split(b.emit(relax.op.matmul(x, w)), 2, axis=1))
        left, right = b.emit(relax.TupleGetItem(pair, 0)), b.emit(relax.TupleGetItem(pair, 1))
        return [b.emit(relax.op.matmul(left, right)), right]

    x, w = numbers(2, 4), numbers(4, 4)
    product, right = hosted(planned(module(make, (2, 4), (4, 4))))([x, w], [(2, 2), (2, 2)])
    wanted = x.astype(np.float64) @ w
    np.testing.assert_allclose(right, wanted[:, 2:], atol=1e-5)
    np.testing.assert_allclose(product, wanted[:, :2] @ wanted[:, 2:], atol=1e-5)


def test_random_programs_compute_the_same(hosted) -> None:
    """Reductions end every fused group, so that many tensors live across kernels."""
    draw = random.Random()
    for seed in draw.sample(range(10**6), 4):
        check_program(hosted, random.Random(seed), f"seed {seed}")


def check_program(hosted, draw: random.Random, what: str) -> None:
    values: list[tuple[int, int]] = []

    def make(b, x, w):
        pool = [x]
        for _ in range(14):
            left, right = draw.randrange(len(pool)), draw.randrange(len(pool))
            values.append((left, right))
            pool.append(b.emit(relax.op.matmul(b.emit(relax.op.add(pool[left], pool[right])), w)))
        return [pool[-1], pool[-4]]

    run = hosted(planned(module(make, ("B", 8), (8, 8))))
    for rows in (1, 6):
        x, w = numbers(rows, 8), numbers(8, 8) / 4
        pool = [x.astype(np.float64)]
        for left, right in values:
            pool.append((pool[left] + pool[right]) @ w)
        got = run([x, w], [(rows, 8)] * 2, B=rows)
        for mine, wanted in zip(got, (pool[-1], pool[-4]), strict=True):
            most = np.abs(wanted).max()
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4 * most, err_msg=what)

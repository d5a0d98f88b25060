"""Planned modules compute what they should: outputs in place, views, several results."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tvm import relax

from tests.planned import (
    calls,
    fused,
    live_bytes,
    machine,
    mlp,
    mlp_reference,
    module,
    numbers,
    planned,
    planned_bytes,
    run,
)
from tvmcap.graph.rewrite import is_op
from tvmcap.library.plan import is_launch, plan


@pytest.mark.parametrize("residual", [False, True])
def test_an_mlp_computes_the_same(residual) -> None:
    widths = (8, 24, 24, 16, 4)
    main = machine(planned(mlp(widths, residual=residual)))
    weights = [numbers(a, b, seed=1) / a**0.5 for a, b in itertools.pairwise(widths)]
    for rows in (1, 5, 32):
        x = numbers(rows, 8)
        (got,) = run(main, [x, *weights], [(rows, 4)])
        np.testing.assert_allclose(got, mlp_reference(x, weights, residual), atol=2e-6)


def test_outputs_are_written_in_place() -> None:
    """Intermediate results that are outputs too take no storage, and no kernel copies them."""

    def make(b, x, w):
        first = b.emit(relax.op.matmul(x, w))
        second = b.emit(relax.op.matmul(first, w))
        third = b.emit(relax.op.matmul(second, w))
        return [third, first]

    done = planned(module(make, ("B", 4), (4, 4)))
    assert sum(map(is_launch, calls(done))) == 3
    assert planned_bytes(done, {"B": 1}) == 4 * 4  # ``second`` alone
    x, w = numbers(6, 4), numbers(4, 4)
    third, first = run(machine(done), [x, w], [(6, 4), (6, 4)])
    np.testing.assert_allclose(first, x.astype(np.float64) @ w, atol=1e-5)
    np.testing.assert_allclose(third, x.astype(np.float64) @ w @ w @ w, atol=1e-4)


@pytest.mark.parametrize("view_first", [True, False])
def test_an_output_and_a_view_of_it_are_two_tensors(view_first: bool) -> None:
    def make(b, x, w):
        product = b.emit(relax.op.matmul(x, w))
        view = b.emit(relax.op.reshape(product, (3, 8)))
        return [view, product] if view_first else [product, view]

    done = planned(module(make, (6, 4), (4, 4)))
    x, w = numbers(6, 4), numbers(4, 4)
    shapes = [(3, 8), (6, 4)] if view_first else [(6, 4), (3, 8)]
    wanted = x.astype(np.float64) @ w
    for got, shape in zip(run(machine(done), [x, w], shapes), shapes, strict=True):
        np.testing.assert_allclose(got, wanted.reshape(shape), atol=1e-5)


def test_a_reshaped_output_is_written_through_a_view() -> None:
    def make(b, x, w):
        product = b.emit(relax.op.matmul(x, w))
        return [b.emit(relax.op.reshape(product, (product.ty.shape.values[0] * 2, 2)))]

    done = planned(module(make, ("B", 3), (3, 4)))
    assert sum(map(is_launch, calls(done))) == 1
    assert [is_op(c, "reshape") for c in calls(done)].count(True) == 1
    assert planned_bytes(done, {"B": 9}) == 0
    x, w = numbers(5, 3), numbers(3, 4)
    (got,) = run(machine(done), [x, w], [(10, 2)])
    np.testing.assert_allclose(got, (x.astype(np.float64) @ w).reshape(10, 2), atol=1e-5)


def test_views_between_kernels_cost_nothing() -> None:
    def make(b, x, w):
        product = b.emit(relax.op.matmul(x, w))
        flat = b.emit(relax.op.reshape(product, (product.ty.shape.values[0] * 4,)))
        back = b.emit(relax.op.reshape(flat, (product.ty.shape.values[0], 4)))
        return [b.emit(relax.op.matmul(back, w))]

    done = planned(module(make, ("B", 4), (4, 4)))
    assert sum(map(is_launch, calls(done))) == 2
    x, w = numbers(5, 4), numbers(4, 4)
    (got,) = run(machine(done), [x, w], [(5, 4)])
    np.testing.assert_allclose(got, x.astype(np.float64) @ w @ w, atol=1e-5)


@pytest.mark.parametrize("rows", [5, "B"])
def test_the_first_part_of_a_tensor_is_no_view_of_it(rows) -> None:
    """Its kernel copies element by element, as that of a reshape does."""

    def make(b, x, w):
        first = b.emit(relax.op.strided_slice(x, [0], [0], [2], assume_inbound=True))
        product = b.emit(relax.op.matmul(x, w))
        part = b.emit(relax.op.strided_slice(product, [0], [0], [2], assume_inbound=True))
        return [b.emit(relax.op.matmul(first, w)), b.emit(relax.op.matmul(part, w))]

    x, w = numbers(5, 4), numbers(4, 4)
    one, two = run(machine(planned(module(make, (rows, 4), (4, 4)))), [x, w], [(2, 4), (2, 4)])
    wanted = x[:2].astype(np.float64) @ w
    np.testing.assert_allclose(one, wanted, atol=1e-5)
    np.testing.assert_allclose(two, wanted @ w, atol=1e-5)


def test_views_duplicates_and_arguments_as_outputs() -> None:
    def make(b, x):
        y = b.emit(relax.op.exp(x))
        size = x.ty.shape.values[0] * 4
        return [x, y, y, b.emit(relax.op.reshape(x, (size,))), b.emit(relax.op.reshape(y, (size,)))]

    done = planned(module(make, ("B", 4)))
    assert sum(map(is_launch, calls(done))) == 5 and planned_bytes(done, {"B": 1}) == 0
    x = numbers(3, 4)
    got = run(machine(done), [x], [(3, 4)] * 3 + [(12,)] * 2)
    y = np.exp(x.astype(np.float64))
    for mine, wanted in zip(got, [x, y, y, x.reshape(-1), y.reshape(-1)], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)


def test_a_kernel_with_two_results() -> None:
    def make(b, x, w):
        pair = b.emit(relax.op.split(b.emit(relax.op.matmul(x, w)), 2, axis=1))
        left, right = b.emit(relax.TupleGetItem(pair, 0)), b.emit(relax.TupleGetItem(pair, 1))
        return [b.emit(relax.op.matmul(left, right)), right]

    done = planned(module(make, (2, 4), (4, 4)))
    x, w = numbers(2, 4), numbers(4, 4)
    product, right = run(machine(done), [x, w], [(2, 2), (2, 2)])
    wanted = x.astype(np.float64) @ w
    np.testing.assert_allclose(right, wanted[:, 2:], atol=1e-5)
    np.testing.assert_allclose(product, wanted[:, :2] @ wanted[:, 2:], atol=1e-5)


def test_random_programs_compute_the_same() -> None:
    """Reductions end every fused group, so that many tensors live across kernels."""
    draw = random.Random(11)
    values: list[tuple[str, int, int]] = []

    def make(b, x, w):
        pool = [x]
        for _ in range(14):
            left, right = draw.randrange(len(pool)), draw.randrange(len(pool))
            values.append(("matmul", left, right))
            pool.append(b.emit(relax.op.matmul(b.emit(relax.op.add(pool[left], pool[right])), w)))
        return [pool[-1], pool[-4]]

    source = fused(module(make, ("B", 8), (8, 8)))
    done = plan(source)
    main = machine(done)
    for rows in (1, 6):
        x, w = numbers(rows, 8), numbers(8, 8) / 4
        pool = [x.astype(np.float64)]
        for _, left, right in values:
            pool.append((pool[left] + pool[right]) @ w)
        got = run(main, [x, w], [(rows, 8)] * 2)
        for mine, wanted in zip(got, (pool[-1], pool[-4]), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    bound = live_bytes(source, {"B": 1})
    assert bound <= planned_bytes(done, {"B": 1}) <= 2 * bound

"""Chains of reshapes and transposes: what they do, told from their dimensions alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tvm import relax, tirx

from tvmcap.graph import views

SEEDS = range(40)


def chain(rng, shape, length):
    """Apply random views to a tensor that holds its own positions; yield (value, type, array)."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "int64"))
    array = np.arange(math.prod(shape)).reshape(shape)
    steps = []
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(length):
                op, array = _step(rng, value, array)
                value = builder.emit(op)
                steps.append((builder.lookup_binding(value), array))
            builder.emit_output(value)
        builder.emit_func_output(value)
    return x, steps


def _step(rng, value, array):
    kind = rng.choice(["permute", "reshape", "expand", "squeeze"])
    if kind == "permute":
        axes = [int(a) for a in rng.permutation(array.ndim)]
        return relax.op.permute_dims(value, axes), array.transpose(axes)
    if kind == "expand":
        axis = int(rng.integers(array.ndim + 1))
        return relax.op.expand_dims(value, axis), np.expand_dims(array, axis)
    ones = [i for i, e in enumerate(array.shape) if e == 1]
    if kind == "squeeze" and ones:
        return relax.op.squeeze(value, [ones[0]]), np.squeeze(array, ones[0])
    shape = _factors(rng, array.size)
    return relax.op.reshape(value, shape), array.reshape(shape)


def _factors(rng, size):
    """Split a size into random factors."""
    shape = []
    while size > 1 and len(shape) < 3:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        shape.append(int(rng.choice(divisors)))
        size //= shape[-1]
    return [*shape, size]


def rebuilt(view, source):
    """Make the tensor from its source with what the view says."""
    atoms = sorted((atom for dim in view.dims for atom in dim), key=lambda atom: atom.place)
    split = source.reshape([atom.extent for atom in atoms])
    order = [atoms.index(atom) for dim in view.dims for atom in dim]
    return split.transpose(order).reshape([views.size(dim) for dim in view.dims])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_is_what_numpy_makes_of_it(seed) -> None:
    rng = np.random.default_rng(seed)
    x, steps = chain(rng, (2, 6, 1, 4), 6)
    source = np.arange(48).reshape(2, 6, 1, 4)
    view = views.whole(x)
    for value, array in steps:
        view = views.apply(view, value)
        if view is None:  # a reshape across dimensions that a transpose parted
            return
        np.testing.assert_array_equal(rebuilt(view, source), array)
        flat = bool((array.reshape(-1) == np.arange(48)).all())
        assert flat == (not view.moved())


def test_most_chains_are_understood() -> None:
    found = []
    for seed in SEEDS:
        x, steps = chain(np.random.default_rng(seed), (2, 6, 1, 4), 6)
        view = views.whole(x)
        for value, _ in steps:
            view = view and views.apply(view, value)
        found.append(view is not None)
    assert sum(found) > len(found) // 3


def reshaped(shape, new):
    return views.reshape(views.whole(relax.Var("x", relax.TensorType(shape, "float32"))).dims, new)


def test_symbolic_dimensions_merge_and_stay_whole() -> None:
    b, t = (tirx.Var(name, "int64") for name in "bt")
    merged = reshaped([b, t, 64], [b * t, 64])
    assert [len(dim) for dim in merged] == [2, 1]
    assert [len(dim) for dim in reshaped([b, t, 64], [b, 1, t, 4, 16])] == [1, 0, 1, 1, 1]
    assert reshaped([b, 64], [t, 64]) is None
    assert reshaped([b * t, 64], [b, t, 64]) is None  # a symbolic factor of a symbolic size


@pytest.mark.parametrize(
    ("axes", "transposed", "whole"),
    [
        ([0, 1, 2, 3], False, False),
        ([0, 1, 3, 2], True, False),
        ([0, 2, 1, 3], False, True),  # heads: not in place
        ([1, 0, 3, 2], False, True),
    ],
)
def test_an_operand_is_read_in_place_where_two_dimensions_swap(axes, transposed, whole) -> None:
    x = relax.Var("x", relax.TensorType((2, 3, 4, 5), "float32"))
    call = relax.op.permute_dims(x, axes)
    y = relax.Var("y", relax.TensorType([(2, 3, 4, 5)[a] for a in axes], "float32"))
    operand = views.Operand.of(views.apply(views.whole(x), call), views.whole(y))
    assert operand.transposed == transposed
    assert operand.source.same_as(y if whole else x)
    assert operand.layout("mk") == ("km" if transposed else "mk")

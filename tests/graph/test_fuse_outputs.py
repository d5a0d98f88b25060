"""A product keeps its elementwise followers though several of the results are needed outside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax

from tests.libs import quick
from tests.planned import calls, module
from tvmcap.base import codegen
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.graph.group import Graph, fuse_ops, fused, in_order, join
from tvmcap.graph.merge import merge
from tvmcap.kernel import spaces

TARGET = codegen.make_target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})


def serves(func) -> bool:
    return spaces.find(func, TARGET) is not None


def joined(mod, serves=serves):
    """Return the names of the kernels and how many results each has."""
    with TARGET:
        done = fuse(legalize(mod), serves)
    relax.analysis.well_formed(done)
    results = [c.ty_args[0] for c in calls(done)]
    counts = [len(r.fields) if isinstance(r, relax.TupleType) else 1 for r in results]
    return [c.args[0].name_hint for c in calls(done)], counts


def linear(builder, x, w, b):
    return builder.emit(relax.op.add(builder.emit(relax.op.matmul(x, w)), b))


SHAPES = (("B", 8), (8, 16), (16,))


def both(builder, x, w, b):
    h = linear(builder, x, w, b)
    return [h, builder.emit(relax.op.nn.gelu(h))]


def test_the_activation_and_what_it_is_made_of_are_one_kernel() -> None:
    names, counts = joined(module(both, *SHAPES))
    assert names == ["fused_matmul_add_gelu"] and counts == [2]


def test_without_a_kernel_for_both_they_stay_apart() -> None:
    assert joined(module(both, *SHAPES), lambda func: False)[1] == [1, 1]
    assert joined(module(both, *SHAPES), None)[1] == [1, 1]


def test_followers_of_followers_join_and_a_reduction_does_not() -> None:
    def make(builder, x, w, b):
        h = linear(builder, x, w, b)
        y = builder.emit(relax.op.nn.gelu(h))
        z = builder.emit(relax.op.multiply(y, h))
        s = builder.emit(relax.op.sum(z, axis=-1))
        return [h, z, s, builder.emit(relax.op.nn.relu(h))]

    names, counts = joined(module(make, *SHAPES))
    assert len(names) == 2 and names[1] == "sum" and counts == [3, 1]
    assert {"matmul", "gelu", "multiply", "relu"} <= set(names[0].split("_"))


def test_a_value_that_nobody_needs_outside_is_not_stored() -> None:
    def make(builder, x, w, b):
        h = linear(builder, x, w, b)
        return [builder.emit(relax.op.multiply(builder.emit(relax.op.nn.gelu(h)), h))]

    assert joined(module(make, *SHAPES))[1] == [1]


def test_a_follower_that_waits_for_another_kernel_reads_its_result() -> None:
    """The gate's kernel, which comes second in main, runs first."""

    def make(builder, x, w, b):
        h = linear(builder, x, w, b)
        gate = builder.emit(relax.op.matmul(x, w))
        return [h, gate, builder.emit(relax.op.multiply(h, gate))]

    names, counts = joined(module(make, *SHAPES))
    assert names == ["matmul", "fused_matmul_add_multiply"] and counts == [1, 2]


def test_no_cycle() -> None:
    """A follower that needs a second kernel made of the product's result stays apart."""

    def make(builder, x, w, b):
        h = linear(builder, x, w, b)
        s = builder.emit(relax.op.nn.softmax(h))
        return [h, builder.emit(relax.op.multiply(h, s))]

    names, counts = joined(module(make, *SHAPES))
    assert names[0] == "fused_matmul_add" and sum(counts) == len(names)


def test_a_follower_of_another_shape_stays_apart() -> None:
    def make(builder, x, w, b):
        h = linear(builder, x, w, b)
        more = builder.emit(relax.op.expand_dims(h, [0]))
        wide = builder.emit(relax.op.broadcast_to(more, (3, *h.ty.shape.values)))
        return [h, builder.emit(relax.op.exp(wide))]

    names, _ = joined(module(make, *SHAPES))
    assert names[0] == "fused_matmul_add" and len(names) == 2


def test_numbers_are_those_of_the_separate_kernels() -> None:
    x, w, b = (torch.randn(s, generator=torch.Generator().manual_seed(7)) for s in SHAPES_AT(37))

    def fn(x, w, b):
        h = x @ w + b
        y = F.gelu(h)
        return h, y * h, torch.where(h > 0, y, b)

    lib = quick(fn, x, w, b, dynamic={"x": {0: "B"}})
    assert lib.manifest.kernels_per_call == 1
    for rows in (37, 1, 5):
        wanted = fn(*(t.double() for t in (x[:rows], w, b)))
        for mine, theirs in zip(lib(x[:rows], w, b), wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def SHAPES_AT(rows):
    return [tuple(rows if e == "B" else e for e in s) for s in SHAPES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_outputs_of_16_bits_are_right(dtype) -> None:
    make = torch.Generator().manual_seed(3)
    args = [torch.randn(s, generator=make).to(dtype) for s in SHAPES_AT(9)]

    def fn(x, w, b):
        h = x @ w + b
        return h, F.gelu(h)

    lib = quick(fn, *args)
    assert lib.manifest.kernels_per_call == 1
    for mine, wanted in zip(lib(*args), fn(*(t.double() for t in args)), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), wanted, rtol=2 * eps, atol=8 * eps)


def test_a_group_may_read_no_tensor_at_all() -> None:
    """Its extents follow from its result."""

    def make(builder, x):
        ones = builder.emit(relax.op.full(x.ty.shape, relax.const(1.5)))
        return [builder.emit(relax.op.exp(ones))]

    mod = module(make, ("B", 4))
    with TARGET:
        graph = Graph(legalize(mod))
        parts = fuse_ops(graph)
    assert parts == [[0, 1]]
    done = relax.transform.FuseTIR()(join(graph, parts))
    relax.analysis.well_formed(done)


def test_order_of_parts_respects_what_they_read() -> None:
    def make(builder, x, w):
        first = builder.emit(relax.op.exp(x))
        product = builder.emit(relax.op.matmul(x, w))
        return [builder.emit(relax.op.add(product, first)), builder.emit(relax.op.tanh(first))]

    with TARGET:
        graph = Graph(legalize(module(make, ("B", 8), (8, 8))))
    ordered = in_order(graph, [[0], [1, 2], [3]])
    assert [list(p) for p in ordered] == [[0], [1, 2], [3]]
    assert [list(p) for p in in_order(graph, [[1, 2], [0, 3]])] == [[0, 3], [1, 2]]
    func = fused(graph, [1, 2])
    assert len(func.params) == 4


def deep(layers: int):
    """A chain of layers that each keep their pre-activation."""

    def make(builder, x, *weights):
        kept = []
        for w in weights:
            h = builder.emit(relax.op.matmul(x, w))
            y = builder.emit(relax.op.nn.gelu(h))
            x = builder.emit(relax.op.add(builder.emit(relax.op.nn.softmax(y)), x))
            kept += [h, y]
        return [*kept, x]

    return module(make, ("B", 8), *[(8, 8)] * layers)


def test_work_grows_with_the_layers_and_not_with_their_square() -> None:
    """Counted in kernels tried, of which each layer has as many."""
    tries = []
    for layers in (8, 64):
        count = 0

        def counted(func):
            nonlocal count
            count += 1
            return serves(func)

        with TARGET:
            mod = legalize(deep(layers))
            parts = merge(Graph(mod), fuse_ops(Graph(mod)), counted)
        tries.append(count)
        assert len(parts) == 2 * layers
    assert tries[1] == 8 * tries[0]

"""Row-wise operators and their elementwise neighbours are one kernel where one serves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax

from tests.libs import quick
from tests.planned import calls, module
from tvmcap import pipeline
from tvmcap.base import codegen
from tvmcap.graph.fuse import fuse, legalize

CUDA = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})
LLVM = codegen.make_target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})
TARGETS = pytest.mark.parametrize("target", [CUDA, LLVM], ids=["cuda", "llvm"])


def joined(mod, target):
    """Return the names of the kernels and how many results each has."""
    with target:
        done = fuse(legalize(mod), lambda func: pipeline.one_kernel(func, target))
    relax.analysis.well_formed(done)
    results = [c.ty_args[0] for c in calls(done)]
    counts = [len(r.fields) if isinstance(r, relax.TupleType) else 1 for r in results]
    return [c.args[0].name_hint for c in calls(done)], counts


def norm(builder, x, g):
    return builder.emit(relax.op.nn.layer_norm(x, g, g, axes=[-1]))


@TARGETS
def test_a_residual_and_the_norm_after_it(target) -> None:
    def make(builder, x, r, g):
        h = builder.emit(relax.op.add(x, r))
        return [h, norm(builder, h, g)]

    names, counts = joined(module(make, ("B", 4, 64), ("B", 4, 64), (64,)), target)
    assert names == ["fused_add_layer_norm"] and counts == [2]


@TARGETS
def test_a_norm_of_several_operators(target) -> None:
    def make(builder, x, g):
        square = builder.emit(relax.op.multiply(x, x))
        mean = builder.emit(relax.op.mean(square, axis=-1, keepdims=True))
        shifted = builder.emit(relax.op.add(mean, relax.const(1e-6)))
        scaled = builder.emit(relax.op.multiply(x, builder.emit(relax.op.rsqrt(shifted))))
        return [builder.emit(relax.op.multiply(scaled, g))]

    names, counts = joined(module(make, ("B", 64), (64,)), target)
    assert len(names) == 1 and counts == [1]


@TARGETS
def test_two_reductions_one_after_the_other(target) -> None:
    def make(builder, x, g):
        y = builder.emit(relax.op.multiply(builder.emit(relax.op.nn.softmax(x)), g))
        return [y, builder.emit(relax.op.sum(y, axis=-1, keepdims=True))]

    names, counts = joined(module(make, ("B", 64), (64,)), target)
    assert len(names) == 1 and counts == [2]


@TARGETS
def test_a_product_and_a_norm_stay_two_kernels(target) -> None:
    def make(builder, x, w, r, g):
        h = builder.emit(relax.op.add(builder.emit(relax.op.matmul(x, w)), r))
        return [h, builder.emit(relax.op.nn.relu(norm(builder, h, g)))]

    shapes = (("B", 64), (64, 64), ("B", 64), (64,))
    names, counts = joined(module(make, *shapes), target)
    assert names == ["fused_matmul_add", "fused_layer_norm_relu"] and counts == [1, 1]


@TARGETS
def test_what_reduces_the_rows_stays_apart(target) -> None:
    def make(builder, x, r, g):
        h = builder.emit(relax.op.add(x, r))
        return [norm(builder, h, g), builder.emit(relax.op.sum(h, axis=0))]

    names, counts = joined(module(make, ("B", 64), ("B", 64), (64,)), target)
    assert names == ["fused_add_layer_norm", "sum"] and counts == [2, 1]


@TARGETS
def test_other_rows_stay_apart(target) -> None:
    """The second softmax is over twice as many rows."""

    def make(builder, x):
        y = builder.emit(relax.op.nn.softmax(x))
        both = builder.emit(relax.op.concat([y, y], axis=0))
        return [y, builder.emit(relax.op.nn.softmax(both))]

    names, _ = joined(module(make, ("B", 64)), target)
    assert len(names) == 3


@TARGETS
def test_a_weight_that_others_need_too_is_made_by_its_own_kernel(target) -> None:
    def make(builder, x, y, g):
        g = builder.emit(relax.op.exp(g))
        return [norm(builder, x, g), norm(builder, y, g)]

    names, counts = joined(module(make, ("B", 64), ("S", 64), (64,)), target)
    assert sorted(names) == ["layer_norm", "layer_norm", "tir_exp"] and counts == [1, 1, 1]


def test_off_without_a_predicate() -> None:
    def make(builder, x, r, g):
        h = builder.emit(relax.op.add(x, r))
        return [h, norm(builder, h, g)]

    with LLVM:
        done = fuse(legalize(module(make, ("B", 64), ("B", 64), (64,))))
    assert len(calls(done)) == 2


def normalised(x, r, g):
    h = x + r
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = F.gelu(h * scale * g)
    return h, y, y.amax(-1), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_on_llvm(dtype) -> None:
    make = torch.Generator().manual_seed(11)
    x, r, g = (torch.randn(s, generator=make).to(dtype) for s in ((7, 3, 100), (7, 3, 100), (100,)))
    lib = quick(normalised, x, r, g, dynamic={"x": {0: "B"}, "r": {0: "B"}})
    assert lib.manifest.kernels_per_call == 1
    for rows in (7, 1, 2):
        got = lib(x[:rows], r[:rows], g)
        wanted = normalised(x[:rows].double(), r[:rows].double(), g.double())
        eps = 1e-5 if dtype is torch.float32 else 2**-6
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine.double(), theirs, rtol=eps, atol=eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_on_the_gpu(dtype) -> None:
    make = torch.Generator().manual_seed(11)
    shapes = ((70, 3, 1000), (70, 3, 1000), (1000,))
    x, r, g = (torch.randn(s, generator=make).to(dtype).cuda() for s in shapes)
    lib = quick(normalised, x, r, g, dynamic={"x": {0: "B"}, "r": {0: "B"}}, target="cuda")
    assert lib.manifest.kernels_per_call == 1
    for rows in (70, 1):
        got = lib(x[:rows], r[:rows], g)
        wanted = normalised(x[:rows].double(), r[:rows].double(), g.double())
        eps = 1e-5 if dtype is torch.float32 else 2**-6
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=eps, atol=eps)

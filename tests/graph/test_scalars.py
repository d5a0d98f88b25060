"""Constant numbers become immediates of the kernels, and small powers products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.libs import quick, values
from tvmcap.graph.scalars import inline_scalars


@I.ir_module
class Before:
    @T.prim_func(private=True, s_tir=True)
    def where(
        x: T.Buffer((T.int64(4),), "float32"),
        low: T.Buffer((), "float32"),
        y: T.Buffer((T.int64(4),), "float32"),
    ):
        T.func_attr({"tirx.noalias": True})
        for i in range(T.int64(4)):
            with T.sblock("where"):
                vi = T.axis.spatial(T.int64(4), i)
                y[vi] = T.Select(x[vi] > low[()], x[vi], low[()])

    @T.prim_func(private=True, s_tir=True)
    def power(x: T.Buffer((T.int64(4),), "float32"), y: T.Buffer((T.int64(4),), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i in range(T.int64(4)):
            with T.sblock("power"):
                vi = T.axis.spatial(T.int64(4), i)
                y[vi] = T.pow(x[vi], T.float32(3)) + T.pow(x[vi], T.float32(0.5))

    @R.function
    def main(x: R.Tensor((4,), "float32"), s: R.Tensor((), "float32")) -> R.Tuple(
        R.Tensor((4,), "float32"), R.Tensor((4,), "float32")
    ):
        cls = Before
        with R.dataflow():
            a = R.call_tir(
                cls.where, (x, R.const(-2.0, "float32")), out_ty=R.Tensor((4,), "float32")
            )
            b = R.call_tir(cls.where, (a, s), out_ty=R.Tensor((4,), "float32"))
            c = R.call_tir(cls.power, (a,), out_ty=R.Tensor((4,), "float32"))
            R.output(b, c)
        return b, c


@I.ir_module
class After:
    @T.prim_func(private=True, s_tir=True)
    def where(
        x: T.Buffer((T.int64(4),), "float32"),
        low: T.Buffer((), "float32"),
        y: T.Buffer((T.int64(4),), "float32"),
    ):
        T.func_attr({"tirx.noalias": True})
        for i in range(T.int64(4)):
            with T.sblock("where"):
                vi = T.axis.spatial(T.int64(4), i)
                y[vi] = T.Select(x[vi] > low[()], x[vi], low[()])

    @T.prim_func(private=True, s_tir=True)
    def where1(x: T.Buffer((T.int64(4),), "float32"), y: T.Buffer((T.int64(4),), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i in range(T.int64(4)):
            with T.sblock("where"):
                vi = T.axis.spatial(T.int64(4), i)
                y[vi] = T.Select(x[vi] > T.float32(-2), x[vi], T.float32(-2))

    @T.prim_func(private=True, s_tir=True)
    def power1(x: T.Buffer((T.int64(4),), "float32"), y: T.Buffer((T.int64(4),), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i in range(T.int64(4)):
            with T.sblock("power"):
                vi = T.axis.spatial(T.int64(4), i)
                y[vi] = x[vi] * x[vi] * x[vi] + T.pow(x[vi], T.float32(0.5))

    @R.function
    def main(x: R.Tensor((4,), "float32"), s: R.Tensor((), "float32")) -> R.Tuple(
        R.Tensor((4,), "float32"), R.Tensor((4,), "float32")
    ):
        cls = After
        with R.dataflow():
            a = R.call_tir(cls.where1, (x,), out_ty=R.Tensor((4,), "float32"))
            b = R.call_tir(cls.where, (a, s), out_ty=R.Tensor((4,), "float32"))
            c = R.call_tir(cls.power1, (a,), out_ty=R.Tensor((4,), "float32"))
            d: R.Tensor((4,), "float32") = b
            e: R.Tensor((4,), "float32") = c
            R.output(d, e)
        return d, e


def test_numbers_become_immediates_and_small_powers_products() -> None:
    tvm.ir.assert_structural_equal(inline_scalars(Before), After)


def test_kernels_without_either_are_left_alone() -> None:
    assert inline_scalars(After).same_as(After)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_those_of_torch(dtype) -> None:
    """A selected number, squares and cubes, of negative numbers and of infinities too."""

    def fn(x, keep):
        return torch.where(keep, x, -1.5), x.pow(2), x.pow(3)

    x = values(6, 16, dtype=dtype, seed=3)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, -0.0])
    keep = values(6, 16, seed=4) > 0
    got = quick(fn, x, keep)(x, keep)
    for mine, theirs in zip(got, fn(x, keep), strict=True):
        tolerance = 4 * torch.finfo(dtype).eps
        mine, theirs = (np.asarray(y.float()) for y in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=tolerance)


def test_integers_keep_their_type() -> None:
    x = torch.arange(-4, 5, dtype=torch.int32)
    (got,) = (quick(lambda x: x.pow(2) + torch.where(x > 1, x, 7), x)(x),)
    assert got.dtype == torch.int32
    assert torch.equal(got, x.pow(2) + torch.where(x > 1, x, 7))

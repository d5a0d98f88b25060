"""Legalize makes one kernel an operator; fuse puts elementwise work into its producer's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.base.errors import BuildError
from tvmcap.graph.fuse import fuse, legalize, own_outputs
from tvmcap.graph.rewrite import outputs_of

TARGET = tvm.target.Target({"kind": "llvm"})


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        with R.dataflow():
            e: R.Tensor((B, 4), "float32") = R.exp(x)
            y: R.Tensor((B, 4), "float32") = R.add(e, x)
            R.output(y)
        return y


@I.ir_module
class Legal:
    @T.prim_func(private=True, s_tir=True)
    def add(eh: T.handle, xh: T.handle, oh: T.handle):
        T.func_attr({"op_pattern": 0, "tirx.noalias": True})
        B = T.int64()
        e = T.match_buffer(eh, (B, T.int64(4)))
        x = T.match_buffer(xh, (B, T.int64(4)))
        o = T.match_buffer(oh, (B, T.int64(4)))
        for i, j in T.grid(B, T.int64(4)):
            with T.sblock("T_add"):
                vi, vj = T.axis.remap("SS", [i, j])
                o[vi, vj] = e[vi, vj] + x[vi, vj]

    @T.prim_func(private=True, s_tir=True)
    def tir_exp(xh: T.handle, oh: T.handle):
        T.func_attr({"op_pattern": 0, "tirx.noalias": True})
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(4)))
        o = T.match_buffer(oh, (B, T.int64(4)))
        for i, j in T.grid(B, T.int64(4)):
            with T.sblock("compute"):
                vi, vj = T.axis.remap("SS", [i, j])
                o[vi, vj] = T.exp(x[vi, vj])

    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        cls = Legal
        with R.dataflow():
            e = R.call_tir(cls.tir_exp, (x,), out_ty=R.Tensor((B, 4), "float32"))
            y = R.call_tir(cls.add, (e, x), out_ty=R.Tensor((B, 4), "float32"))
            R.output(y)
        return y


@I.ir_module
class Fused:
    @T.prim_func(private=True, s_tir=True)
    def fused_tir_exp_add(xh: T.handle, oh: T.handle):
        T.func_attr({"tirx.noalias": True})
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(4)))
        o = T.match_buffer(oh, (B, T.int64(4)))
        e = T.sblock_alloc_buffer((B, T.int64(4)))
        for i, j in T.grid(B, T.int64(4)):
            with T.sblock("compute"):
                vi, vj = T.axis.remap("SS", [i, j])
                e[vi, vj] = T.exp(x[vi, vj])
        for i, j in T.grid(B, T.int64(4)):
            with T.sblock("T_add"):
                vi, vj = T.axis.remap("SS", [i, j])
                o[vi, vj] = e[vi, vj] + x[vi, vj]

    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        cls = Fused
        with R.dataflow():
            y = R.call_tir(cls.fused_tir_exp_add, (x,), out_ty=R.Tensor((B, 4), "float32"))
            R.output(y)
        return y


@I.ir_module
class Outputs:
    """Returns an argument, a kernel's result twice, and views of both."""

    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tuple(
        R.Tensor(("B", 4), "float32"),
        R.Tensor(("B", 4), "float32"),
        R.Tensor(("B", 4), "float32"),
        R.Tensor(("B * 4",), "float32"),
        R.Tensor(("B * 4",), "float32"),
    ):
        B = T.int64()
        with R.dataflow():
            y: R.Tensor((B, 4), "float32") = R.exp(x)
            v = R.reshape(x, (B * 4,))
            z = R.reshape(y, (B * 4,))
            out = (x, y, y, v, z)
            R.output(out)
        return out


def two_products(fused_between: bool):
    """Two matmuls; the second reads an elementwise result of the first, or a reduction of it."""
    builder = relax.BlockBuilder()
    n = tirx.Var("B", "int64")
    x = relax.Var("x", relax.TensorType((n, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 8), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            h = builder.emit(relax.op.matmul(x, w))
            h = builder.emit(relax.op.nn.gelu(h) if fused_between else relax.op.nn.softmax(h))
            y = builder.emit_output(relax.op.matmul(h, w))
        builder.emit_func_output(y)
    return builder.get()


def calls(mod):
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [b.value.args[0].name_hint for b in bindings if isinstance(b.value, relax.Call)]


def test_legalize() -> None:
    with TARGET:
        tvm.ir.assert_structural_equal(legalize(Before), Legal)


def test_legalize_leaves_kernels_alone() -> None:
    with TARGET:
        tvm.ir.assert_structural_equal(legalize(Legal), Legal)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: relax.op.memory.view(x, (12,)), r"relax\.memory\.view"),
        (relax.op.unique, r"relax\.run\.unique"),
    ],
)
def test_an_operator_without_a_kernel_is_named(make, name) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(make(x))
        builder.emit_func_output(y)
    with TARGET, pytest.raises(BuildError, match=f"no kernel for .*{name}.*PyTorch"):
        legalize(builder.get())


def test_fuse() -> None:
    with TARGET:
        tvm.ir.assert_structural_equal(fuse(Legal), Fused)


def test_fuse_leaves_a_lone_kernel_alone() -> None:
    with TARGET:
        once = fuse(Legal)
        tvm.ir.assert_structural_equal(fuse(once), once)


@pytest.mark.parametrize(("between", "kernels"), [(True, 2), (False, 3)])
def test_elementwise_joins_its_producer_and_a_reduction_does_not(
    between: bool, kernels: int
) -> None:
    with TARGET:
        names = calls(fuse(legalize(two_products(between))))
    assert len(names) == kernels
    assert ("gelu" in names[0]) == between


def results(mod):
    """Values of main's outputs, aliases followed."""
    values = {b.var: b.value for block in mod["main"].body.blocks for b in block.bindings}

    def follow(var):
        return follow(values[var]) if isinstance(var, relax.Var) and var in values else var

    return [follow(v) for v in outputs_of(mod["main"])]


def test_each_output_gets_a_kernel_that_writes_it() -> None:
    """An argument and a repeated result are copied; a view is a kernel of its own already."""
    with TARGET:
        done = legalize(Outputs)
    kernels = [r.args[0].name_hint for r in results(done)]
    assert [k.startswith("copy") for k in kernels] == [True, False, True, False, False]
    types = [str(t.shape) for t in Outputs["main"].ret_ty.fields]
    assert [str(t.shape) for t in done["main"].ret_ty.fields] == types


def test_a_constant_output_gets_a_kernel_too() -> None:
    """Also one that only folding makes constant, and one that reads no argument at all."""

    @I.ir_module
    class Constants:
        @R.function
        def main(
            x: R.Tensor((2,), "float32"),
        ) -> R.Tuple(R.Tensor((2,), "float32"), R.Tensor((), "float32"), R.Tensor((2,), "float32")):
            with R.dataflow():
                y: R.Tensor((2,), "float32") = R.exp(x)
                c: R.Tensor((), "float32") = R.add(R.const(1.0, "float32"), R.const(2.0, "float32"))
                o: R.Tensor((2,), "float32") = R.ones(R.shape([2]), "float32")
                R.output(y, c, o)
            return (y, c, o)

    with TARGET:
        done = fuse(legalize(Constants))
    assert all(isinstance(r, relax.Call) for r in results(done))
    assert len({id(r) for r in results(done)}) == 3


def test_parts_of_one_result_are_not_copied() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            pair = builder.emit(relax.op.split(x, 2, axis=1))
            first = builder.emit(relax.TupleGetItem(pair, 0))
            again = builder.emit(relax.TupleGetItem(pair, 0))
            second = builder.emit(relax.TupleGetItem(pair, 1))
            parts = [builder.emit_output(v) for v in (first, second, again)]
        builder.emit_func_output(relax.Tuple(parts))
    with TARGET:
        done = legalize(builder.get())
    copies = [
        isinstance(r, relax.Call) and r.args[0].name_hint.startswith("copy") for r in results(done)
    ]
    assert copies == [False, False, True]


def test_own_outputs_compute_the_same() -> None:
    with TARGET:
        mod = legalize(Outputs)
    machine = relax.VirtualMachine(tvm.compile(mod, target=TARGET), tvm.cpu())
    x = np.random.default_rng(3).standard_normal((5, 4), dtype=np.float32)
    got = [np.from_dlpack(t) for t in machine["main"](tvm.runtime.tensor(x))]
    wanted = [x, np.exp(x), np.exp(x), x.reshape(-1), np.exp(x).reshape(-1)]
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_own_outputs_leaves_distinct_results_alone() -> None:
    tvm.ir.assert_structural_equal(own_outputs(Before), Before)

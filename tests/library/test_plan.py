"""The plan: outputs in place, intermediates in shared storage."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.planned import (
    calls,
    fused,
    live_bytes,
    machine,
    mlp,
    module,
    numbers,
    planned,
    planned_bytes,
    run,
)
from tvmcap import pipeline
from tvmcap.base.errors import ContractError
from tvmcap.library.plan import is_launch, plan


@I.ir_module
class Before:
    @T.prim_func(private=True, s_tir=True)
    def double(xh: T.handle, oh: T.handle):
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(16)))
        o = T.match_buffer(oh, (B, T.int64(16)))
        for i, j in T.grid(B, T.int64(16)):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                o[vi, vj] = x[vi, vj] + x[vi, vj]

    @R.function
    def main(x: R.Tensor(("B", 16), "float32")) -> R.Tensor(("B", 16), "float32"):
        B = T.int64()
        cls = Before
        with R.dataflow():
            a = R.call_tir(cls.double, (x,), out_ty=R.Tensor((B, 16), "float32"))
            b = R.call_tir(cls.double, (a,), out_ty=R.Tensor((B, 16), "float32"))
            c = R.call_tir(cls.double, (b,), out_ty=R.Tensor((B, 16), "float32"))
            y = R.call_tir(cls.double, (c,), out_ty=R.Tensor((B, 16), "float32"))
            R.output(y)
        return y


@I.ir_module
class After:
    I.module_attrs({"tvmcap.storage": {"(B)": 128}})

    @T.prim_func(private=True, s_tir=True)
    def double(xh: T.handle, oh: T.handle):
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(16)))
        o = T.match_buffer(oh, (B, T.int64(16)))
        for i, j in T.grid(B, T.int64(16)):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                o[vi, vj] = x[vi, vj] + x[vi, vj]

    @R.function(private=True)
    def main(x: R.Tensor(("B", 16), "float32"), out0: R.Tensor(("B", 16), "float32")) -> R.Tuple():
        B = T.int64()
        R.func_attr({"relax.force_pure": True, "tvmcap.outputs": 1})
        cls = After
        first = R.memory.alloc_storage(R.shape([T.int64(64) * B]), 0, "global", "uint8")
        second = R.memory.alloc_storage(R.shape([T.int64(64) * B]), 0, "global", "uint8")
        a: R.Tensor((B, 16), "float32") = R.memory.alloc_tensor(
            first, 0, R.shape([B, 16]), "float32"
        )
        _: R.Tuple() = cls.double(x, a)
        b: R.Tensor((B, 16), "float32") = R.memory.alloc_tensor(
            second, 0, R.shape([B, 16]), "float32"
        )
        _1: R.Tuple() = cls.double(a, b)
        c: R.Tensor((B, 16), "float32") = R.memory.alloc_tensor(
            first, 0, R.shape([B, 16]), "float32"
        )
        _2: R.Tuple() = cls.double(b, c)
        _3: R.Tuple() = cls.double(c, out0)
        return R.tuple()


@relax.expr_functor.mutator
class _Untyped(relax.PyExprMutator):
    """Takes the result types off calls of kernels: the script cannot write them."""

    def visit_call_(self, call):
        kernel = isinstance(call.op, tvm.ir.GlobalVar)
        return relax.Call(call.op, call.args, call.attrs) if kernel else call


def test_destinations_and_shared_storage() -> None:
    done = plan(Before)
    functions = {
        g: _Untyped().visit_expr(f) if g.name_hint == "main" else f
        for g, f in done.functions.items()
    }
    tvm.ir.assert_structural_equal(tvm.IRModule(functions, attrs=done.attrs), After)
    assert {str(k): int(v) for k, v in done.attrs["tvmcap.storage"].items()} == {"(B)": 128}


def test_a_single_kernel_allocates_nothing() -> None:
    done = planned(module(lambda b, x: [b.emit(relax.op.exp(x))], ("B", 3)))
    assert [is_launch(c) for c in calls(done)] == [True]
    assert dict(done.attrs["tvmcap.storage"]) == {}


@pytest.mark.parametrize(
    "widths",
    [(64,) * 5, (32, 128, 64, 96, 16), (16, 512, 16, 512, 16), (256, 64, 128, 64, 8)],
    ids=str,
)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [1, 24, "B"])
def test_peak_of_a_four_layer_mlp(widths, residual, rows) -> None:
    source = fused(mlp(widths, rows, residual))
    done = plan(source)
    for size in (1, 7, 128, 4096) if rows == "B" else (rows,):
        bound = live_bytes(source, {"B": size})
        assert bound <= planned_bytes(done, {"B": size}) <= 1.05 * bound
    if rows == "B":
        assert pipeline.peak_bytes(done) is None
    else:
        assert pipeline.peak_bytes(done) == planned_bytes(done, {})


def test_peak_at_the_upper_bound_of_a_dimension() -> None:
    mod = mlp((64,) * 5)
    mod["main"] = mod["main"].with_attr("tir_var_upper_bound", {"B": 100})
    assert pipeline.peak_bytes(planned(mod)) == 2 * 100 * 64 * 4


def test_an_output_that_no_kernel_writes_is_refused() -> None:
    @I.ir_module
    class Passes:
        @R.function
        def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            return x

    with pytest.raises(ContractError, match="fuse pass"):
        plan(Passes)


#: Numbers of rows, and what ``Before`` with ``variants`` makes of so many.
OF_ROWS = (
    (1, lambda x: x + 4),
    (4, lambda x: x + 4),
    (5, lambda x: x + 8),
    (16, lambda x: x + 8),
    (17, lambda x: x * 16),
)


def variants(mod):
    """Give ``double`` two variants: up to 4 rows it adds 1, up to 16 it adds 2, then it doubles."""
    functions = dict(mod.functions.items())
    double = mod["double"]
    listed = []
    for bound, plus in ((4, 1.0), (16, 2.0)):
        name = f"double_upto{bound}"

        def add(store, plus=plus):
            return tirx.BufferStore(
                store.buffer, store.value.a + tirx.FloatImm("float32", plus), store.indices
            )

        body = tvm_ffi.structural_map(double.body, (tirx.BufferStore, add))
        variant = tvm.ir.GlobalVar(name)
        relax.expr._update_type(variant, mod.get_global_var("double").ty)
        functions[variant] = double.with_body(body)
        listed.append([bound, name])
    functions[mod.get_global_var("double")] = double.with_attr("tvmcap.variants", listed)
    return tvm.IRModule(functions)


def test_the_number_of_rows_chooses_among_variants() -> None:
    done = plan(variants(Before))
    bindings = [b.value for block in done["main"].body.blocks for b in block.bindings]
    assert sum(map(is_launch, bindings)) == pipeline.count_kernels(done) == 4
    main = machine(done)
    for rows, wanted in OF_ROWS:
        x = numbers(rows, 16)
        (got,) = run(main, [x], [(rows, 16)])
        np.testing.assert_allclose(got, wanted(x), rtol=1e-5, atol=1e-5)

"""Layout packs constant weights as asked, reads transposes in place, and touches nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.graph.layout import layout, matmul_nt
from tvmcap.graph.rewrite import is_op

TARGET = tvm.target.Target({"kind": "llvm"})
WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


def transposed(weight, lhs, dtype):
    """Ask for every weight as [N, K]."""
    return np.ascontiguousarray(weight.numpy().T), matmul_nt(dtype)


def never(weight, lhs, dtype):
    return None


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor(("B", 4), "float32"),
        v: R.Tensor((2, 4), "float32"),
        w: R.Tensor((4, 2), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            t: R.Tensor((4, 2), "float32") = R.permute_dims(v)
            a: R.Tensor((B, 2), "float32") = R.matmul(x, t)
            b: R.Tensor((B, 2), "float32") = R.matmul(x, w)
            R.output(a, b)
        return (a, b)


@I.ir_module
class After:
    @T.prim_func(private=True, s_tir=True)
    def matmul(xh: T.handle, v: T.Buffer((T.int64(2), T.int64(4))), oh: T.handle):
        T.func_attr({"tirx.noalias": True})
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(4)))
        o = T.match_buffer(oh, (B, T.int64(2)))
        for i, j, k in T.grid(B, T.int64(2), T.int64(4)):
            with T.sblock("matmul"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    o[vi, vj] = T.float32(0)
                o[vi, vj] = o[vi, vj] + x[vi, vk] * v[vj, vk]

    @R.function
    def main(
        x: R.Tensor(("B", 4), "float32"),
        v: R.Tensor((2, 4), "float32"),
        packed: R.Tensor((2, 4), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        cls = After
        with R.dataflow():
            a = R.call_tir(cls.matmul, (x, v), out_ty=R.Tensor((B, 2), "float32"))
            b = R.call_tir(cls.matmul, (x, packed), out_ty=R.Tensor((B, 2), "float32"))
            c: R.Tensor((B, 2), "float32") = a
            d: R.Tensor((B, 2), "float32") = b
            R.output(c, d)
        return (c, d)


@I.ir_module
class NothingToDo:
    """A weight that is an argument, a transpose on the left side, one that nothing multiplies."""

    @R.function
    def main(
        x: R.Tensor(("B", 4), "float32"),
        w: R.Tensor((4, 2), "float32"),
        v: R.Tensor((4, 4), "float32"),
    ) -> R.Tuple(
        R.Tensor(("B", 2), "float32"), R.Tensor((4, 4), "float32"), R.Tensor((4, 4), "float32")
    ):
        B = T.int64()
        with R.dataflow():
            a: R.Tensor((B, 2), "float32") = R.matmul(x, w)
            t: R.Tensor((4, 4), "float32") = R.permute_dims(v, axes=[1, 0])
            b: R.Tensor((4, 4), "float32") = R.matmul(t, v)
            c: R.Tensor((4, 4), "float32") = R.exp(t)
            d: R.Tensor((B, 2), "float32") = a
            e: R.Tensor((4, 4), "float32") = b
            f: R.Tensor((4, 4), "float32") = c
            R.output(d, e, f)
        return (d, e, f)


def frozen(mod, name, value):
    return relax.transform.BindParams("main", {name: value})(mod)


def batched(axes):
    """``x[2, B, 4] @ permute_dims(v[2, 3, 4], axes)``."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 5, 4), "float32"))
    v = relax.Var("v", relax.TensorType((2, 3, 4) if axes == [0, 2, 1] else (3, 2, 4), "float32"))
    with builder.function("main", [x, v]):
        with builder.dataflow():
            t = builder.emit(relax.op.permute_dims(v, axes))
            y = builder.emit_output(relax.op.matmul(x, t))
        builder.emit_func_output(y)
    return builder.get()


def test_packs_weights_and_reads_transposes_in_place() -> None:
    done = layout(frozen(Before, "w", WEIGHT), transposed)
    tvm.ir.assert_structural_equal(done, frozen(After, "packed", np.ascontiguousarray(WEIGHT.T)))


def test_leaves_alone() -> None:
    tvm.ir.assert_structural_equal(layout(NothingToDo, transposed), NothingToDo)


def test_a_weight_that_no_kernel_wants_packed_stays() -> None:
    mod = frozen(NothingToDo, "w", WEIGHT)
    tvm.ir.assert_structural_equal(layout(mod, never), mod)


def test_a_batch_of_transposes_is_read_in_place() -> None:
    done = layout(batched([0, 2, 1]), never)
    ops = [b.value for block in done["main"].body.blocks for b in block.bindings]
    assert [is_op(v, "call_tir") for v in ops if isinstance(v, relax.Call)] == [True]


def test_another_permutation_stays() -> None:
    mod = batched([1, 2, 0])
    done = layout(mod, never)
    ops = [
        b.value.op.name
        for block in done["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
    ]
    assert ops == ["relax.permute_dims", "relax.matmul"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (5, 4)),
        ((2, 3, 4), (2, 5, 4)),
        ((2, 3, 4), (5, 4)),
        ((6, 2, 3, 4), (1, 2, 5, 4)),
        ((3, 4), (2, 5, 4)),
    ],
    ids=str,
)
def test_matmul_nt_is_the_product_with_broadcast(a, b) -> None:
    rng = np.random.default_rng(len(a) * 10 + len(b))
    x, v = (rng.standard_normal(s, dtype=np.float32) for s in (a, b))
    args = [te.placeholder(s, "float32") for s in (a, b)]
    func = te.create_prim_func([*args, matmul_nt("float32")(*args)])
    kernel = tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"]
    wanted = x.astype(np.float64) @ v.astype(np.float64).swapaxes(-1, -2)
    out = tvm.runtime.tensor(np.zeros(wanted.shape, np.float32))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(v), out)
    np.testing.assert_allclose(out.numpy(), wanted, atol=1e-5)

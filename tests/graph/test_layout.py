"""Layout packs constant weights as asked, reads transposes in place, and touches nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.graph.layout import layout, matmul

TARGET = tvm.target.Target({"kind": "llvm"})
WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


def transposed(weight, lhs, dtype):
    """Ask for every weight as [N, K]."""
    return np.ascontiguousarray(weight.numpy().T), lambda left: matmul(dtype, left, "nk")


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
    """A weight that is an argument, and a transpose that nothing multiplies."""

    @R.function
    def main(
        x: R.Tensor(("B", 4), "float32"),
        w: R.Tensor((4, 2), "float32"),
        v: R.Tensor((4, 4), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor((4, 4), "float32")):
        B = T.int64()
        with R.dataflow():
            a: R.Tensor((B, 2), "float32") = R.matmul(x, w)
            t: R.Tensor((4, 4), "float32") = R.permute_dims(v, axes=[1, 0])
            c: R.Tensor((4, 4), "float32") = R.exp(t)
            d: R.Tensor((B, 2), "float32") = a
            f: R.Tensor((4, 4), "float32") = c
            R.output(d, f)
        return (d, f)


def frozen(mod, name, value):
    return relax.transform.BindParams("main", {name: value})(mod)


def laid_out(make, *shapes, pack=never):
    """Return the layout pass's result on ``make(builder, *vars)``, and its operators in order."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            y = builder.emit_output(make(lambda e: builder.emit(e), *params))
        builder.emit_func_output(y)
    mod = layout(builder.get(), pack)
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    calls = [v for v in values if isinstance(v, relax.Call)]
    return mod, [v.op.name.removeprefix("relax.") for v in calls]


def assert_computes(mod, wanted, *arrays):
    """Run a module that the layout pass left, on the CPU."""
    with TARGET:
        executable = relax.build(relax.transform.LegalizeOps()(mod), TARGET)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(a) for a in arrays)).numpy()
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def numbers(*shape):
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def test_packs_weights_and_reads_transposes_in_place() -> None:
    done = layout(frozen(Before, "w", WEIGHT), transposed)
    tvm.ir.assert_structural_equal(done, frozen(After, "packed", np.ascontiguousarray(WEIGHT.T)))


def test_leaves_alone() -> None:
    tvm.ir.assert_structural_equal(layout(NothingToDo, transposed), NothingToDo)


def test_a_weight_that_no_kernel_wants_packed_stays() -> None:
    mod = frozen(NothingToDo, "w", WEIGHT)
    tvm.ir.assert_structural_equal(layout(mod, never), mod)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_transposes_of_either_side_are_read_in_place(left, right, batch) -> None:
    rank = len(batch)
    axes = [*range(rank), rank + 1, rank]
    x = numbers(*batch, *((4, 5) if left else (5, 4)))
    y = numbers(*batch, *((3, 4) if right else (4, 3)))

    def make(emit, a, b):
        a = emit(relax.op.permute_dims(a, axes)) if left else a
        b = emit(relax.op.permute_dims(b, axes)) if right else b
        return emit(relax.op.matmul(a, b))

    mod, ops = laid_out(make, x.shape, y.shape)
    assert ops == ["call_tir" if left or right else "matmul"]
    wanted = (x.swapaxes(-1, -2) if left else x) @ (y.swapaxes(-1, -2) if right else y)
    assert_computes(mod, wanted, x, y)


def test_a_transposed_activation_meets_a_packed_weight() -> None:
    x, w = numbers(2, 4, 5), numbers(4, 3)
    packs = []

    def pack(weight, lhs, dtype):
        packs.append(weight.numpy())
        return np.ascontiguousarray(weight.numpy().T), lambda left: matmul(dtype, left, "nk")

    def make(emit, a):
        turned = emit(relax.op.permute_dims(a, [0, 2, 1]))
        return emit(relax.op.matmul(turned, relax.const(w)))

    mod, ops = laid_out(make, x.shape, pack=pack)
    assert ops == ["call_tir"] and len(packs) == 1
    assert_computes(mod, x.swapaxes(-1, -2) @ w, x)


def test_another_permutation_stays() -> None:
    v = numbers(3, 2, 4)

    def make(emit, a, b):
        return emit(relax.op.matmul(a, emit(relax.op.permute_dims(b, [1, 2, 0]))))

    _, ops = laid_out(make, (2, 5, 4), v.shape)
    assert ops == ["permute_dims", "matmul"]


def test_a_chain_of_views_is_one_or_none() -> None:
    def there_and_back(emit, a):
        turned = emit(relax.op.permute_dims(emit(relax.op.expand_dims(a, 1)), [2, 1, 0]))
        back = emit(relax.op.permute_dims(emit(relax.op.squeeze(turned, [1])), [1, 0]))
        return emit(relax.op.exp(back))

    assert laid_out(there_and_back, (5, 4))[1] == ["exp"]

    def flat(emit, a):
        wide = emit(relax.op.expand_dims(emit(relax.op.reshape(a, (20,))), 0))
        return emit(relax.op.exp(wide))

    assert laid_out(flat, (5, 4))[1] == ["reshape", "exp"]


def test_an_einsum_in_disguise_is_one_product() -> None:
    """What torch makes of "bhqd,bhkd->bhqk": views, a batch flattened, and more views."""
    q, k = numbers(2, 3, 5, 4), numbers(2, 3, 6, 4)

    def make(emit, a, b):
        a = emit(relax.op.reshape(a, (6, 5, 4)))
        b = emit(relax.op.permute_dims(b, [0, 1, 3, 2]))
        b = emit(relax.op.reshape(b, (6, 4, 6)))
        y = emit(relax.op.astype(emit(relax.op.matmul(a, b)), "float64"))
        y = emit(relax.op.permute_dims(emit(relax.op.reshape(y, (2, 3, 5, 1, 6))), [0, 1, 2, 4, 3]))
        return emit(relax.op.exp(emit(relax.op.reshape(y, (2, 3, 5, 6)))))

    mod, ops = laid_out(make, q.shape, k.shape)
    assert ops == ["call_tir", "astype", "exp"]
    wanted = np.exp((q @ k.swapaxes(-1, -2)).astype(np.float64))
    assert_computes(mod, wanted, q, k)


def test_a_product_that_others_read_keeps_its_shape() -> None:
    def make(emit, a, b):
        y = emit(relax.op.matmul(emit(relax.op.reshape(a, (15, 4))), b))
        return emit(
            relax.op.add(y, emit(relax.op.reshape(emit(relax.op.reshape(y, (5, 3, 6))), (15, 6))))
        )

    assert laid_out(make, (5, 3, 4), (4, 6))[1] == ["reshape", "matmul", "add"]


def test_rows_of_a_flattened_batch_keep_apart() -> None:
    x, w = numbers(5, 3, 4), numbers(4, 6)

    def make(emit, a, b):
        y = emit(relax.op.matmul(emit(relax.op.reshape(a, (15, 4))), b))
        return emit(relax.op.exp(emit(relax.op.reshape(y, (5, 3, 6)))))

    mod, ops = laid_out(make, x.shape, w.shape)
    assert ops == ["call_tir", "exp"]
    assert_computes(mod, np.exp(x @ w), x, w)


def test_a_cast_of_moved_heads_casts_them_where_they_are() -> None:
    x, w = numbers(5, 3, 4), numbers(4, 6)

    def make(emit, a, b):
        y = emit(relax.op.matmul(emit(relax.op.reshape(a, (15, 4))), b))
        y = emit(relax.op.astype(emit(relax.op.reshape(y, (5, 3, 6))), "float16"))
        heads = emit(relax.op.permute_dims(emit(relax.op.reshape(y, (5, 3, 2, 3))), [0, 2, 1, 3]))
        return emit(relax.op.exp(emit(relax.op.astype(heads, "float32"))))

    mod, ops = laid_out(make, x.shape, w.shape)
    assert ops == ["call_tir", "astype", "reshape", "permute_dims", "astype", "exp"]
    heads = (x @ w).astype("float16").reshape(5, 3, 2, 3).transpose(0, 2, 1, 3)
    assert_computes(mod, np.exp(heads.astype("float32")), x, w)


def test_heads_are_moved_once_and_then_read_transposed() -> None:
    """Where a kernel has to move heads, it does not swap the last two dimensions as well."""
    q, k = numbers(2, 3, 5, 4), numbers(2, 6, 3, 4)

    def make(emit, a, b):
        heads = emit(relax.op.permute_dims(b, [0, 2, 1, 3]))
        return emit(relax.op.matmul(a, emit(relax.op.permute_dims(heads, [0, 1, 3, 2]))))

    mod, ops = laid_out(make, q.shape, k.shape)
    assert ops == ["permute_dims", "call_tir"]
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    assert list(bindings[0].value.attrs.axes) == [0, 2, 1, 3]
    assert_computes(mod, q @ k.transpose(0, 2, 3, 1), q, k)


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 1), (1, 2)), ((2, 3), (1, 3)), ((2, 1), (1, 1)), ((2, 3), (3,)), ((1, 1), (2, 3))],
    ids=str,
)
def test_broadcast_batches_stay_what_they_are(left, right) -> None:
    x, y = numbers(*left, 5, 4), numbers(*right, 6, 4)

    def make(emit, a, b):
        b = emit(relax.op.permute_dims(b, [*range(len(right)), len(right) + 1, len(right)]))
        y = emit(relax.op.matmul(a, b))
        return emit(relax.op.exp(emit(relax.op.expand_dims(y, 0))))

    mod, _ = laid_out(make, x.shape, y.shape)
    assert_computes(mod, np.exp(x @ y.swapaxes(-1, -2))[None], x, y)


def test_an_empty_sum_stays() -> None:
    def make(emit, a, b):
        return emit(relax.op.matmul(emit(relax.op.permute_dims(a, [1, 0])), b))

    assert laid_out(make, (0, 3), (0, 2))[1] == ["permute_dims", "matmul"]


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
def test_matmul_is_the_product_with_broadcast(a, b) -> None:
    rng = np.random.default_rng(len(a) * 10 + len(b))
    x, v = (rng.standard_normal(s, dtype=np.float32) for s in (a, b))
    args = [te.placeholder(s, "float32") for s in (a, b)]
    func = te.create_prim_func([*args, matmul("float32", "mk", "nk")(*args)])
    kernel = tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"]
    wanted = x.astype(np.float64) @ v.astype(np.float64).swapaxes(-1, -2)
    out = tvm.runtime.tensor(np.zeros(wanted.shape, np.float32))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(v), out)
    np.testing.assert_allclose(out.numpy(), wanted, atol=1e-5)

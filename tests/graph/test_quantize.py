"""Quantize rewrites products with constant weights to 8 bits, and touches nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.graph.canonicalize import fold
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.graph.layers import layers
from tvmcap.graph.layout import layout
from tvmcap.graph.quantize import Plan, quantize, quantized_weight
from tvmcap.kernel import spaces
from tvmcap.pipeline import one_kernel

TARGET = tvm.target.Target({"kind": "llvm"})
WEIGHT = np.array([[1, -2], [0.5, 4], [-1, 0]], np.float32)
ROUNDED = np.array([[127, -64], [64, 127], [-127, 0]], np.int8)
SCALE = (np.array([1, 4], np.float32) / np.float32(127)).astype(np.float32)


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor(("B", 3), "float32"), v: R.Tensor((3, 2), "float32"), w: R.Tensor((3, 2))
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            a: R.Tensor((B, 2), "float32") = R.matmul(x, w)
            b: R.Tensor((B, 2), "float32") = R.matmul(x, v)
            c: R.Tensor((B, 2), "float32") = R.nn.relu(a)
            R.output(c, b)
        return (c, b)


@I.ir_module
class AfterToken:
    @R.function
    def main(
        x: R.Tensor(("B", 3), "float32"),
        v: R.Tensor((3, 2), "float32"),
        w: R.Tensor((3, 2), "int8"),
        scale: R.Tensor((2,), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            size: R.Tensor((B, 3), "float32") = R.abs(x)
            most: R.Tensor((B, 1), "float32") = R.max(size, axis=[-1], keepdims=True)
            top: R.Tensor((B, 1), "float32") = R.maximum(most, R.const(1e-30, "float32"))
            row: R.Tensor((B, 1), "float32") = R.multiply(top, R.const(1 / 127, "float32"))
            inverse: R.Tensor((B, 1), "float32") = R.divide(R.const(127.0, "float32"), top)
            scaled: R.Tensor((B, 3), "float32") = R.multiply(x, inverse)
            whole: R.Tensor((B, 3), "float32") = R.round(scaled)
            clipped: R.Tensor((B, 3), "float32") = R.clip(
                whole, T.float64(-127.0), T.float64(127.0)
            )
            q: R.Tensor((B, 3), "int8") = R.astype(clipped, dtype="int8")
            sums: R.Tensor((B, 2), "int32") = R.matmul(q, w, out_dtype="int32")
            wide: R.Tensor((B, 2), "float32") = R.astype(sums, dtype="float32")
            rows: R.Tensor((B, 2), "float32") = R.multiply(wide, row)
            a: R.Tensor((B, 2), "float32") = R.multiply(rows, scale)
            b: R.Tensor((B, 2), "float32") = R.matmul(x, v)
            c: R.Tensor((B, 2), "float32") = R.nn.relu(a)
            R.output(c, b)
        return (c, b)


@I.ir_module
class AfterStatic:
    @R.function
    def main(
        x: R.Tensor(("B", 3), "float32"),
        v: R.Tensor((3, 2), "float32"),
        w: R.Tensor((3, 2), "int8"),
        scale: R.Tensor((2,), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            scaled: R.Tensor((B, 3), "float32") = R.multiply(x, R.const(63.5, "float32"))
            whole: R.Tensor((B, 3), "float32") = R.round(scaled)
            clipped: R.Tensor((B, 3), "float32") = R.clip(
                whole, T.float64(-127.0), T.float64(127.0)
            )
            q: R.Tensor((B, 3), "int8") = R.astype(clipped, dtype="int8")
            sums: R.Tensor((B, 2), "int32") = R.matmul(q, w, out_dtype="int32")
            wide: R.Tensor((B, 2), "float32") = R.astype(sums, dtype="float32")
            a: R.Tensor((B, 2), "float32") = R.multiply(wide, scale)
            b: R.Tensor((B, 2), "float32") = R.matmul(x, v)
            c: R.Tensor((B, 2), "float32") = R.nn.relu(a)
            R.output(c, b)
        return (c, b)


@I.ir_module
class AfterWeightOnly:
    @R.function
    def main(
        x: R.Tensor(("B", 3), "float32"),
        v: R.Tensor((3, 2), "float32"),
        w: R.Tensor((3, 2), "int8"),
        scale: R.Tensor((2,), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 2), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            wide: R.Tensor((3, 2), "float32") = R.astype(w, dtype="float32")
            sums: R.Tensor((B, 2), "float32") = R.matmul(x, wide, out_dtype="float32")
            a: R.Tensor((B, 2), "float32") = R.multiply(sums, scale)
            b: R.Tensor((B, 2), "float32") = R.matmul(x, v)
            c: R.Tensor((B, 2), "float32") = R.nn.relu(a)
            R.output(c, b)
        return (c, b)


@I.ir_module
class BeforeHalf:
    @R.function
    def main(x: R.Tensor(("B", 3), "bfloat16"), w: R.Tensor((3, 2), "bfloat16")) -> R.Tensor(
        ("B", 2), "bfloat16"
    ):
        B = T.int64()
        with R.dataflow():
            a: R.Tensor((B, 2), "bfloat16") = R.matmul(x, w)
            R.output(a)
        return a


@I.ir_module
class AfterHalf:
    @R.function
    def main(
        x: R.Tensor(("B", 3), "bfloat16"),
        w: R.Tensor((3, 2), "int8"),
        scale: R.Tensor((2,), "float32"),
    ) -> R.Tensor(("B", 2), "bfloat16"):
        B = T.int64()
        with R.dataflow():
            first: R.Tensor((B, 3), "float32") = R.astype(x, dtype="float32")
            size: R.Tensor((B, 3), "float32") = R.abs(first)
            most: R.Tensor((B, 1), "float32") = R.max(size, axis=[-1], keepdims=True)
            top: R.Tensor((B, 1), "float32") = R.maximum(most, R.const(1e-30, "float32"))
            row: R.Tensor((B, 1), "float32") = R.multiply(top, R.const(1 / 127, "float32"))
            inverse: R.Tensor((B, 1), "float32") = R.divide(R.const(127.0, "float32"), top)
            second: R.Tensor((B, 3), "float32") = R.astype(x, dtype="float32")
            scaled: R.Tensor((B, 3), "float32") = R.multiply(second, inverse)
            whole: R.Tensor((B, 3), "float32") = R.round(scaled)
            clipped: R.Tensor((B, 3), "float32") = R.clip(
                whole, T.float64(-127.0), T.float64(127.0)
            )
            q: R.Tensor((B, 3), "int8") = R.astype(clipped, dtype="int8")
            sums: R.Tensor((B, 2), "int32") = R.matmul(q, w, out_dtype="int32")
            wide: R.Tensor((B, 2), "float32") = R.astype(sums, dtype="float32")
            rows: R.Tensor((B, 2), "float32") = R.multiply(wide, row)
            columns: R.Tensor((B, 2), "float32") = R.multiply(rows, scale)
            a: R.Tensor((B, 2), "bfloat16") = R.astype(columns, dtype="bfloat16")
            R.output(a)
        return a


def bound(mod, **values):
    return relax.transform.BindParams("main", values)(mod)


def assert_same(got, want):
    """Compare but for the names that outputs have besides."""
    tidy = relax.transform.CanonicalizeBindings()
    tvm.ir.assert_structural_equal(tidy(got), tidy(want))


def named(mod):
    return layers(mod, lambda weight: ["up.weight"] if np.array_equal(weight, WEIGHT) else [])


@pytest.mark.parametrize(
    ("plan", "after", "scale"),
    [
        (Plan("int8"), AfterToken, SCALE),
        (Plan("int8", clip=2.0), AfterStatic, SCALE * np.float32(2 / 127)),
        (Plan("int8", weight_only=True), AfterWeightOnly, SCALE),
    ],
    ids=["token", "static", "weight-only"],
)
def test_a_constant_weight_becomes_int8_with_scales(plan, after, scale) -> None:
    mod = bound(Before, w=WEIGHT)
    found = named(mod)
    assert [x.name for x in found] == ["up.weight"] and found[0].k == 3
    got = quantize(mod, {"up.weight": plan}, found)
    assert_same(got, bound(after, w=ROUNDED, scale=scale))


def test_the_maximum_and_the_rounding_widen_16_bits_on_their_own() -> None:
    """One shared float32 tensor would be stored by the kernel of a product that makes ``x``."""
    mod = bound(BeforeHalf, w=WEIGHT.astype(ml_dtypes.bfloat16))
    got = quantize(mod, {"matmul_0": Plan("int8")}, layers(mod, lambda weight: []))
    assert_same(got, bound(AfterHalf, w=ROUNDED, scale=SCALE))


def test_without_a_plan_nothing_changes() -> None:
    mod = bound(Before, w=WEIGHT)
    assert_same(quantize(mod, {}, named(mod)), mod)
    assert layers(Before, lambda weight: []) == []


def test_values_of_a_layer_can_be_returned_too() -> None:
    mod = bound(Before, w=WEIGHT)
    (layer,) = named(mod)
    new = quantize(mod, {"up.weight": Plan("int8")}, [layer], [layer.x, layer.y])
    types = [str(t.dtype.dtype) for t in new["main"].ret_ty.fields]
    assert types == ["float32"] * 4


def program(build, shape, dtype="float32"):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(build(builder, x))
        builder.emit_func_output(out)
    return fold(builder.get())


def norm_and_two(builder, x):
    gamma, beta = relax.const(np.full(3, 2, np.float32)), relax.const(np.ones(3, np.float32))
    n = builder.emit(relax.op.nn.layer_norm(x, gamma, beta, axes=[-1]))
    a = builder.emit(relax.op.matmul(n, relax.const(WEIGHT)))
    b = builder.emit(relax.op.matmul(n, relax.const(WEIGHT + 1)))
    return relax.op.add(a, b)


def operators(mod):
    return [
        b.value.op.name.removeprefix("relax.")
        for block in mod["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
    ]


def test_layers_of_one_input_share_its_quantization() -> None:
    mod = program(norm_and_two, (4, 3))
    found = layers(mod, lambda weight: "w")
    assert [x.name for x in found] == ["w", "w#2"]
    new = quantize(mod, {x.name: Plan("int8") for x in found}, found)
    assert operators(new).count("round") == 1 and operators(new).count("matmul") == 2


def test_smoothing_goes_into_the_norm_where_only_its_layers_read_it() -> None:
    mod = program(norm_and_two, (4, 3))
    found = layers(mod, lambda weight: "w")
    plan = Plan("int8", smooth=(2.0, 1.0, 4.0))
    both = quantize(mod, {x.name: plan for x in found}, found)
    assert operators(both)[0] == "nn.layer_norm"
    norm = both["main"].body.blocks[0].bindings[0].value
    np.testing.assert_array_equal(norm.args[1].value.numpy(), [1, 2, 0.5])
    np.testing.assert_array_equal(norm.args[2].value.numpy(), [0.5, 1, 0.25])
    one = quantize(mod, {"w": plan}, found)
    assert operators(one)[:2] == ["nn.layer_norm", "multiply"]


def test_zeros_and_smoothing_in_the_weight() -> None:
    data, scale = quantized_weight(np.array([[0, 1], [0, 2]], np.float32), Plan("int8"))
    np.testing.assert_array_equal(data, [[0, 64], [0, 127]])
    assert np.isfinite(scale).all() and scale[1] == np.float32(2 / 127)
    data, _ = quantized_weight(np.array([[1], [1]], np.float32), Plan("int8", smooth=(1.0, 2.0)))
    np.testing.assert_array_equal(data, [[64], [127]])


@pytest.mark.parametrize(
    ("plan", "dtypes", "kernels"),
    [
        (Plan("int8"), ("int8", "int8"), 2),
        (Plan("int8", offset=True), ("uint8", "int8"), 2),
        (Plan("int8", clip=3.0), ("int8", "int8"), 2),
        (Plan("int8", weight_only=True), ("float32", "int8"), 1),
        (Plan("float8_e4m3fn"), ("float8_e4m3fn", "float8_e4m3fn"), 2),
    ],
    ids=["token", "offset", "static", "weight-only", "fp8"],
)
def test_scales_fuse_into_the_product(plan, dtypes, kernels) -> None:
    """At most two kernels a layer, the product one that the GEMM template takes."""

    def build(builder, x):
        y = builder.emit(relax.op.matmul(x, relax.const(np.ones((64, 32), np.float32))))
        y = builder.emit(relax.op.add(y, relax.const(np.ones(32, np.float32))))
        return relax.op.nn.gelu_tanh(y)

    mod = program(build, (tvm.tirx.Var("B", "int64"), 64))
    found = layers(mod, lambda weight: "w")
    new = quantize(mod, {"w": plan}, found)
    new = legalize(layout(new, lambda w, x, d: spaces.pack_weight(w, x, d, TARGET)))
    with TARGET:
        new = fuse(new, lambda func: one_kernel(func, TARGET))
    funcs = [f for f in new.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    problems = [p[1] for f in funcs if (p := spaces.find(f, TARGET)) is not None]
    assert len(funcs) == kernels and len(problems) == 1
    assert (str(problems[0].a.dtype), str(problems[0].b.dtype)) == dtypes


def test_weights_stay_in_8_bits_where_no_kernel_wants_them_packed() -> None:
    mod = bound(Before, w=WEIGHT)
    new = quantize(mod, {"up.weight": Plan("int8", weight_only=True)}, named(mod))
    new = legalize(layout(new, lambda w, x, d: None))
    held = []

    def see(node):
        if isinstance(node, tvm.ir.GenericConst) and node.ty.ndim == 2:
            held.append(str(node.ty.dtype.dtype))

    relax.analysis.post_order_visit(new["main"], see)
    assert held == ["int8"]

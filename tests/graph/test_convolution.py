"""Quantize rewrites convolutions to products of patches or to nests, by their shape."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.graph.test_quantize import assert_same, bound, operators, program
from tvmcap.graph import convolution
from tvmcap.graph.convolution import Convolution
from tvmcap.graph.layers import layers
from tvmcap.graph.quantize import Plan, quantize
from tvmcap.verify.accuracy import product

SHAPE = (16, 32, 1, 1)
WEIGHT = np.random.default_rng(0).integers(-127, 128, SHAPE).astype(np.float32)
WEIGHT[:, 0] = 127  # so that the scale of every output channel is 1
MATRIX = np.ascontiguousarray(WEIGHT.reshape(16, 32).T).astype(np.int8)
SCALE = np.full(16, 0.5, np.float32)  # of a static clip of 63.5


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor(("B", 32, 4, 5), "float32"), w: R.Tensor((16, 32, 1, 1), "float32")
    ) -> R.Tensor(("B", 16, 4, 5), "float32"):
        B = T.int64()
        with R.dataflow():
            y: R.Tensor((B, 16, 4, 5), "float32") = R.nn.conv2d(x, w)
            z: R.Tensor((B, 16, 4, 5), "float32") = R.nn.relu(y)
            R.output(z)
        return z


@I.ir_module
class After:
    @R.function
    def main(
        x: R.Tensor(("B", 32, 4, 5), "float32"),
        w: R.Tensor((32, 16), "int8"),
        start: R.Tensor((16,), "int32"),
        scale: R.Tensor((16,), "float32"),
    ) -> R.Tensor(("B", 16, 4, 5), "float32"):
        B = T.int64()
        with R.dataflow():
            scaled: R.Tensor((B, 32, 4, 5), "float32") = R.multiply(x, R.const(2.0, "float32"))
            whole: R.Tensor((B, 32, 4, 5), "float32") = R.round(scaled)
            clipped: R.Tensor((B, 32, 4, 5), "float32") = R.clip(
                whole, T.float64(-127.0), T.float64(127.0)
            )
            moved: R.Tensor((B, 32, 4, 5), "float32") = R.add(clipped, R.const(128.0, "float32"))
            q: R.Tensor((B, 32, 4, 5), "uint8") = R.astype(moved, dtype="uint8")
            last: R.Tensor((B, 4, 5, 32), "uint8") = R.permute_dims(q, axes=[0, 2, 3, 1])
            sums: R.Tensor((B, 4, 5, 16), "int32") = R.matmul(last, w, out_dtype="int32")
            own: R.Tensor((B, 4, 5, 16), "int32") = R.add(sums, start)
            wide: R.Tensor((B, 4, 5, 16), "float32") = R.astype(own, dtype="float32")
            right: R.Tensor((B, 4, 5, 16), "float32") = R.multiply(wide, scale)
            y: R.Tensor((B, 16, 4, 5), "float32") = R.permute_dims(right, axes=[0, 3, 1, 2])
            z: R.Tensor((B, 16, 4, 5), "float32") = R.nn.relu(y)
            R.output(z)
        return z


def test_a_pointwise_convolution_is_a_product_of_pixels_by_channels() -> None:
    mod = bound(Before, w=WEIGHT)
    found = layers(mod, lambda weight: ["conv.weight"] if weight.shape == SHAPE else [])
    assert [(x.name, x.k) for x in found] == [("conv.weight", 32)]
    got = quantize(mod, {"conv.weight": Plan("int8", clip=63.5, offset=True)}, found)
    start = np.int32(-128) * MATRIX.sum(axis=0, dtype=np.int32)
    assert_same(got, bound(After, w=MATRIX, start=start, scale=SCALE))
    assert_same(quantize(mod, {}, found), mod)


def convolve(shape, **attrs):
    weight = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)

    def build(builder, x):
        return relax.op.nn.conv2d(x, relax.const(weight), **attrs)

    return build, weight


@pytest.mark.parametrize(
    ("shape", "groups", "plan", "operator"),
    [
        ((16, 4, 3, 3), 1, Plan("int8"), "matmul"),
        ((16, 2, 3, 3), 2, Plan("int8", offset=True), "call_tir"),
        ((3, 4, 3, 3), 1, Plan("int8", offset=True), "call_tir"),
        ((16, 4, 1, 1), 1, Plan("int8"), "call_tir"),
        ((16, 4, 3, 3), 1, Plan("int8", weight_only=True), "call_tir"),
    ],
    ids=["patches", "groups", "few filters", "short sums", "weight-only"],
)
def test_what_computes_a_convolution_follows_from_its_shape(shape, groups, plan, operator) -> None:
    """Nests take signed bytes: zeros of the padding are zeros there."""
    build, _ = convolve(shape, padding=1, groups=groups)
    mod = program(build, (2, 4, 6, 5))
    found = layers(mod, lambda weight: [])
    assert [x.name for x in found] == ["conv_0"]
    new = quantize(mod, {"conv_0": plan}, found)
    names = operators(new)
    assert ("matmul" in names) == (operator == "matmul")
    assert names.count("call_tir") == 1  # the patches, or the nest
    casts = [
        str(b.value.attrs.dtype)
        for b in new["main"].body.blocks[0].bindings
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.astype"
    ]
    assert "uint8" not in casts and ("int8" in casts) == (not plan.weight_only)
    out = new["main"].ret_ty
    assert [int(e) for e in out.shape.values] == [int(e) for e in mod["main"].ret_ty.shape.values]


def test_layers_of_one_input_share_its_quantization() -> None:
    """Where both are products or both are nests."""
    one, two = convolve((16, 4, 3, 3), padding=1)[0], convolve((16, 4, 5, 5), padding=2)[0]

    def build(builder, x):
        return relax.op.add(builder.emit(one(builder, x)), builder.emit(two(builder, x)))

    mod = program(build, (2, 4, 6, 5))
    found = layers(mod, lambda weight: [])
    new = quantize(mod, {x.name: Plan("int8") for x in found}, found)
    assert operators(new).count("round") == 1 and operators(new).count("matmul") == 2


def test_what_is_no_constant_convolution_stays() -> None:
    assert layers(Before, lambda weight: []) == []

    def last(builder, x):
        weight = relax.const(np.ones((4, 1, 1, 8), np.float32))
        return relax.op.nn.conv2d(x, weight, data_layout="NHWC", kernel_layout="OHWI")

    assert layers(program(last, (2, 6, 5, 8)), lambda weight: []) == []


def test_a_weight_survives_being_a_matrix() -> None:
    build, weight = convolve((6, 2, 3, 5), groups=2, padding=(1, 2, 0, 3), strides=(2, 1))
    mod = program(build, (2, 4, 9, 8))
    (found,) = layers(mod, lambda weight: [])
    conv = found.conv
    assert conv == Convolution((3, 5), (2, 1), (1, 1), (1, 2), (0, 3), 2, 6, 2)
    np.testing.assert_array_equal(conv.weight(conv.matrix(weight)), weight)


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"padding": (1, 2, 0, 3)},
        {"strides": (2, 3), "padding": 1},
        {"dilation": (2, 1), "padding": (3, 0, 1, 2), "strides": (1, 2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [0, 128])
def test_patches_are_those_of_the_convolution(attrs, zero) -> None:
    """The product of patches less the zero point is the convolution, exactly."""
    build, weight = convolve((16, 3, 3, 2), **attrs)
    mod = program(build, (2, 3, 8, 9))
    (layer,) = layers(mod, lambda weight: [])
    builder = relax.BlockBuilder()
    q = relax.Var("q", relax.TensorType((2, 8, 9, 3), "int32"))
    with builder.function("main", [q]):
        with builder.dataflow():
            out = builder.emit_output(convolution.rows(builder, layer.conv, q, zero))
        builder.emit_func_output(out)
    data = np.random.default_rng(2).integers(-5, 6, (2, 8, 9, 3), dtype=np.int32)
    main = relax.VirtualMachine(tvm.compile(builder.get(), "llvm"), tvm.cpu())["main"]
    patches = main(tvm.runtime.tensor(data + zero)).numpy() - zero
    whole = np.rint(weight * 3)
    got = patches.astype(np.float32) @ layer.conv.matrix(whole)
    x = np.ascontiguousarray(data.transpose(0, 3, 1, 2)).astype(np.float32)
    want = product(x, layer.conv.matrix(whole), layer.conv)
    np.testing.assert_array_equal(got.transpose(0, 3, 1, 2), want)

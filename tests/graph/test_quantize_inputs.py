"""One input of several layers: what they share of its quantization, and what not."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmcap.graph.canonicalize import fold
from tvmcap.graph.layers import layers
from tvmcap.graph.quantize import Plan, quantize

TARGET = tvm.target.Target({"kind": "llvm"})


def program(build, shape):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(build(builder, x))
        builder.emit_func_output(out)
    return fold(builder.get())


@pytest.mark.parametrize("first", ["product", "convolution"])
def test_a_product_and_a_convolution_of_one_input_have_scales_of_their_own(first) -> None:
    """Rows are scaled for the one, samples for the other."""
    rng = np.random.default_rng(0)
    matrix, taps = (rng.standard_normal(s, np.float32) for s in ((12, 12), (8, 1, 3, 3)))
    size = np.arange(1, 9, dtype=np.float32).reshape(8, 1, 1) ** 2
    x = rng.standard_normal((2, 8, 6, 12), np.float32) * size

    def build(builder, x):
        makers = {
            "product": lambda: relax.op.matmul(x, relax.const(matrix)),
            "convolution": lambda: relax.op.nn.conv2d(x, relax.const(taps), padding=1, groups=8),
        }
        made = {name: builder.emit(makers[name]()) for name in sorted(makers, key=first.__ne__)}
        return relax.op.concat([made["product"], made["convolution"]], axis=0)

    mod = program(build, x.shape)
    found = layers(mod, lambda weight: [])
    assert [layer.conv is None for layer in found] == [first == "product", first != "product"]
    quantized = quantize(mod, {layer.name: Plan("int8") for layer in found}, found)
    want, got = (
        relax.VirtualMachine(tvm.compile(m, TARGET), tvm.cpu())["main"](tvm.runtime.tensor(x))
        for m in (mod, quantized)
    )
    signal, noise = (np.square(y) for y in (want.numpy(), got.numpy() - want.numpy()))
    rows, samples = (slice(2), (2, 3)), (slice(2, 4), (1, 2, 3))
    for part, axes in (rows, samples):
        assert (noise[part].mean(axes) < 1e-3 * signal[part].mean(axes)).all()

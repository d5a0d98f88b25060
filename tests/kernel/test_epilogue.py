"""The epilogue is read off the blocks: expressions, buffers, shared values, refusals."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

from tests.schedules import gemm
from tvmcap.kernel import epilogue as ep


def fused(shapes, build):
    """Return the largest PrimFunc made of ``build(block_builder, *vars)``, all in float32."""
    made = gemm.kernels([(shape, "float32") for shape in shapes], build)
    return max(made, key=lambda f: len(f.params))


def value_at(func, acc, loads):
    """Evaluate the only output at one point, with Python numbers for the anchor and the loads."""
    fused_func = ep.read(func)
    point = [tirx.Var(f"i{d}", "int64") for d in range(len(fused_func.epilogue.anchor.shape))]
    var = tirx.Var("acc", "float32")
    binds, ((_, expr),) = fused_func.epilogue.stores(
        var, point, lambda buffer, index: tirx.FloatImm("float32", loads)
    )
    body = expr
    for bind in reversed(binds):
        body = tirx.Let(bind.var, bind.value, body)
    out = tirx.decl_buffer((1,), "float32")
    body = tirx.Let(var, tirx.FloatImm("float32", acc), body)
    kernel = tirx.PrimFunc([out], tirx.BufferStore(out, body, [0])).with_attr(
        {"global_symbol": "main", "s_tir": True}
    )
    result = tvm.runtime.tensor(np.zeros(1, "float32"))
    tvm.compile(tvm.IRModule({"main": kernel}), gemm.TARGET)["main"](result)
    return result.numpy()[0]


def test_bias_gelu_and_residual():
    """Every operator's expression is followed, and the extra buffers are named in order."""
    rows = tirx.Var("n", "int64")
    func = fused(
        [(rows, 8), (8, 16), (16,), (rows, 16)],
        lambda bb, x, w, b, r: bb.emit(
            relax.op.add(
                bb.emit(relax.op.nn.gelu(bb.emit(relax.op.add(bb.emit(relax.op.matmul(x, w)), b)))),
                r,
            )
        ),
    )
    found = ep.read(func)
    assert [len(b.shape) for b in found.epilogue.reads] == [1, 2] and len(
        found.epilogue.outputs
    ) == 1
    from math import erf

    want = 0.5 * 1.75 * (1 + erf(1.75 / 2**0.5)) + 0.5
    np.testing.assert_allclose(value_at(func, 1.25, 0.5), want, rtol=1e-5)


def test_values_used_twice_are_computed_once():
    """A chain of squares stays linear in length."""

    def squares(bb, x, w):
        y = bb.emit(relax.op.matmul(x, w))
        for _ in range(20):
            y = bb.emit(relax.op.multiply(y, y))
        return y

    func = fused([(4, 8), (8, 16)], squares)
    found = ep.read(func)
    point = [tirx.Var("m", "int64"), tirx.Var("n", "int64")]
    binds, _ = found.epilogue.stores(tirx.Var("acc", "float32"), point)
    assert len(binds) == 19


def test_not_pointwise_is_refused():
    """A transposed reader and functions without one reduction are refused."""
    transposed = fused(
        [(4, 8), (8, 16)],
        lambda bb, x, w: bb.emit(relax.op.permute_dims(bb.emit(relax.op.matmul(x, w)))),
    )
    plain = fused([(4, 8)], lambda bb, x: bb.emit(relax.op.tanh(x)))
    softmax = fused([(4, 8)], lambda bb, x: bb.emit(relax.op.nn.softmax(x)))
    assert ep.read(plain) is None and ep.read(softmax) is None
    found = ep.read(transposed)
    assert found is None or len(found.epilogue.stages) == 0


def test_digest_ignores_names_not_structure():
    """Two builds of one computation agree; another constant or operator changes the digest."""

    def build(op, name):
        rows = tirx.Var(name, "int64")
        return fused(
            [(rows, 8), (8, 16)], lambda bb, x, w: bb.emit(op(bb.emit(relax.op.matmul(x, w))))
        )

    first, again, other = (
        build(relax.op.tanh, "a"),
        build(relax.op.tanh, "b"),
        build(relax.op.exp, "a"),
    )
    assert ep.digest(first) == ep.digest(again) != ep.digest(other)
    assert ep.digest(first.with_attr("global_symbol", "z")) == ep.digest(first)

"""Epilogues in kernels: pairs of columns, values shared by outputs, quick forms, NaN."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from tests.schedules.products import TARGET, source_of
from tvmcap.base import codegen
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.kernel import epilogue as ep
from tvmcap.kernel import tir_pipeline
from tvmcap.schedules import simt_gemm
from tvmcap.schedules.gpu_epilogue import Views, flatten, offset, position
from tvmcap.schedules.gpu_math import legal, quick

ROWS, COLUMNS = 16, 64


def fused(make, dtype="bfloat16", out=("bfloat16",), residual=("bfloat16", (ROWS, COLUMNS))):
    """Return the fused PrimFunc of ``make(builder, x @ w, b, r)`` with x and w square."""
    builder = relax.BlockBuilder()
    shapes = {"x": (ROWS, COLUMNS), "w": (COLUMNS, COLUMNS), "b": (COLUMNS,)}
    params = [relax.Var(k, relax.TensorType(s, dtype)) for k, s in shapes.items()]
    params.append(relax.Var("r", relax.TensorType(residual[1], residual[0])))
    with builder.function("main", params):
        with builder.dataflow():
            h = builder.emit(relax.op.matmul(*params[:2], out_dtype="float32"))
            wide = [builder.emit(relax.op.astype(v, "float32")) for v in params[2:]]
            results = make(builder, h, *wide)
            results = [
                builder.emit_output(v if str(v.ty.dtype) == d else relax.op.astype(v, d))
                for v, d in zip(results, out, strict=True)
            ]
        builder.emit_func_output(relax.Tuple(results) if len(results) > 1 else results[0])
    with TARGET:
        mod = fuse(legalize(builder.get()), lambda func: simt_gemm.match(func, TARGET) is not None)
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func


def kernel_of(func):
    """Write a kernel that applies the epilogue to x itself, two columns a thread."""
    gemm = simt_gemm.match(func, TARGET)
    views, outputs = Views(gemm), gemm.fused.epilogue.outputs

    def write(acc, row, col):
        at = position(gemm, row, col)
        for out, pair in zip(outputs, views.pair([acc[0], acc[1]], at), strict=True):
            for c in range(2):
                where = [*at[:-1], at[-1] + c]
                T.buffer_store(views.flat[out], pair[c], [offset(out, where)])

    @T.prim_func(check_well_formed=False)
    def kernel() -> None:
        T.device_entry()
        row = T.cta_id([ROWS])
        tx = T.thread_id([COLUMNS // 2])
        X = flatten(gemm.a)
        views.declare()
        acc = T.alloc_buffer((2,), "float32", scope="local")
        for c in T.unroll(2):
            acc[c] = T.Cast("float32", X[row * COLUMNS + tx * 2 + c])
        write(acc, row, tx * 2)

    return tirx.PrimFunc(func.params, kernel.body).with_attr({"tirx.is_scheduled": True})


def body_of(source):
    return source[source.rindex('extern "C" __global__') :]


def both(builder, h, b, r):
    h = builder.emit(relax.op.add(h, b))
    y = builder.emit(relax.op.add(builder.emit(relax.op.nn.gelu(h)), r))
    return [h, y]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pair_is_one_load_of_each_16_bit_parameter(dtype) -> None:
    func = fused(both, dtype, (dtype, "float32"), (dtype, (ROWS, COLUMNS)))
    text = body_of(source_of(kernel_of(func)))
    assert len(re.findall(r"\(\(uint\*\)\w+\)\[", text)) == 2  # of b and of r


def test_values_that_two_outputs_share_are_computed_once() -> None:
    def make(builder, h, b, r):
        y = builder.emit(relax.op.exp(builder.emit(relax.op.add(h, b))))
        return [y, builder.emit(relax.op.multiply(y, r))]

    text = body_of(source_of(kernel_of(fused(make, out=("float32", "float32")))))
    assert text.count("expf(") == 2  # once a column


def test_a_chain_of_squares_stays_short() -> None:
    def make(builder, h, b, r):
        for _ in range(14):
            h = builder.emit(relax.op.multiply(h, h))
        return [h]

    text = body_of(source_of(kernel_of(fused(make))))
    assert len(text) < 20_000, len(text)


def x_var():
    return tirx.Var("x", "float32")


def test_numbers_merge_and_the_gelu_is_recognised() -> None:
    x = x_var()
    half, root = tirx.FloatImm("float32", 0.5), tirx.FloatImm("float32", 0.5**0.5)
    gelu = x * (half + tirx.erf(x * root) * half)
    assert str(quick(gelu)).count("tvmcap_gelu") and "erf" not in str(quick(gelu)).split("//")[0]
    other = x * (half + tirx.erf(x) * half)  # another function: erf stays
    assert "T.erf" in str(quick(other))
    tanh = half * x * (tirx.FloatImm("float32", 1) + tirx.tanh(x))
    assert "T.tanh" not in str(quick(tanh)) and "- " not in str(quick(tanh)).split("source")[0]
    big = x * tirx.FloatImm("float32", 1e30) * tirx.FloatImm("float32", 1e30)
    assert str(quick(big)) == str(big)  # merged it would overflow


def test_what_has_no_16_bit_form_goes_through_float32() -> None:
    for dtype in ("float16", "bfloat16"):
        x = tirx.Var("x", dtype)
        assert str(legal(tirx.log1p(x))) == f'T.Cast("{dtype}", T.log1p(T.Cast("float32", x)))'
    assert "tvmcap_max" in str(legal(tirx.max(x_var(), tirx.FloatImm("float32", 0))))


def run(func, arrays, outputs):
    """Compile and run on the GPU; ``arrays`` are x, w, b and r, of which some may go unused."""
    codegen.use_nvcc()
    kernel = kernel_of(func).with_attr("global_symbol", "gemm")
    target = codegen.make_target("cuda")
    with target:
        done = tvm.compile(
            tvm.IRModule({"gemm": kernel}), target=target, tir_pipeline=tir_pipeline.TIRX
        )
    written = [str(p.dtype) for p in func.params[-len(outputs) :]]
    order = [written.index(str(d).removeprefix("torch.")) for d in outputs]
    results = [torch.empty(ROWS, COLUMNS, dtype=d, device="cuda") for d in outputs]
    results = [results[order.index(i)] for i in range(len(outputs))]
    done["gemm"](*arrays[: len(func.params) - len(results)], *results)
    torch.cuda.synchronize()
    return [results[i] for i in order]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("column", [False, True], ids=["residual", "column"])
def test_pairs_on_the_gpu(dtype, column) -> None:
    make = torch.Generator().manual_seed(5)
    shape = (ROWS, 1) if column else (ROWS, COLUMNS)
    shapes = ((ROWS, COLUMNS), (COLUMNS, COLUMNS), (COLUMNS,), shape)
    x, w, b, r = (torch.randn(s, generator=make).to(dtype).cuda() for s in shapes)
    name = str(dtype).removeprefix("torch.")
    func = fused(both, name, (name, "float32"), (name, shape))
    h, y = run(func, [x, w, b, r], (dtype, torch.float32))
    wanted = x.double() + b.double()
    torch.testing.assert_close(h.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-3)
    torch.testing.assert_close(y.double(), F.gelu(wanted) + r.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "torch_op"),
    [
        (relax.op.nn.gelu, F.gelu),
        (relax.op.nn.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        (relax.op.nn.silu, F.silu),
        (relax.op.sigmoid, torch.sigmoid),
        (relax.op.tanh, torch.tanh),
        (relax.op.exp, torch.exp),
        (relax.op.nn.relu, torch.relu),
    ],
    ids=["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "relu"],
)
def test_quick_forms_round_as_the_exact_ones(op, torch_op) -> None:
    """Over the whole range, infinity and NaN included: within two roundings of float16."""
    span = np.concatenate([np.linspace(-12, 12, 1016), [0.0, -0.0, 60000, -60000]])
    values = [*span, np.inf, 1e-4, np.nan, 1e-6]
    x = torch.tensor(values, dtype=torch.float16, device="cuda").reshape(ROWS, COLUMNS)
    func = fused(lambda bb, h, b, r: [bb.emit(op(h))], "float16", ("float16",))
    (y,) = run(func, [x, x.new_zeros(COLUMNS, COLUMNS)], (torch.float16,))
    wanted = torch_op(x.double()).half()
    torch.testing.assert_close(y, wanted, rtol=2e-3, atol=4e-6, equal_nan=True)


def test_the_reads_of_an_epilogue_are_not_its_outputs() -> None:
    found = ep.read(fused(both, out=("bfloat16", "float32"))).epilogue
    assert len(found.outputs) == 2 and len(found.reads) == 2


def test_the_sum_itself_can_be_an_output() -> None:
    def make(builder, h, b, r):
        return [h, builder.emit(relax.op.nn.gelu(h))]

    func = fused(make, out=("float32", "bfloat16"))
    found = ep.read(func).epilogue
    assert found.outputs[0].same_as(found.anchor) and len(found.outputs) == 2
    assert "erff" in body_of(source_of(kernel_of(func)))  # not all results have 16 bits

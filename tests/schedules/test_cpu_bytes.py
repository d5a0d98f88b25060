"""The CPU GEMM of int8 operands: exact sums, with and without the dot product of bytes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.schedules.gemm import TARGET, compiled, fused, gelu, lower, run
from tvmcap.base.quantization import MAX_K
from tvmcap.schedules import cpu_gemm
from tvmcap.schedules.cpu_target import dot_product, pack_width
from tvmcap.schedules.gemm_match import group, grouped_matmul, read

AVX2 = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
VNNI = tvm.target.Target({"kind": "llvm", "mcpu": "icelake-server", "num-cores": 2})


def byte_block(n, k, target, scaled=True, lead=(), dtype="uint8"):
    """Return the PrimFunc of x @ w in int32, or of gelu(x @ w * row * column + b)."""
    width, rows = pack_width("int8", target), tirx.Var("B", "int64")

    def build(bb, x, w, *rest):
        y = bb.emit(bb.call_te(grouped_matmul, x, w, n, primfunc_attrs={"op_pattern": 4}))
        if not scaled:
            return y
        row, column, b = rest
        y = bb.emit(relax.op.astype(y, "float32"))
        y = bb.emit(relax.op.multiply(bb.emit(relax.op.multiply(y, row)), column))
        return bb.emit(relax.op.nn.gelu_tanh(bb.emit(relax.op.add(y, b))))

    weight = (-(-n // width), -(-k // 4), width, 4)
    inputs = [((rows, *lead, k), dtype), (weight, "int8")]
    if scaled:
        inputs += [((rows, *lead, 1), "float32"), ((n,), "float32"), ((n,), "float32")]
    return fused(inputs, build, target)


def operands(rows, n, k, lead=(), dtype="uint8"):
    rng, info = np.random.default_rng(rows + n + k), np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, (rows, *lead, k)).astype(dtype)
    return x, rng.integers(-128, 128, (k, n)).astype(np.int8)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("target", [TARGET, AVX2], ids=["host", "avx2"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "lead"),
    [(1, 64, 64, ()), (7, 130, 37, ()), (13, 3, 2, ()), (2, 70, 129, (3,)), (129, 64, 5, ())],
)
def test_sums_are_exact(dtype, target, rows, n, k, lead) -> None:
    x, w = operands(rows, n, k, lead, dtype)
    func = byte_block(n, k, target, scaled=False, lead=lead, dtype=dtype)
    problem = cpu_gemm.match(func, target)
    assert problem.layout == "grouped" and problem.sums == "int32"
    packed = group(w, pack_width("int8", target))
    got = run(compiled(lower(func, target), target), [x, packed], (rows, *lead, n), "int32")
    np.testing.assert_array_equal(got, x.astype(np.int64) @ w.astype(np.int64))


def test_sums_with_an_offset_wrap_around_to_the_right_result() -> None:
    """The longest sum that int32 holds, though the sum of x + 128 passes it."""
    k = MAX_K
    x, w = np.full((2, k), 255, np.uint8), np.full((k, 3), 127, np.int8)
    func = byte_block(3, k, TARGET, scaled=False)
    got = run(compiled(lower(func)), [x, group(w, pack_width("int8", TARGET))], (2, 3), "int32")
    start = np.int32(-128) * w.sum(axis=0, dtype=np.int32)
    assert ((got + start).astype(np.int64) == k * 127**2).all()


def test_scales_bias_and_activation_are_the_epilogue() -> None:
    rows, n, k = 29, 200, 100
    x, w = operands(rows, n, k)
    rng = np.random.default_rng(1)
    row = rng.random((rows, 1), dtype=np.float32) / 1e4
    column, b = rng.random((2, n), dtype=np.float32)
    packed = group(w, pack_width("int8", TARGET))
    got = run(compiled(lower(byte_block(n, k, TARGET))), [x, packed, row, column, b], (rows, n))
    want = gelu((x.astype(np.int64) @ w.astype(np.int64)) * row * column + b)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_target_with_vnni_multiplies_bytes_by_its_instruction() -> None:
    func = lower(byte_block(128, 64, VNNI), VNNI)
    assert dot_product(VNNI) == "llvm.x86.avx512.vpdpbusd.512" and dot_product(AVX2) is None
    code = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), VNNI)
    assert "vpdpbusd" in code.mod.inspect_source("asm")


def test_knobs_of_int8_sum_all_of_k_at_once() -> None:
    problem = cpu_gemm.match(byte_block(128, 4096, TARGET), TARGET)
    space = cpu_gemm.space(problem, TARGET)
    assert cpu_gemm.default(problem, TARGET) in space and {k.kc for k in space} == {0}
    assert cpu_gemm.features(problem, space, TARGET).shape == (len(space), len(cpu_gemm.FEATURES))
    problem.key()


def product(dtypes, sums):
    def build(bb, x, w):
        k = tvm.te.reduce_axis((0, 32), "k")

        def te(a, b):
            return tvm.te.compute(
                (8, 16),
                lambda i, j: tvm.te.sum(a[i, k].astype(sums) * b[k, j].astype(sums), axis=k),
            )

        return bb.emit(bb.call_te(te, x, w, primfunc_attrs={"op_pattern": 4}))

    return fused([((8, 32), dtypes[0]), ((32, 16), dtypes[1])], build)


@pytest.mark.parametrize(
    ("dtypes", "sums", "kind"),
    [
        (("int8", "int8"), "int32", "int32"),
        (("uint8", "int8"), "int32", "int32"),
        (("uint8", "uint8"), "int32", None),
        (("float32", "int8"), "float32", "float32"),
        (("float8_e4m3fn", "float8_e4m3fn"), "float32", "float32"),
        (("int8", "int8"), "int8", None),
        (("int32", "int32"), "int32", None),
    ],
)
def test_which_products_are_read(dtypes, sums, kind) -> None:
    found = read(product(dtypes, sums))
    assert (found and found.sums) == kind


def test_bytes_that_are_not_grouped_are_left_to_the_rule() -> None:
    assert cpu_gemm.match(product(("int8", "int8"), "int32"), TARGET) is None

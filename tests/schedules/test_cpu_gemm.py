"""The CPU GEMM computes what the PrimFunc it replaces does: layouts, dtypes, tails."""

from __future__ import annotations

import dataclasses
import itertools
import zlib

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.script import tirx as T

from tvmcap.kernel.intrinsics import expand
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import cpu_gemm
from tvmcap.schedules.cpu_match import pack, packed_matmul
from tvmcap.schedules.cpu_target import pack_width

CPU = tvm.get_global_func("target.llvm_get_system_cpu")()
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": CPU, "num-cores": 2})
FUSE = (
    relax.transform.LegalizeOps,
    relax.transform.AnnotateTIROpPattern,
    relax.transform.FoldConstant,
    relax.transform.FuseOps,
    relax.transform.FuseTIR,
    relax.transform.DeadCodeElimination,
)


def fused(inputs, build, target=TARGET):
    """Return the one PrimFunc made of ``build(block_builder, *vars)``."""
    bb = relax.BlockBuilder()
    args = [
        relax.Var(f"x{i}", relax.TensorType(shape, dtype))
        for i, (shape, dtype) in enumerate(inputs)
    ]
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(build(bb, *args))
        bb.emit_func_output(out)
    with target:
        mod = tvm.transform.Sequential([p() for p in FUSE])(bb.get())
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func


def lower(func, target=TARGET, **knobs):
    """Match, choose the default knobs (changed by ``knobs``) and lower."""
    problem = cpu_gemm.match(func, target)
    assert problem is not None
    chosen = dataclasses.replace(cpu_gemm.default(problem, target), **knobs)
    return expand(cpu_gemm.lower(func, problem, chosen, target))


def compiled(func, target=TARGET):
    """Compile for this machine."""
    return tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target)[
        "main"
    ]


def misaligned(array):
    """Return a tensor with the array's values at an address that is 16 but not 32 bytes aligned."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return tvm_ffi.from_dlpack(view)


def random(*shape, seed=0):
    """Return normal float32 values."""
    rng = np.random.default_rng(zlib.crc32(repr((shape, seed)).encode()))
    return rng.standard_normal(shape, dtype=np.float32)


def run(kernel, arrays, shape, dtype="float32", sizes=()):
    """Run on misaligned copies, sizes before the output."""
    out = misaligned(np.full(shape, np.nan, dtype))
    kernel(*(misaligned(a) for a in arrays), *sizes, out)
    return out.numpy()


def gelu(x):
    """GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def packed_block(n, k, lead=(), dtype="float32"):
    """Return fused gelu(x @ w + b) on a packed weight, x of shape (B, *lead, k)."""
    width = pack_width(dtype, TARGET)
    rows = tirx.Var("B", "int64")

    def build(bb, x, w, b):
        y = bb.emit(bb.call_te(packed_matmul, x, w, n, primfunc_attrs={"op_pattern": 4}))
        return bb.emit(relax.op.nn.gelu_tanh(bb.emit(relax.op.add(y, b))))

    return fused(
        [((rows, *lead, k), dtype), ((-(-n // width), k, width), dtype), ((n,), dtype)], build
    )


@pytest.mark.parametrize("knobs", [{}, {"kc": 32, "mc": 12}, {"order": "m", "unroll": 1, "mc": 24}])
@pytest.mark.parametrize("n", [128, 100, 7])
def test_packed_any_rows(n, knobs):
    """One kernel is right for every number of rows, with and without blocks of K."""
    k = 72
    kernel = compiled(lower(packed_block(n, k), **knobs))
    w, b = random(k, n), random(n)
    bp = pack(w, pack_width("float32", TARGET))
    for rows in (0, 1, 2, 5, 6, 7, 12, 13, 64, 129, 400):
        x = random(rows, k)
        np.testing.assert_allclose(
            run(kernel, [x, bp, b], (rows, n)), gelu(x @ w + b), atol=2e-5, rtol=1e-5
        )


def test_every_tile_of_the_space():
    """Each register tile, and a spread of the other knobs, gives the right result."""
    func = packed_block(96, 2048 + 16)
    problem = cpu_gemm.match(func, TARGET)
    points = cpu_gemm.space(problem, TARGET)
    assert 30 <= len(points) <= 300 and cpu_gemm.default(problem, TARGET) in points
    picks = {
        (c.mr, c.nv): c
        for c in np.random.default_rng(3).permutation(np.array(points, dtype=object))
    }
    w, b, x = random(2064, 96), random(96), random(31, 2064)
    for knobs in picks.values():
        kernel = compiled(lower(func, **dataclasses.asdict(knobs)))
        got = run(kernel, [x, pack(w, pack_width("float32", TARGET)), b], (31, 96))
        np.testing.assert_allclose(got, gelu(x @ w + b), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("mcpu", ["x86-64", "haswell", "skylake-avx512"])
def test_other_vector_widths(mcpu):
    """Plain x86-64, AVX2 and AVX-512 kernels compile; those that this machine can run are right."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    width = pack_width("float32", target)
    assert width == {"x86-64": 8, "haswell": 16, "skylake-avx512": 64}[mcpu]

    def build(bb, x, w):
        return bb.emit(bb.call_te(packed_matmul, x, w, 40, primfunc_attrs={"op_pattern": 4}))

    func = fused([((9, 24), "float32"), ((-(-40 // width), 24, width), "float32")], build, target)
    exe = tvm.compile(
        tvm.IRModule({"main": lower(func, target).with_attr("global_symbol", "main")}), target
    )
    if all(
        tvm.get_global_func("target.llvm_cpu_has_feature")(f, TARGET) for f in ("avx2", "avx512f")
    ):
        x, w = random(9, 24), random(24, 40)
        np.testing.assert_allclose(
            run(exe["main"], [x, pack(w, width)], (9, 40)), x @ w, atol=1e-5, rtol=1e-5
        )


def test_aarch64_compiles():
    """A kernel for another architecture is made without running it."""
    target = tvm.target.Target(
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"], "num-cores": 4}
    )
    assert pack_width("float32", target) == 16
    func = fused(
        [((9, 24), "float32"), ((3, 24, 16), "float32")],
        lambda bb, x, w: bb.emit(
            bb.call_te(packed_matmul, x, w, 40, primfunc_attrs={"op_pattern": 4})
        ),
        target,
    )
    exe = tvm.compile(
        tvm.IRModule({"main": lower(func, target).with_attr("global_symbol", "main")}), target
    )
    assert "fmla" in exe.mod.inspect_source("asm")


@pytest.mark.parametrize("direct", [0, 4])
@pytest.mark.parametrize("n", [130, 64])
def test_row_major_argument(n, direct):
    """A row-major weight is read in place for few rows, packed by the kernel for more."""
    rows, k = tirx.Var("B", "int64"), 40
    func = fused(
        [((rows, k), "float32"), ((k, n), "float32"), ((n,), "float32"), ((rows, n), "float32")],
        lambda bb, x, w, b, r: bb.emit(
            relax.op.add(
                bb.emit(relax.op.nn.relu(bb.emit(relax.op.add(bb.emit(relax.op.matmul(x, w)), b)))),
                r,
            )
        ),
    )
    kernel = compiled(lower(func, direct=direct))
    w, b = random(k, n), random(n)
    for m in (1, 4, 5, 33):
        x, r = random(m, k), random(m, n, seed=1)
        want = np.maximum(x @ w + b, 0) + r
        np.testing.assert_allclose(run(kernel, [x, w, b, r], (m, n)), want, atol=1e-5, rtol=1e-5)


def linear(bb, x, w):
    """``x @ w.T`` with the weight as PyTorch's linear keeps it."""

    def compute(x, w):
        k = te.reduce_axis((0, w.shape[1]), name="k")
        return te.compute(
            (*x.shape[:-1], w.shape[0]), lambda *i: te.sum(x(*i[:-1], k) * w(i[-1], k), axis=k)
        )

    return bb.emit(bb.call_te(compute, x, w, primfunc_attrs={"op_pattern": 4}))


@pytest.mark.parametrize("n", [130, 64, 3])
def test_linear_argument(n):
    """A weight kept as [N, K] is transposed panel by panel."""
    rows, k = tirx.Var("B", "int64"), 50
    func = fused(
        [((rows, k), "float32"), ((n, k), "float32")],
        lambda bb, x, w: bb.emit(relax.op.tanh(linear(bb, x, w))),
    )
    kernel = compiled(lower(func))
    w = random(n, k)
    for m in (1, 5, 33):
        x = random(m, k)
        np.testing.assert_allclose(
            run(kernel, [x, w], (m, n)), np.tanh(x @ w.T), atol=1e-5, rtol=1e-5
        )


def test_batched_with_symbolic_everything():
    """Attention's products: leading dimensions on both sides, all sizes symbolic."""
    batch, t = tirx.Var("B", "int64"), tirx.Var("T", "int64")
    func = fused(
        [((batch, 3, t, t), "float32"), ((batch, 3, t, 20), "float32")],
        lambda bb, p, v: bb.emit(relax.op.matmul(p, v)),
    )
    problem = cpu_gemm.match(func, TARGET)
    assert problem.layout == "kn" and len(problem.batch) == 2
    kernel = compiled(lower(func))
    for b, size in ((1, 1), (2, 9), (3, 70)):
        p, v = random(b, 3, size, size), random(b, 3, size, 20)
        np.testing.assert_allclose(
            run(kernel, [p, v], (b, 3, size, 20)), p @ v, atol=1e-4, rtol=1e-5
        )


def test_leading_dimensions_are_rows():
    """Rows are B * T; a mask over (T, N) and a residual see their own indices."""
    batch, t, k, n = tirx.Var("B", "int64"), 5, 24, 70
    func = fused(
        [
            ((batch, t, k), "float32"),
            ((k, n), "float32"),
            ((t, n), "float32"),
            ((batch, t, n), "float32"),
        ],
        lambda bb, x, w, m, r: bb.emit(
            relax.op.add(bb.emit(relax.op.multiply(bb.emit(relax.op.matmul(x, w)), m)), r)
        ),
    )
    kernel = compiled(lower(func))
    for b in (1, 3):
        x, w, m, r = random(b, t, k), random(k, n), random(t, n), random(b, t, n)
        np.testing.assert_allclose(
            run(kernel, [x, w, m, r], (b, t, n)), x @ w * m + r, atol=1e-5, rtol=1e-5
        )


@T.prim_func(private=True, s_tir=True)
def two_outputs(
    x: T.Buffer((9, 24), "float32"),
    w: T.Buffer((24, 70), "float32"),
    y: T.Buffer((9, 70), "float32"),
    z: T.Buffer((9, 70), "float32"),
):
    """A product and its square, both wanted."""
    for i, j, k in T.grid(9, 70, 24):
        with T.sblock("matmul"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                y[vi, vj] = T.float32(0)
            y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vk, vj]
    for i, j in T.grid(9, 70):
        with T.sblock("square"):
            vi, vj = T.axis.remap("SS", [i, j])
            z[vi, vj] = y[vi, vj] * y[vi, vj]


def test_several_outputs():
    """Both outputs come from one kernel."""
    x, w = random(9, 24), random(24, 70)
    y, z = (misaligned(np.zeros((9, 70), "float32")) for _ in range(2))
    compiled(lower(two_outputs))(misaligned(x), misaligned(w), y, z)
    np.testing.assert_allclose(y.numpy(), x @ w, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(z.numpy(), (x @ w) ** 2, atol=1e-4, rtol=1e-4)


def test_half_precision_accumulates_in_float32():
    """The error is that of one rounding of the result, not of a sum in float16."""
    n, k = 70, 512
    width = pack_width("float16", TARGET)
    rows = tirx.Var("B", "int64")
    func = fused(
        [((rows, k), "float16"), ((-(-n // width), k, width), "float16"), ((n,), "float16")],
        lambda bb, x, w, b: bb.emit(
            relax.op.add(
                bb.emit(bb.call_te(packed_matmul, x, w, n, primfunc_attrs={"op_pattern": 4})), b
            )
        ),
    )
    kernel = compiled(lower(func))
    w, b = random(k, n).astype("float16"), random(n).astype("float16")
    for m in (1, 9):
        x = random(m, k).astype("float16")
        want = (x.astype("float64") @ w.astype("float64")).astype("float16") + b
        np.testing.assert_allclose(
            run(kernel, [x, pack(w, width), b], (m, n), "float16"), want, atol=0.04, rtol=2e-3
        )


def test_bfloat16():
    """bfloat16 operands, checked against float32 arithmetic on the same values."""
    torch = pytest.importorskip("torch")
    n, k = 70, 96
    width = pack_width("bfloat16", TARGET)
    func = fused(
        [((9, k), "bfloat16"), ((-(-n // width), k, width), "bfloat16")],
        lambda bb, x, w: bb.emit(
            relax.op.nn.silu(
                bb.emit(bb.call_te(packed_matmul, x, w, n, primfunc_attrs={"op_pattern": 4}))
            )
        ),
    )
    x, w = torch.from_numpy(random(9, k)).bfloat16(), torch.from_numpy(random(k, n)).bfloat16()
    bits = pack(w.view(torch.int16).numpy(), width)
    out = torch.empty(9, n, dtype=torch.bfloat16)
    args = [x, torch.from_numpy(bits).view(torch.bfloat16), out]
    compiled(lower(func))(*(tvm_ffi.from_dlpack(a) for a in args))
    want = torch.nn.functional.silu(x.float() @ w.float())
    torch.testing.assert_close(out.float(), want, atol=0.1, rtol=1e-2)


def test_accumulators_stay_in_registers():
    """The innermost loop of a full tile has no access to the stack."""
    exe = tvm.compile(
        tvm.IRModule({"main": lower(packed_block(128, 64)).with_attr("global_symbol", "main")}),
        TARGET,
    )
    lines = exe.mod.inspect_source("asm").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(".LBB")]
    loops = [
        list(itertools.takewhile(lambda x: not x.lstrip().startswith("j"), lines[i:]))
        for i in starts
    ]
    tile = max(loops, key=lambda body: sum("vfmadd" in line for line in body))
    assert sum("vfmadd" in line for line in tile) >= 24
    assert not any("mm" in line and "%rsp" in line for line in tile)


def test_other_reductions_do_not_match():
    """A sum and a product with a producer of its own are left to other rules."""
    total = fused([((9, 24), "float32")], lambda bb, x: bb.emit(relax.op.sum(x, axis=1)))
    assert cpu_gemm.match(total, TARGET) is None
    assert cpu_gemm.match(packed_block(64, 16), tvm.target.Target("cuda")) is None


def test_key_features_and_hash():
    """JSON tells problems apart; one row of features a setting; a hash of the source."""
    problem, other = (cpu_gemm.match(packed_block(n, 64), TARGET) for n in (64, 128))
    assert problem.key() != other.key() and problem.key()["rows"] == "*"
    assert problem.flops({"B": 3}) == 2 * 3 * 64 * 64
    assert problem.bytes({"B": 3}) == 4 * (3 * 64 + 64 * 64 + 64 + 3 * 64)
    points = cpu_gemm.space(problem, TARGET)
    table = cpu_gemm.features(problem, points, TARGET)
    assert (
        table.shape == (len(points), len(cpu_gemm.TEMPLATE.feature_names))
        and np.isfinite(table).all()
    )
    template = cpu_gemm.TEMPLATE
    assert all(template.knobs_from_json(template.knobs_to_json(c)) == c for c in points)
    assert len(source_hash(template)) == 64

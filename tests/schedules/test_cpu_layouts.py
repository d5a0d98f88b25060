"""The CPU GEMM on other layouts of B, batches, several outputs, and 16-bit dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, te, tirx
from tvm.script import tirx as T

from tests.schedules.gemm import (
    TARGET,
    compiled,
    fused,
    lower,
    misaligned,
    random,
    run,
)
from tvmcap.schedules import cpu_gemm
from tvmcap.schedules.cpu_target import pack_width
from tvmcap.schedules.gemm_match import pack, packed_matmul


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_16_bit_arguments(layout, dtype):
    """Panels of a 16-bit weight are copied to float32 once, squares of them in registers."""
    torch = pytest.importorskip("torch")
    n, k = 100, 50
    shape = (n, k) if layout == "nk" else (k, n)
    func = fused(
        [((7, k), dtype), (shape, dtype)],
        lambda bb, x, w: linear(bb, x, w) if layout == "nk" else bb.emit(relax.op.matmul(x, w)),
    )
    lowered = lower(func)
    assert ("T.Shuffle" in lowered.script()) == (layout == "nk")
    x, w = (torch.from_numpy(random(*s)).to(getattr(torch, dtype)) for s in ((7, k), shape))
    out = torch.empty(7, n, dtype=x.dtype)
    compiled(lowered)(x, w, out)
    want = x.float() @ (w.float().T if layout == "nk" else w.float())
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=1e-2)


def test_every_remainder_of_rows():
    """What full tiles leave is done in tiles of 4, 2 and 1 rows."""
    rows = tirx.Var("B", "int64")
    func = fused(
        [((rows, 33), "float32"), ((33, 70), "float32")],
        lambda bb, x, w: bb.emit(relax.op.matmul(x, w)),
    )
    kernel, w = compiled(lower(func, mr=14, nv=2, direct=14)), random(33, 70)
    for m in range(30):
        x = random(m, 33)
        np.testing.assert_allclose(run(kernel, [x, w], (m, 70)), x @ w, atol=1e-5, rtol=1e-5)


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

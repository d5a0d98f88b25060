"""Elementary functions on llvm: accurate over all of float32, and vectorized."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.tirx.stmt import ForKind

from tvmcap.kernel.intrinsics import expand
from tvmcap.schedules import cpu_build as b

torch = pytest.importorskip("torch")

CPU = tvm.get_global_func("target.llvm_get_system_cpu")()
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": CPU})
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 88.72, 88.73, -87.4, -103.9, -104.1, 1e-45, -1e-45],
    "float32",
)


def mapping(op, count, inputs=1, dtype="float32"):
    """Return a PrimFunc that applies ``op`` to vectors of 16."""
    buffers = [
        tirx.decl_buffer((count,), dtype, f"x{i}", data_alignment=16) for i in range(inputs + 1)
    ]

    def element(i):
        return tirx.BufferStore(
            buffers[-1], op(*(tirx.BufferLoad(x, [i]) for x in buffers[:-1])), [i]
        )

    body = b.loop(
        "i",
        count // 16,
        lambda i: b.loop("l", 16, lambda lane: element(i * 16 + lane), ForKind.VECTORIZED),
    )
    return tirx.PrimFunc(buffers, body).with_attr({"global_symbol": "main", "s_tir": True})


def values(count=1 << 20, seed=5):
    """Return random bit patterns, values around zero, and special values."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = rng.uniform(-12, 12, count - len(SPECIAL)).astype(np.float32)
    return np.concatenate([bits, near, SPECIAL])


def apply(func, *arrays):
    """Compile and run on float32 arrays."""
    out = tvm.runtime.tensor(np.empty_like(arrays[0]))
    tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"](
        *(tvm.runtime.tensor(a) for a in arrays), out
    )
    return out.numpy()


@pytest.mark.parametrize(
    ("name", "bound"), [("exp", 1.5), ("tanh", 2.0), ("erf", 1.5), ("log", 1.5), ("sigmoid", 4.0)]
)
def test_accuracy(name, bound):
    """The error stays within a few ulp; NaN and infinities are where PyTorch has them."""
    x = values()
    got = apply(expand(mapping(getattr(tirx, name), len(x))), x)
    with np.errstate(over="ignore"):
        want = getattr(torch, name)(torch.from_numpy(x).double()).numpy()
        rounded = want.astype("float32")
    finite = np.isfinite(rounded)
    if name == "sigmoid":
        finite &= ~((x < -87.3) & np.isfinite(x))
        assert got[(x < -87.3)].max() < 2e-38
    ulp = np.maximum(np.spacing(np.abs(rounded[finite])), np.float32(1.4e-45)).astype("float64")
    assert (np.abs(got[finite] - want[finite]) / ulp).max() <= bound
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(got[special], rounded[special])


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "log", "sigmoid"])
def test_vectorized(name):
    """No call into the C library is left, and the arithmetic is on vectors."""
    exe = tvm.compile(tvm.IRModule({"main": expand(mapping(getattr(tirx, name), 64))}), TARGET)
    asm = exe.mod.inspect_source("asm")
    assert not any(f"{call}@" in asm for call in ("expf", "tanhf", "erff", "logf"))
    assert any(unit in asm for unit in ("zmm", "ymm", ".4s"))


def test_extremes_keep_nan():
    """max and min give NaN where either side is NaN; relu keeps NaN."""
    x = np.tile(SPECIAL, 4)[:48]
    y = np.roll(x, 5)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    np.testing.assert_array_equal(
        apply(expand(mapping(tirx.Max, 48, 2)), x, y), torch.maximum(tx, ty).numpy()
    )
    np.testing.assert_array_equal(
        apply(expand(mapping(tirx.Min, 48, 2)), x, y), torch.minimum(tx, ty).numpy()
    )
    relu = mapping(lambda v: tirx.Max(v, tirx.FloatImm("float32", 0.0)), 48)
    np.testing.assert_array_equal(apply(expand(relu), x), torch.relu(tx).numpy())


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 4.0])
def test_small_powers_are_products(power):
    """Whole powers up to four agree with float64 to a rounding or two."""
    x = np.random.default_rng(7).standard_normal(1024).astype("float32")
    func = expand(mapping(lambda v: tirx.op.pow(v, tirx.FloatImm("float32", power)), 1024))
    assert "pow" not in func.script()
    np.testing.assert_allclose(apply(func, x), x.astype("float64") ** power, rtol=4e-7)


def test_bfloat16_computes_in_float32():
    """A bfloat16 erf is the float32 one rounded once, without calls into the C library."""
    func = expand(mapping(tirx.erf, 1024, dtype="bfloat16"))
    exe = tvm.compile(tvm.IRModule({"main": func}), TARGET)
    assert "erff" not in exe.mod.inspect_source("asm")
    x = torch.randn(1024, generator=torch.Generator().manual_seed(4)).bfloat16()
    out = torch.empty_like(x)
    exe["main"](x, out)
    torch.testing.assert_close(out, torch.erf(x.float()).bfloat16(), rtol=8e-3, atol=0)


def test_half_precision_computes_in_float32():
    """A float16 tanh is the float32 one rounded once."""
    x = np.random.default_rng(8).standard_normal(1024).astype("float16")
    got = apply(expand(mapping(tirx.tanh, 1024, dtype="float16")), x)
    np.testing.assert_allclose(got, np.tanh(x.astype("float64")).astype("float16"), rtol=1e-3)


def test_leaves_the_rest_alone():
    """Integers, float64 and functions that are instructions stay as they are."""
    func = mapping(lambda v: tirx.sqrt(v) + tirx.sin(v), 64)
    tvm.ir.assert_structural_equal(expand(func), func)
    double = mapping(tirx.tanh, 64, dtype="float64")
    tvm.ir.assert_structural_equal(expand(double), double)

"""Named values become cells: code grows with the expression, and conditions keep guarding loads."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.tirx.stmt import ForKind

from tests.schedules.gemm import compiled, fused, lower, packed_block
from tvmcap.kernel import fallback
from tvmcap.kernel.cells import settle
from tvmcap.kernel.intrinsics import expand
from tvmcap.schedules import cpu_build as b

torch = pytest.importorskip("torch")

CPU = tvm.get_global_func("target.llvm_get_system_cpu")()
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": CPU, "num-cores": 2})
CHAIN = ("sigmoid", "tanh", "erf", "exp", "log", "sigmoid", "erf", "tanh")


def nested(depth, count=64, dtype="float32"):
    """Return a PrimFunc of ``depth`` functions, each of the one before, 16 elements at a time."""
    x, y = (tirx.decl_buffer((count,), dtype, name, data_alignment=16) for name in "xy")

    def element(i):
        value = tirx.BufferLoad(x, [i])
        for name in CHAIN[:depth]:
            value = getattr(tirx, name)(value)
        return tirx.BufferStore(y, tirx.Max(value, value * value), [i])

    def line(i):
        return b.loop("l", 16, lambda lane: element(i * 16 + lane), ForKind.VECTORIZED)

    body = b.loop("i", count // 16, line)
    return tirx.PrimFunc([x, y], body).with_attr({"global_symbol": "main", "s_tir": True})


def code(func, kind="ll"):
    """Return the LLVM code of a PrimFunc."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.compile(mod, TARGET).mod.inspect_source(kind)


def test_code_grows_with_the_expression():
    """Eight nested functions take about four times the code of two."""
    two, eight = (len(code(expand(nested(depth))).splitlines()) for depth in (2, 8))
    assert eight < 6 * two


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nested_functions_are_right(dtype):
    """Eight nested functions agree with float64 within the rounding of the 16-bit steps."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    want = x.double()
    for name in CHAIN:
        want = getattr(torch, name)(want)
    want = torch.maximum(want, want * want)
    out = torch.empty_like(x)
    module = tvm.IRModule({"main": expand(nested(8, dtype=dtype))})
    tvm.compile(module, TARGET)["main"](x, out)
    error = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}[dtype]
    torch.testing.assert_close(out.double(), want, atol=error, rtol=error)


def test_a_condition_guards_loads():
    """A named value under a condition reads no memory where the condition is false."""
    x, y = tirx.decl_buffer((8,), "float32", "x"), tirx.decl_buffer((16,), "float32", "y")

    def element(i):
        value = tirx.exp(tirx.BufferLoad(x, [i]))
        return tirx.BufferStore(
            y, tirx.if_then_else(i < 8, value, tirx.FloatImm("float32", 3)), [i]
        )

    for kind in (ForKind.SERIAL, ForKind.VECTORIZED):
        body = b.loop("i", 16, element, kind)
        func = expand(
            tirx.PrimFunc([x, y], body).with_attr({"global_symbol": "main", "s_tir": True})
        )
        for line in func.script().splitlines():
            assert " x[" not in line or "if_then_else" in line
        data, out = (
            np.linspace(-1, 1, 8, dtype="float32"),
            tvm.runtime.tensor(np.zeros(16, "float32")),
        )
        tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"](tvm.runtime.tensor(data), out)
        np.testing.assert_allclose(out.numpy(), [*np.exp(data), *[3] * 8], rtol=1e-6)


def test_leaves_plain_stores_alone():
    """Statements that name nothing stay as they are."""
    func = nested(0)
    tvm.ir.assert_structural_equal(settle(func.body), func.body)


def test_a_name_bound_twice():
    """One variable with two values, as when an expression is copied: each use sees its own."""
    y = tirx.decl_buffer((2,), "float32", "y")
    v = tirx.Var("v", "float32")

    def square(value):
        return tirx.Let(v, tirx.FloatImm("float32", value), v * v)

    store = tirx.BufferStore(y, square(2) + square(3), [b.const(0)])
    func = tirx.PrimFunc([y], settle(store)).with_attr({"global_symbol": "main", "s_tir": True})
    out = tvm.runtime.tensor(np.zeros(2, "float32"))
    tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"](out)
    assert out.numpy()[0] == 13


def test_kernels_ask_for_no_memory_per_row():
    """Accumulators and cells lie on the stack: of the pool a kernel asks at most its tile."""
    norm = fused(
        [((9, 256), "float32"), ((256,), "float32"), ((256,), "float32")],
        lambda bb, x, w, bias: bb.emit(relax.op.nn.layer_norm(x, w, bias, axes=-1)),
    )
    scheduled, _ = fallback.schedule(norm, TARGET)
    assert requests(scheduled) == 0
    assert requests(lower(packed_block(128, 64))) <= 2  # serial and parallel


def requests(func):
    """Return how many places of a lowered PrimFunc ask the pool for memory."""
    counts = []

    @tvm.instrument.pass_instrument
    class Count:
        def run_after_pass(self, mod, info):
            if info.name.endswith("LowerTVMBuiltin"):
                counts.append(mod.script().count("AllocWorkspace"))

    with tvm.transform.PassContext(instruments=[Count()]):
        compiled(func, TARGET)
    return max(counts)


def test_blocks_in_a_vectorized_loop():
    """A trace leaves its blocks in place: each lane still computes its own value."""
    x, y = (tirx.decl_buffer((64,), "float32", name, data_alignment=16) for name in "xy")
    at = tirx.Var("at", "int64")
    axis = tirx.IterVar(tvm.ir.Range(0, b.const(64)), at, tirx.IterVar.DataPar)
    store = tirx.BufferStore(y, tirx.tanh(tirx.BufferLoad(x, [at])), [at])
    block = tvm.s_tir.SBlock([axis], [], [], "tanh", store)

    def line(i):
        def lane(v):
            return tvm.s_tir.SBlockRealize([i * 8 + v], True, block)

        return b.loop("l", 8, lane, ForKind.VECTORIZED)

    root = tvm.s_tir.SBlock([], [], [], "root", b.loop("i", 8, line))
    body = tvm.s_tir.SBlockRealize([], True, root)
    func = tirx.PrimFunc([x, y], body).with_attr({"global_symbol": "main", "s_tir": True})
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    given, out = tvm.runtime.tensor(values), tvm.runtime.tensor(np.zeros_like(values))
    compiled(expand(func))(given, out)
    np.testing.assert_allclose(out.numpy(), np.tanh(values), rtol=1e-6)


def test_a_loop_among_values_keeps_its_own():
    """Values named in a loop stay in it, and a value named before it is seen there."""
    x, y = (tirx.decl_buffer((18,), "float32", name, data_alignment=16) for name in "xy")
    first = tirx.Var("first", "float32")

    def part(i, more):
        named = tirx.Var("named", "float32")
        store = tirx.BufferStore(y, tirx.sigmoid(named) * named + more, [i])
        return b.seq(tirx.Bind(named, tirx.BufferLoad(x, [i]) + tirx.FloatImm("float32", 1)), store)

    def lane(v):
        return b.loop("l", 16, lambda i: part(v * 16 + i, first), ForKind.VECTORIZED)

    body = tirx.SeqStmt(
        [
            tirx.Bind(first, tirx.exp(tirx.BufferLoad(x, [b.const(0)]))),
            tirx.For(tirx.Var("v", "int64"), b.const(0), b.const(1), ForKind.SERIAL, lane(0)),
            *part(b.const(16), first).seq,
            b.loop("j", tirx.max(b.const(1), b.const(0)), lambda j: part(j + 17, first)),
        ]
    )
    func = tirx.PrimFunc([x, y], body).with_attr({"global_symbol": "main", "s_tir": True})
    values = np.linspace(-3, 3, 18, dtype=np.float32)
    given, out = tvm.runtime.tensor(values), tvm.runtime.tensor(np.zeros_like(values))
    compiled(expand(func))(given, out)
    z = values + 1
    np.testing.assert_allclose(out.numpy(), z / (1 + np.exp(-z)) + np.exp(values[0]), rtol=1e-6)

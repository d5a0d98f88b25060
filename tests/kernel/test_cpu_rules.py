"""The loop-nest rule never changes results, whatever the operator and the size."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from tests.schedules import gemm
from tvmcap.kernel import conv_match, cpu_rules
from tvmcap.kernel import cpu_blocks as cb
from tvmcap.kernel.cpu_nests import crossed_axis
from tvmcap.kernel.intrinsics import expand

torch = pytest.importorskip("torch")
F = torch.nn.functional
TARGET = gemm.TARGET


def fused(fn, args, dynamic):
    """Return the module of ``fn``, fused and not scheduled."""
    from tvm.relax.frontend.torch import from_exported_program

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return fn(*inputs)

    program = torch.export.export(Module(), args, dynamic_shapes={"inputs": dynamic})
    mod = from_exported_program(program, unwrap_unit_return_tuple=True)
    return gemm.fuse(mod)


def compiled(fn, args, dynamic):
    """Return ``fn`` fused, scheduled by the rule and compiled, as a function of tensors."""
    mod = fused(fn, args, dynamic)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            scheduled = cpu_rules.schedule(func, TARGET)
            assert scheduled.attrs["tirx.is_scheduled"]
            assert all(p.data_alignment == 16 for p in scheduled.params if tirx.is_buffer_var(p))
            mod.update_func(name, expand(scheduled))
    main = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())["main"]
    return lambda *inputs: torch.from_numpy(
        main(*(tvm.runtime.tensor(x.numpy()) for x in inputs)).numpy()
    )


def randn(*shape):
    """Return normal values, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


B, S = torch.export.Dim("B"), torch.export.Dim("S")
CASES = {
    "gelu": (lambda x: F.gelu(x), [(8, 2048)], ({0: B},), [(1, 300)]),
    "bias": (lambda x, b: torch.tanh(x + b), [(8, 100), (100,)], ({0: B}, None), [1, 900]),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (77,), w, b),
        [(8, 3, 77), (77,), (77,)],
        ({0: B}, None, None),
        [1, 50],
    ),
    "rms_norm": (
        lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
        [(8, 130), (130,)],
        ({0: B}, None),
        [1, 300],
    ),
    "conv": (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)),
        [(4, 5, 19, 19), (10, 5, 3, 3), (10,)],
        ({0: B}, None, None),
        [1, 9],
    ),
    "conv_1x1": (lambda x, w: F.conv2d(x, w), [(4, 5, 7, 7), (6, 5, 1, 1)], ({0: B}, None), [1]),
    "conv_stride": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        [(4, 3, 33, 33), (10, 3, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "conv_depthwise": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=8),
        [(4, 8, 11, 11), (8, 1, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "conv_stride_3": (
        lambda x, w: F.conv2d(x, w, stride=3, padding=2),
        [(3, 3, 20, 31), (5, 3, 5, 4)],
        ({0: B}, None),
        [1],
    ),
    "conv_7x7": (
        lambda x, w, b: torch.tanh(F.conv2d(x, w, b, stride=2, padding=3)),
        [(2, 3, 40, 47), (24, 3, 7, 7), (24,)],
        ({0: B}, None, None),
        [1],
    ),
    "conv_dilated": (
        lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
        [(3, 4, 9, 13), (7, 4, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "conv_groups": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=2, stride=(2, 1)),
        [(3, 6, 9, 17), (10, 3, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "conv_deep": (
        lambda x, w: F.conv2d(x, w),
        [(2, 33, 6, 5), (17, 33, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "conv_multiplier": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=4, stride=2),
        [(2, 4, 30, 34), (12, 1, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "conv_strided_depthwise": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=8, stride=2),
        [(4, 8, 35, 37), (8, 1, 3, 3)],
        ({0: B}, None),
        [1],
    ),
    "reshape": (lambda x: x.reshape(-1, 64, 3, 4, 64), [(3, 64, 768)], ({0: B},), [1, 2]),
    "roll": (lambda x: x.roll(1, 0) * 2, [(3, 40, 300)], ({0: B},), [1, 5]),
    "reshape_add": (
        lambda x, y: x.reshape(-1, 64, 3, 4, 64) + y,
        [(3, 64, 768), (64,)],
        ({0: B}, None),
        [1, 2],
    ),
    "max_pool": (lambda x: F.max_pool2d(x, 2), [(4, 6, 18, 18)], ({0: B},), [1, 40]),
    "mean": (lambda x: x.mean((2, 3)), [(4, 6, 13, 13)], ({0: B},), [1, 300]),
    "column_sum": (lambda x: x.sum(0), [(40, 213)], ({0: B},), [2, 700]),
    "total": (lambda x: x.sum(), [(40, 213)], ({0: B},), [2, 300]),
    "transpose": (lambda x: x.transpose(1, 2) * 2, [(4, 17, 50)], ({0: B},), [1, 90]),
    "transpose_rows": (lambda x: x.t() + 1, [(40, 213)], ({0: B},), [1, 15, 16, 700]),
    "transpose_add": (
        lambda x, y: torch.relu(x.permute(0, 2, 3, 1) + y),
        [(3, 18, 7, 35), (35, 18)],
        ({0: B}, None),
        [1, 9],
    ),
    "matmul": (lambda x, w: x @ w, [(6, 100), (100, 130)], ({0: B}, None), [1, 70]),
    "compare": (lambda x: torch.where(x > 1, x, -x) + (x > 0), [(8, 129)], ({0: B},), [1, 400]),
}


def test_bfloat16_chain():
    """Values named inside a bfloat16 expression keep their meaning."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((5, 40), "bfloat16"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.op.exp(x))
            out = bb.emit_output(relax.op.add(relax.op.multiply(y, y), relax.op.maximum(y, x)))
        bb.emit_func_output(out)
    mod = gemm.fuse(bb.get())
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod.update_func(name, expand(cpu_rules.schedule(func, TARGET)))
    value = randn(5, 40).bfloat16()
    main = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())["main"]
    got, y = main(value), torch.exp(value.float())
    torch.testing.assert_close(
        got.float(), y * y + torch.maximum(y, value.float()), atol=0.1, rtol=0.02
    )


@pytest.mark.parametrize("name", CASES)
def test_any_batch(name):
    """One kernel agrees with PyTorch at the example's batch and at others."""
    fn, shapes, dynamic, batches = CASES[name]
    main = compiled(fn, tuple(randn(*s) for s in shapes), dynamic)
    for batch in [shapes[0][0], *(b[0] if isinstance(b, tuple) else b for b in batches)]:
        args = [randn(batch, *shapes[0][1:]), *(randn(*s) for s in shapes[1:])]
        torch.testing.assert_close(main(*args), fn(*args), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("conv")])
def test_convolutions_have_a_nest_of_their_own(name):
    """Each form of convolution is found, whatever its stride, dilation and groups."""
    fn, shapes, dynamic, _ = CASES[name]
    mod = fused(fn, tuple(randn(*s) for s in shapes), dynamic)
    blocks = [
        (func, cb.parse(func)) for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)
    ]
    found = [
        conv_match.match(x, parsed, func.params)
        for func, kept in blocks
        if kept is not None
        for parsed in [cb.inline(kept, func.params)]
        for x in parsed
    ]
    assert sum(c is not None for c in found) == 1


def test_16_bit_convolution():
    """bfloat16 data and weights are summed in float32."""

    def build(bb, x, w):
        wide = bb.emit(relax.op.nn.conv2d(x, w, padding=1, strides=2, out_dtype="float32"))
        return bb.emit(relax.op.astype(bb.emit(relax.op.nn.relu(wide)), "bfloat16"))

    func = gemm.fused([((2, 5, 12, 21), "bfloat16"), ((9, 5, 3, 3), "bfloat16")], build)
    x, w = randn(2, 5, 12, 21).bfloat16(), randn(9, 5, 3, 3).bfloat16()
    out = torch.empty(2, 9, 6, 11, dtype=torch.bfloat16)
    gemm.compiled(expand(cpu_rules.schedule(func, TARGET)))(x, w, out)
    want = F.relu(F.conv2d(x.float(), w.float(), padding=1, stride=2)).bfloat16()
    torch.testing.assert_close(out, want)


def test_a_reshape_is_marked():
    """The plan can tell a scheduled reshape from a kernel that moves data."""
    shapes = {"reshape": True, "transpose": False}
    for name, reshapes in shapes.items():
        fn, sizes, dynamic, _ = CASES[name]
        mod = fused(fn, tuple(randn(*s) for s in sizes), dynamic)
        (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
        assert bool(cpu_rules.schedule(func, TARGET).attrs.get(cpu_rules.RESHAPE)) == reshapes


@pytest.mark.parametrize(
    ("fn", "axis"),
    [
        (lambda x: x.transpose(1, 2) * 2, 1),
        (lambda x: x * 2, None),
        (lambda x: x.flip(2), None),
    ],
)
def test_transposes_take_lines_of_memory_in_strips(fn, axis) -> None:
    (func,) = (
        f
        for _, f in fused(fn, (randn(4, 17, 50),), ({0: B},)).functions_items()
        if isinstance(f, tirx.PrimFunc)
    )
    (block,) = cb.inline(cb.parse(func), func.params)
    found = crossed_axis(block)
    assert (found is None) if axis is None else found[0].same_as(block.axes[axis])


def test_softmax_with_symbolic_reduction():
    """The reduced dimension is symbolic too: below, at and above multiples of a vector."""
    main = compiled(lambda x: F.softmax(x, -1), (randn(3, 4, 37),), ({0: B, 2: S},))
    for batch, size in ((1, 1), (2, 15), (2, 16), (3, 65), (40, 200)):
        x = randn(batch, 4, size)
        torch.testing.assert_close(main(x), F.softmax(x, -1))
    x[0, 0, 3] = float("nan")
    x[0, 1, 4] = float("inf")
    torch.testing.assert_close(main(x), F.softmax(x, -1), equal_nan=True)


def test_max_pool_keeps_nan():
    """A NaN in a window is the window's result."""
    main = compiled(lambda x: F.relu(F.max_pool2d(x, 2)), (randn(2, 3, 8, 8),), ({0: B},))
    x = randn(2, 3, 8, 8)
    x[0, 1, 2, 3] = x[1, 0, 0, 0] = float("nan")
    torch.testing.assert_close(main(x), F.relu(F.max_pool2d(x, 2)), equal_nan=True)


@T.prim_func(private=True, s_tir=True)
def running(x: T.Buffer((T.int64(64),), "float32"), y: T.Buffer((T.int64(64),), "float32")):
    """A scan: the block reads what it wrote before."""
    for i in range(T.int64(64)):
        with T.sblock("scan"):
            vi = T.axis.opaque(T.int64(64), i)
            y[vi] = x[vi] + T.if_then_else(vi > T.int64(0), y[vi - T.int64(1)], T.float32(0))


def test_unknown_form_stays_serial(caplog):
    """A function of another form keeps its loops, is right, and says so at debug level."""
    with caplog.at_level("DEBUG", logger="tvmcap"):
        func = cpu_rules.schedule(running, TARGET)
    assert "stay serial" in caplog.text and "parallel" not in func.script()
    x = np.random.default_rng(1).standard_normal(64).astype("float32")
    out = tvm.runtime.tensor(np.zeros(64, "float32"))
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), TARGET)["main"](
        tvm.runtime.tensor(x), out
    )
    np.testing.assert_allclose(out.numpy(), np.cumsum(x), atol=1e-5)


def test_other_targets_are_left():
    """The rule is for llvm alone."""
    assert cpu_rules.schedule(running, tvm.target.Target({"kind": "c"})) is None

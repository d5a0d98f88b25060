"""Fallback: every kernel gets a schedule by a rule that is named, on both targets."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.planned import TARGET
from tvmcap.base import codegen
from tvmcap.base.errors import BuildError
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.kernel import elementwise, fallback

GPU = codegen.make_target({"kind": "cuda", "arch": "sm_80"})


def kernel(op, *shapes, target=TARGET):
    """Return the fused PrimFunc of one operator; a string in a shape is a symbolic extent."""
    (func,) = kernels(op, *shapes, target=target)
    return func


def kernels(op, *shapes, target=TARGET):
    """Return the fused PrimFuncs of a function."""
    builder = relax.BlockBuilder()
    names = {e: tirx.Var(e, "int64") for shape in shapes for e in shape if isinstance(e, str)}
    args = [
        relax.Var(f"x{i}", relax.TensorType([names.get(e, e) for e in s], "float32"))
        for i, s in enumerate(shapes)
    ]
    with builder.function("main", args):
        with builder.dataflow():
            out = builder.emit_output(op(*args))
        builder.emit_func_output(out)
    with target:
        mod = fuse(legalize(builder.get()))
    return [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]


def conv(x, w):
    return relax.op.nn.conv2d(x, w, padding=1)


CASES = {
    "exp": (relax.op.exp, ("B", 37)),
    "softmax": (relax.op.nn.softmax, ("B", 19)),
    "sum": (lambda x: relax.op.sum(x, axis=1), ("B", 23)),
    "matmul": (relax.op.matmul, ("B", 5), (5, 7)),
    "conv": (conv, ("B", 3, 6, 6), (4, 3, 3, 3)),
    "scalar": (lambda x: relax.op.sum(x), (3, 4)),
}


def reference(name, *arrays):
    import torch

    x = [torch.from_numpy(a).double() for a in arrays]
    return {
        "exp": lambda: x[0].exp(),
        "softmax": lambda: x[0].softmax(-1),
        "sum": lambda: x[0].sum(1),
        "matmul": lambda: x[0] @ x[1],
        "conv": lambda: torch.nn.functional.conv2d(x[0], x[1], padding=1),
        "scalar": lambda: x[0].sum(),
    }[name]().numpy()


@pytest.mark.parametrize("name", CASES)
def test_llvm_schedules_are_right(name) -> None:
    op, *shapes = CASES[name]
    func = kernel(op, *shapes)
    done, rule = fallback.schedule(func, TARGET)
    assert done.attrs["tirx.is_scheduled"] and rule in ("cpu", "none")
    assert len(done.params) == len(func.params)
    run = tvm.compile(tvm.IRModule({"main": done.with_attr("global_symbol", "main")}), TARGET)[
        "main"
    ]
    for rows in (1, 6) if any("B" in s for s in shapes) else (3,):
        rng = np.random.default_rng(rows)
        arrays = [
            rng.standard_normal([rows if e == "B" else e for e in s], dtype=np.float32)
            for s in shapes
        ]
        wanted = reference(name, *arrays)
        out = tvm.runtime.tensor(np.full(wanted.shape, np.nan, np.float32))
        run(*map(tvm.runtime.tensor, arrays), out)
        np.testing.assert_allclose(out.numpy(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("op", "worst"), [(relax.op.max, -np.inf), (relax.op.min, np.inf)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_extremes_of_infinities(op, worst, dtype) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 5), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(op(x, axis=1))
        builder.emit_func_output(out)
    with TARGET:
        (func,) = (
            f
            for f in fuse(legalize(builder.get())).functions.values()
            if isinstance(f, tirx.PrimFunc)
        )
    done, _ = fallback.schedule(func, TARGET)
    run = tvm.compile(tvm.IRModule({"main": done.with_attr("global_symbol", "main")}), TARGET)[
        "main"
    ]
    value = np.full((3, 5), worst, dtype)
    value[1, 2], value[2, 4] = 7, -np.inf
    result = tvm.runtime.tensor(np.zeros(3, dtype))
    run(tvm.runtime.tensor(value), result)
    np.testing.assert_array_equal(result.numpy(), (value.max if worst < 0 else value.min)(1))


def test_other_starts_stay() -> None:
    func = kernel(lambda x: relax.op.sum(x, axis=1), (3, 4))
    tvm.ir.assert_structural_equal(fallback.infinite_identities(func), func)


@pytest.mark.parametrize("name", CASES)
def test_gpu_schedules_bind_threads(name) -> None:
    op, *shapes = CASES[name]
    func = kernel(op, *shapes, target=GPU)
    done, rule = fallback.schedule(func, GPU)
    assert done.attrs["tirx.is_scheduled"] and rule.startswith("dlight-")
    text = done.script()
    assert "threadIdx.x" in text and "blockIdx.x" in text
    assert len(done.params) == len(func.params)


@pytest.mark.parametrize("axis", [0, 1])
def test_kernels_that_launch_threads_stay_as_they_are(axis: int) -> None:
    funcs = kernels(lambda x: relax.op.cumsum(x, axis), (6, 1000), target=GPU)
    found = [(func, *fallback.schedule(func, GPU)) for func in funcs]
    ((func, done),) = [(func, done) for func, done, rule in found if rule == "as written"]
    assert done.attrs["tirx.is_scheduled"]
    tvm.ir.assert_structural_equal(done.body, func.body)


def test_a_gpus_scatter_has_a_schedule() -> None:
    index = relax.const(np.arange(8, dtype="int64").reshape(2, 4))

    def scatter(x, y):
        return relax.op.scatter_elements(x, index, y, 1, "add")

    assert fallback.schedule(kernel(scatter, (2, 64), (2, 4), target=GPU), GPU)[1] == "as written"


def test_sums_of_threads_that_do_not_lower_give_way(caplog) -> None:
    """A convolution to one pixel, with work after it, which dlight sums up across threads."""

    def conv_relu(x, w, b):
        return relax.op.nn.relu(relax.op.nn.conv2d(x, w, strides=2, groups=2) + b)

    func = kernel(conv_relu, (2, 4, 4, 4), (4, 2, 3, 3), (1, 4, 1, 1), target=GPU)
    with caplog.at_level(logging.DEBUG, "tvmcap"):
        done, rule = fallback.schedule(func, GPU)
    assert "Cross-thread reduction" in caplog.text and rule.startswith("dlight-")
    tvm.s_tir.transform.LowerCrossThreadReduction()(tvm.IRModule({"main": done}))


def test_the_most_specific_rule_comes_first() -> None:
    assert (
        fallback.schedule(kernel(relax.op.matmul, (64, 64), (64, 64), target=GPU), GPU)[1]
        == "dlight-matmul"
    )
    assert fallback.schedule(kernel(relax.op.exp, (64, 64), target=GPU), GPU)[1] == "elementwise"


def test_a_rule_that_trips_does_not_stop_the_next(monkeypatch, caplog) -> None:
    from tvm.s_tir import dlight

    def broken(self, func, target, tunable):
        raise ValueError("pattern")

    monkeypatch.setattr(dlight.gpu.Matmul, "apply", broken)
    with caplog.at_level(logging.DEBUG, "tvmcap"):
        _, rule = fallback.schedule(kernel(relax.op.matmul, (64, 64), (64, 64), target=GPU), GPU)
    assert rule != "dlight-matmul" and "pattern" in caplog.text


def test_no_rule_at_all_shows_the_kernel(monkeypatch) -> None:
    from tvm.s_tir import dlight

    for rule in ("Matmul", "GEMV", "Reduction", "GeneralReduction", "Fallback"):
        monkeypatch.setattr(
            getattr(dlight.gpu, rule), "apply", lambda self, func, target, tunable: None
        )
    monkeypatch.setattr(elementwise, "scheduled", lambda func, target: None)
    with pytest.raises(BuildError, match=r"(?s)target='llvm'.*T\.prim_func"):
        fallback.schedule(kernel(relax.op.exp, (8, 8), target=GPU), GPU)


def test_a_form_no_cpu_rule_knows_keeps_its_loops(monkeypatch) -> None:
    from tvmcap.kernel import cpu_rules

    monkeypatch.setattr(cpu_rules, "schedule", lambda func, target: None)
    done, rule = fallback.schedule(kernel(relax.op.exp, (8, 8)), TARGET)
    assert rule == "none" and done.attrs["tirx.is_scheduled"]

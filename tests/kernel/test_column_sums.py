"""Sums over rows with the elementwise work around them: what is taken, and what it becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmcap.base import codegen
from tvmcap.graph import fuse
from tvmcap.graph.group import Graph, fused
from tvmcap.kernel import column_sums, fallback

CUDA = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})


def sum_of(
    width: int = 64, dtype: str = "bfloat16", *, work: bool = True, axis: int = 0, rank: int = 2
) -> Any:
    """A PrimFunc of (x, h): ``d = x * tanh(h)`` where there is ``work``, and the sum of d."""
    builder = relax.BlockBuilder()
    rows = tvm.tirx.Var("B", "int64")
    shape = [rows, width] if rank == 2 else [rows, 4, width]
    x, h = (relax.Var(name, relax.TensorType(shape, dtype)) for name in "xh")
    with builder.function("main", [x, h]):
        with builder.dataflow():
            d = builder.emit(relax.op.multiply(x, builder.emit(relax.op.tanh(h)))) if work else x
            wide = builder.emit(relax.op.astype(d, "float32"))
            total = builder.emit(relax.op.sum(wide, [axis]))
            total = builder.emit(relax.op.astype(total, "float16"))
            results = builder.emit_output(relax.Tuple([d, total] if work else [total]))
        builder.emit_func_output(results)
    graph = Graph(fuse.legalize(builder.get()))
    return fused(graph, list(range(len(graph.kernels))))


@pytest.mark.parametrize("work", [True, False])
def test_it_is_one_kernel_with_whole_vectors_and_little_shared_memory(work: bool) -> None:
    func, rule = fallback.schedule(sum_of(work=work), CUDA)
    assert rule == "column-sums"
    text = tvm.IRModule({"main": func}).script()
    assert text.count("blockIdx.x") == 1 and "T.vectorized" in text
    named = func.with_attr("global_symbol", "main")
    with CUDA:
        built = tvm.tirx.build(tvm.IRModule({"main": named}), target=CUDA)
    source = built.imports[0].inspect_source()
    source = source[source.rindex("__global__") :]
    assert source.count("*(uint4*)") >= (3 if work else 1)
    sizes = [
        int(line.split("[")[1].split("]")[0])
        for line in source.splitlines()
        if "__shared__" in line
    ]
    assert 4 * sum(sizes) <= 48 * 1024


def test_schedule_keeps_what_the_function_computes() -> None:
    """Without thread bindings the scheduled function runs on this CPU."""
    func = sum_of(dtype="float32")
    sch = column_sums.schedule(func, CUDA)
    assert sch is not None
    text = tvm.IRModule({"main": sch.mod["main"]}).script()
    rng = np.random.default_rng()
    rows = int(rng.integers(1, 600))
    x, h = (rng.standard_normal((rows, 64)).astype("float32") for _ in range(2))
    serial = _serial(sch.mod["main"])
    run = tvm.compile(tvm.IRModule({"main": serial}), target={"kind": "llvm"})
    d, total = np.zeros_like(x), np.zeros(64, "float16")
    tensors = [tvm.runtime.tensor(a) for a in (h, x, d, total)]  # in order of use
    run["main"](*tensors)
    np.testing.assert_allclose(tensors[2].numpy(), x * np.tanh(h), rtol=1e-5, atol=1e-6)
    expected = (x * np.tanh(h)).sum(0)
    np.testing.assert_allclose(tensors[3].numpy(), expected, rtol=1e-2, atol=2e-2)
    assert "threadIdx.y" in text


def _serial(func: Any) -> Any:
    """Write loops over threads as plain loops, and memory of threads as memory of all."""
    import tvm_ffi
    from tvm import tirx

    def loop(node: Any) -> Any:
        kind = tirx.ForKind.SERIAL
        return tirx.For(node.loop_var, node.min, node.extent, kind, node.body)

    body = tvm_ffi.structural_map(func.body, (tirx.For, loop))
    text = func.with_body(body).with_attr("global_symbol", "main").script()
    text = text.replace('scope="shared"', 'scope="global"').replace(
        'scope="local"', 'scope="global"'
    )
    return tvm.script.from_source(text)


@pytest.mark.parametrize(
    "func",
    [
        sum_of(width=40),
        sum_of(axis=1, work=False),
        sum_of(rank=3, work=False),
    ],
    ids=["a width that blocks do not divide", "rows of their own", "three axes"],
)
def test_others_are_left_alone(func: Any) -> None:
    assert not column_sums.suits(func, CUDA)
    assert column_sums.schedule(func, CUDA) is None


def test_a_cpu_has_its_own_rules() -> None:
    llvm = codegen.make_target("llvm")
    assert not column_sums.suits(sum_of(), llvm)
    assert fallback.schedule(sum_of(), llvm)[1] != "column-sums"

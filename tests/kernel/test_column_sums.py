"""Sums over rows with the elementwise work around them: what is taken, and what it becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import tvmcap
from tests.schedules.hopper import resources
from tests.schedules.products import source_of
from tvmcap.base import codegen
from tvmcap.graph import fuse
from tvmcap.graph.group import Graph, fused
from tvmcap.kernel import column_sums, fallback
from tvmcap.kernel.sums import layout

CUDA = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})
SHARED = codegen.SHARED_MEMORY["sm_90a"]


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
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_75"])
def test_it_is_one_kernel_that_copies_ahead_in_whole_vectors(work: bool, arch: str) -> None:
    target = codegen.make_target({"kind": "cuda", "arch": arch})
    func, rule = fallback.schedule(sum_of(4096, work=work), target)
    assert rule == "column-sums"
    source = source_of(func, target)
    source = source[source.rindex("__global__") :]
    copies, stores = source.count("cp_async"), source.count("tvmcap_store16")
    assert (copies > 0) == (arch != "sm_75") and stores == (work and arch != "sm_75")
    assert source.count("*(uint4*)") >= (2 if work else 1)  # of shared memory, or of global
    assert ("tvmcap_cluster_meet" in source) == (arch == "sm_90a")
    assert source.count("tvmcap_logistic2") >= work


@pytest.mark.parametrize(
    ("width", "blocks"), [(32, 8), (64, 8), (96, 8), (2048, 4), (4096, 2), (8192, 1), (65536, 1)]
)
def test_blocks_part_the_rows_until_they_fill_the_card(width: int, blocks: int) -> None:
    sums = column_sums.read(sum_of(width))
    assert sums is not None
    assert layout(sums, 90, SHARED).cluster == blocks
    assert layout(sums, 80, SHARED).cluster == 1


@pytest.mark.parametrize(
    ("dtype", "shared", "found"),
    [
        ("bfloat16", SHARED, (1024, 3)),  # 32 bytes a row: of x and of h
        ("float32", SHARED, (1024, 2)),
        ("bfloat16", 101376, (512, 3)),
        ("float32", 101376, (256, 3)),
        ("float32", 49152, (256, 1)),
        ("float32", 16384, (256, 0)),
    ],
)
def test_shared_memory_bounds_what_is_under_way(
    dtype: str, shared: int, found: tuple[int, int]
) -> None:
    sums = column_sums.read(sum_of(4096, dtype))
    assert sums is not None
    chosen = layout(sums, 90, shared)
    assert (chosen.threads, chosen.ahead) == found
    assert layout(sums, 75, shared).ahead == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_has_room_for_what_the_kernel_takes(dtype: str, tmp_path: Any) -> None:
    """Shared memory and registers suffice; nothing spills."""
    func, _ = fallback.schedule(sum_of(4096, dtype), CUDA)
    found, _ = resources(source_of(func, CUDA), tmp_path)
    [used] = found.values()
    assert used.spilled == 0
    assert used.registers * 1024 <= 65536


def test_it_is_read_as_what_it_computes() -> None:
    sums = column_sums.read(sum_of(dtype="float32"))
    assert sums is not None and sums.columns == 64 and len(sums.read()) == 2
    rng = np.random.default_rng()
    rows = int(rng.integers(1, 600))
    x, h = (rng.standard_normal((rows, 64)).astype("float32") for _ in range(2))
    values = dict(zip(sums.params, (h, x), strict=False))  # in order of use
    [(d, value)] = sums.matrices
    values[d] = evaluate(value, values)
    total, value = sums.total
    values[total] = evaluate(value, values).sum(0)
    np.testing.assert_allclose(values[d], x * np.tanh(h), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        evaluate(sums.end[1], values), (x * np.tanh(h)).sum(0), rtol=1e-2, atol=2e-2
    )


def evaluate(value: Any, arrays: dict[Any, Any]) -> Any:
    """Compute an expression for all rows and columns at once."""
    kind = type(value).__name__
    if kind == "Mul":
        return evaluate(value.a, arrays) * evaluate(value.b, arrays)
    if kind == "Cast":
        return evaluate(value.value, arrays).astype(str(value.ty))
    if kind == "Call" and value.op.name == "tirx.tanh":
        return np.tanh(evaluate(value.args[0], arrays))
    return arrays[value.source]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 96, 320, 4096, 16384])
def test_sums_of_any_number_of_rows(dtype: torch.dtype, width: int) -> None:
    def fn(x: torch.Tensor, h: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        d = x * torch.tanh(h + b)
        return d, d.float().sum(0).to(dtype)

    def inputs(rows: int) -> list[torch.Tensor]:
        shapes = ((rows, width), (rows, width), (width,))
        return [torch.randn(s, device="cuda").to(dtype) for s in shapes]

    dynamic = {"x": {0: "B"}, "h": {0: "B"}}
    lib = tvmcap.build(fn, tuple(inputs(40)), target="cuda", dynamic=dynamic, tune="none")
    assert "rule:column-sums" in [row["served_by"] for row in lib.manifest.coverage]
    for rows in (0, 1, 31, 257, 2048, 5000):
        x, h, b = inputs(rows)
        d, total = lib(x, h, b)
        want = x.double() * torch.tanh(h.double() + b.double())
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(d.double(), want, rtol=2 * step, atol=step)
        added = d.double().sum(0)
        torch.testing.assert_close(total.double(), added, rtol=step, atol=1e-4)


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
    assert column_sums.scheduled(func, CUDA) is None


def test_a_cpu_has_its_own_rules() -> None:
    llvm = codegen.make_target("llvm")
    assert not column_sums.suits(sum_of(), llvm)
    assert fallback.schedule(sum_of(), llvm)[1] != "column-sums"

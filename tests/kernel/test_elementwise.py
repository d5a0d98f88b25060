"""Elementwise work on a GPU in whole vectors: what is taken, and what it becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from torch.nn import functional as F

import tvmcap
from tests.schedules.hopper import resources
from tests.schedules.products import source_of
from tvmcap import pipeline
from tvmcap.base import codegen
from tvmcap.base.config import Config
from tvmcap.capture.export import capture
from tvmcap.kernel import elementwise, fallback

CUDA = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fused(fn: Any, *args: torch.Tensor, dynamic: bool = True) -> Any:
    """The one kernel that a function becomes, with a dynamic first dimension of the first."""
    target = {"kind": "cuda", "arch": "sm_90a"}
    config = Config(target=target, dynamic={0: {0: "B"}} if dynamic else None)
    captured = capture(fn, args, None, config)
    mod = pipeline.run(captured.mod, pipeline.front(CUDA), CUDA, config, pipeline.Trace())
    [func] = [f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    return func


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


TAKEN: dict[str, Any] = {
    "a function": (lambda x: F.gelu(x, approximate="tanh"), half(64, 512)),
    "of two": (lambda x, y: torch.sigmoid(x) * y, half(64, 512), half(512)),
    "a row": (lambda x, y: torch.relu(x + y), half(64, 512), half(512)),
    "a number a row": (lambda x, y: x * y, half(4, 64, 512), half(64, 1)),
    "a number": (lambda x, y: x * y + 1, half(64, 512), torch.tensor(2.0).bfloat16()),
    "a choice": (lambda x, y: torch.where(x > 0, x, y), half(64, 512), half(512)),
    "float32": (lambda x: x**3 + x, torch.randn(64, 8)),
}
LEFT: dict[str, Any] = {
    "a width of no whole vectors": (lambda x: x + 1, half(64, 513)),
    "another order": (lambda x, y: x + y.T, half(64, 64), half(64, 64)),
    "truth values": (lambda x: x > 0, half(64, 512)),
    "a sum": (lambda x: x.float().sum(-1), half(64, 512)),
    "places read from memory": (F.embedding, torch.arange(4), half(64, 512)),
    "a power of any kind": (lambda x, y: x**y, half(64, 512), half(512)),
}


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_75"])
def test_whole_vectors_are_read_and_written(case: str, arch: str, tmp_path: Any) -> None:
    fn, *args = TAKEN[case]
    target = codegen.make_target({"kind": "cuda", "arch": arch})
    func, rule = fallback.schedule(fused(fn, *args), target)
    assert rule == "elementwise"
    source = source_of(func, target)
    body = source[source.rindex("__global__") :]
    wide = args[0].dtype == torch.float32
    assert body.count("*(uint4*)" if not wide else "*(float4*)") >= elementwise.DEPTH
    if arch == "sm_90a":
        assert body.count("tvmcap_store16(") == elementwise.DEPTH * (1 + wide)
    if arch == "sm_90a" and case in ("a function", "float32"):
        [used] = resources(source, tmp_path)[0].values()
        assert used.spilled == 0 and used.registers <= 128


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left_alone(case: str) -> None:
    fn, *args = LEFT[case]
    assert elementwise.read(fused(fn, *args, dynamic=False)) is None


def test_a_cpu_has_its_own_rules() -> None:
    fn, *args = TAKEN["a function"]
    assert elementwise.scheduled(fused(fn, *args), codegen.make_target("llvm")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 24, 1000, 4096])
def test_any_number_of_rows(dtype: torch.dtype, width: int) -> None:
    def fn(
        x: torch.Tensor, y: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return torch.where(x > 0, F.gelu(x, approximate="tanh") + row, column) * y

    def inputs(rows: int) -> tuple[torch.Tensor, ...]:
        shapes = ((rows, 3, width), (rows, 3, width), (width,), (3, 1))
        return tuple(torch.randn(s, device="cuda").to(dtype) for s in shapes)

    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    lib = tvmcap.build(fn, inputs(40), target="cuda", dynamic=dynamic, tune="none")
    assert [row["served_by"] for row in lib.manifest.coverage] == ["rule:elementwise"]
    for rows in (0, 1, 5, 171, 1000):
        args = inputs(rows)
        want = fn(*(a.double() for a in args))
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(lib(*args).double(), want, rtol=2 * step, atol=4 * step)

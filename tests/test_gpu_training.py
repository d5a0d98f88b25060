"""Training steps on a GPU: gradients, random numbers and kernels as eager's, at odd sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmcap
from tests.training_cases import CASES, mlp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import training_memory

pytestmark = pytest.mark.gpu


def on_gpu(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, nn.Module):
        return value.cuda().to(dtype)
    if not isinstance(value, torch.Tensor):
        return value
    moved = value.detach().cuda()
    moved = moved.to(dtype) if moved.is_floating_point() else moved
    return moved.requires_grad_(value.requires_grad)


def build(fn: Any, args: Any, dynamic: Any, **options: Any) -> Any:
    given = {"target": "cuda", "tune": "none", "verify": False, **options}
    return tvmcap.build(fn, args, backward=True, dynamic=dynamic, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_within_twice_eagers_error(case: str, dtype: torch.dtype) -> None:
    fn, args, dynamic = CASES[case]()
    fn, args = on_gpu(fn, dtype), tuple(on_gpu(a, dtype) for a in args)
    lib = build(fn, args, dynamic)
    sizes = [{"B": n} for n in (1, 13, 257)] if dynamic else None
    tvmcap.verify(lib, sizes=sizes, seed=torch.seed() % 1000).require()


@pytest.mark.parametrize("rows", [1, 100, 2048, 3001])
def test_a_blocks_gradients_at_the_size_of_a_model(rows: int) -> None:
    shapes = ((rows, 1024), (4096, 1024), (4096,))
    make = torch.Generator("cuda").manual_seed(rows)
    drawn = [torch.randn(s, generator=make, device="cuda") for s in shapes]
    x, w, b = (t.bfloat16().requires_grad_() for t in (drawn[0], drawn[1] / 32, drawn[2]))
    fn, _, _ = CASES["block"]()
    lib = build(fn, (x, w, b), {0: {0: "B"}})
    tvmcap.verify(lib, sizes=[{"B": rows}]).require()
    names = lib.executor.kernel_launches(x, w, b)
    assert len(names) == lib.manifest.kernels_per_call == 4


class Looked(nn.Module):
    """Rows of a table, running sums of them, and their maxima in windows that overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        rows = self.table(i)
        sums = (rows.cumsum(1), rows.cumsum(2))
        return F.max_pool2d(torch.stack(sums, 1), 3, 2, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_that_are_added_where_indices_say(dtype: torch.dtype) -> None:
    index = torch.randint(0, 11, (6, 9), device="cuda")
    lib = build(Looked().cuda().to(dtype), (index,), None)
    tvmcap.verify(lib, seed=torch.seed() % 1000).require()


@pytest.mark.parametrize(
    ("cell", "backward"), [(nn.LSTMCell, False), (nn.GRUCell, False), (nn.GRUCell, True)]
)
def test_recurrent_cells(cell: Any, backward: bool) -> None:
    module, x = cell(6, 8).cuda(), torch.randn(5, 6, device="cuda").requires_grad_(backward)
    module.requires_grad_(backward)
    options = {"target": "cuda", "tune": "none", "verify": False, "backward": backward}
    lib = tvmcap.build(module, (x,), **options)
    tvmcap.verify(lib, seed=torch.seed() % 1000).require()


def test_dropout_is_what_eager_draws_under_the_same_seed() -> None:
    module, (x,), dynamic = mlp()
    module, x = module.cuda().bfloat16(), x.detach().cuda().bfloat16().requires_grad_()
    lib = build(module, (x,), dynamic)
    for rows in (6, 333):
        x = torch.randn(rows, 16, device="cuda").bfloat16().requires_grad_()
        wanted, found = [x, *module.parameters()], []
        for call in (lib, module):
            torch.manual_seed(rows)
            found.append(torch.autograd.grad(call(x).float().pow(2).sum(), wanted))
        for ours, eager in zip(*found, strict=True):
            scale = float(eager.float().abs().max())
            torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.02 * scale)


def test_a_step_can_be_captured_in_a_cuda_graph() -> None:
    fn, args, dynamic = CASES["block"]()
    x, w, b = (on_gpu(a, torch.bfloat16) for a in args)
    lib = build(fn, (x, w, b), dynamic)
    dy = torch.randn(7, 32, device="cuda").bfloat16()

    def step() -> Any:
        _, saved = lib.executor.split(lib.executor.forward(x, w, b))
        return lib.executor.backward(*saved, dy)

    expected = [t.clone() for t in step()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for result in results:
        result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for ours, again in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, again)


def test_memory_over_budgets_is_what_was_planned(tmp_path: Path) -> None:
    shape = (3, 512, 1024)
    options: dict[str, Any] = {"target": "cuda", "tune": "none", "verify": False}
    training_memory.build(tmp_path, shape, **options)
    rows = training_memory.measured(tmp_path, 0.2, False, shape)
    assert all(row["right"] for row in rows)
    activation = 2 * 512 * 1024
    for row in rows:
        # torch's allocator rounds each tensor up
        assert abs(row["peak_bytes"] - row["peak_bytes_planned"]) < activation
        assert row["arena_bytes"] == row["arena_bytes_planned"]
    for name in ("peak_bytes", "saved_bytes"):
        found = [row[name] for row in rows]
        assert found == sorted(found, reverse=True)
    assert rows[0]["eager_saved_bytes"] == rows[0]["saved_bytes"] == 5 * activation

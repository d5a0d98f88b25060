"""What only a GPU can show: cross-compiled or built here, libraries run right on the card."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tvmcap
from examples import models

pytestmark = pytest.mark.gpu


def build(
    case: str, dtype: torch.dtype, **options: Any
) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    fn, args, dynamic = models.CASES[case]()
    fn = fn.to(dtype) if isinstance(fn, torch.nn.Module) else fn
    args = tuple(a.to(dtype) for a in args)
    lib = tvmcap.build(fn, args, target="cuda", dynamic=dynamic, **options)
    return lib, fn.cuda() if isinstance(fn, torch.nn.Module) else fn, tuple(a.cuda() for a in args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", list(models.CASES))
def test_built_here_it_verifies(case: str, dtype: torch.dtype) -> None:
    lib, _, _ = build(case, dtype, tune="none", verify=True)
    assert lib.manifest.verified
    assert lib.executor.manifest.target["arch"].startswith("sm_")


def test_a_block_is_one_kernel_and_launches_one() -> None:
    fn, args, dynamic = models.CASES["block"]()
    args = tuple(a.bfloat16().cuda() for a in args)
    lib = tvmcap.build(fn, args, target="cuda", dynamic=dynamic, tune="none", verify=False)
    score = lib.scoreboard(baselines=True)
    assert score.kernels == score.kernels_traced == 1
    assert score.eager_kernels == 3
    assert score.latency_us is not None and score.eager_us is not None


def test_it_runs_on_the_current_stream_and_under_graph_capture() -> None:
    lib, fn, (x, w, b) = build("block", torch.bfloat16, tune="none", verify=False)
    want = fn(x, w, b)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = lib(x, w, b)
    side.synchronize()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(want)
    lib(x, w, b, out=out)
    with torch.cuda.graph(graph):
        lib(x, w, b, out=out)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, fn(x, w, b), rtol=2e-2, atol=2e-2)


def test_empty_batch_and_misaligned_slices() -> None:
    lib, fn, (x, w, b) = build("block", torch.bfloat16, tune="none", verify=False)
    assert lib(x[:0], w, b).shape == (0, w.shape[1])
    flat = torch.randn(x.numel() + 1, device="cuda", dtype=x.dtype)
    crooked = flat[1:].view(x.shape)
    torch.testing.assert_close(lib(crooked, w, b), fn(crooked, w, b), rtol=2e-2, atol=2e-2)
    assert lib.executor.copies == 1
    with pytest.raises(tvmcap.errors.InputError, match="cuda"):
        lib(x.cpu(), w, b)


def test_several_outputs_and_a_float32_result() -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return y, F.silu(y)

    x, w = torch.randn(70, 96).bfloat16(), (torch.randn(96, 136) / 10).bfloat16()
    lib = tvmcap.build(both, (x, w), target="cuda", dynamic={"x": {0: "B"}}, tune="none")
    assert lib.manifest.verified


def close(got: torch.Tensor, wanted: torch.Tensor, eager: torch.Tensor) -> None:
    """Demand an error of at most twice eager's and one unit in the largest value's last place."""
    slack = torch.finfo(got.dtype).eps * wanted.abs().max()
    error = (got.double() - wanted).abs().max()
    assert error <= 2 * (eager.double() - wanted).abs().max() + slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_range_of_rows_is_right(dtype: torch.dtype) -> None:
    """Each kernel that serves a range of rows, at both ends of it."""
    make = torch.Generator().manual_seed(1)
    shapes = ((3, 1032), (1032, 2056), (2056,))
    x, w, b = (torch.randn(s, generator=make).to(dtype).cuda() for s in shapes)
    w = w / 32

    def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ w + b)

    lib = tvmcap.build(
        block, (x, w, b), dynamic={"x": {0: "B"}}, target="cuda", tune="none", verify=False
    )
    bounds = [int(r[2:]) for r in lib.manifest.coverage[0]["ranges"] if r != "any"]
    for rows in sorted({1, 4097, *bounds, *(bound + 1 for bound in bounds)}):
        x = torch.randn((rows, 1032), generator=make).to(dtype).cuda()
        close(lib(x, w, b), block(x.double(), w.double(), b.double()), block(x, w, b))


@pytest.mark.parametrize("rows", [5, 64, 700])
def test_layers_in_a_row_under_graph_replay(rows: int) -> None:
    """A kernel may start before the one before it has ended; results share storage."""
    torch.manual_seed(rows)
    layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)]
    net = torch.nn.Sequential(*layers, *(m for _ in range(5) for m in layers)).eval()
    wide = copy.deepcopy(net.bfloat16()).double().cuda()
    x = torch.randn(rows, 512).bfloat16()
    lib = tvmcap.build(net, (x,), target="cuda", tune="none", verify=False)
    net, x = net.cuda(), x.cuda()
    out = torch.empty_like(x)
    lib(x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lib(x, out=out)
    with torch.no_grad():
        for _ in range(5):
            x.copy_(torch.randn_like(x))
            out.fill_(float("nan"))
            graph.replay()
            close(out, wide(x.double()), net(x))
            assert torch.equal(lib(x), out)


def test_batched_products_of_symbolic_sizes() -> None:
    """Queries and keys of symbolic length: the columns of the product are symbolic too."""

    def scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT / 8, dim=-1) @ v

    make = torch.Generator().manual_seed(3)
    dynamic = {name: {0: "H", 1: "T"} for name in "qkv"}
    q, k, v = (torch.randn((3, 24, 64), generator=make).bfloat16() for _ in range(3))
    lib = tvmcap.build(scores, (q, k, v), dynamic=dynamic, target="cuda", tune="none")
    assert lib.manifest.verified
    for heads, length in ((1, 1), (2, 65), (5, 300)):
        shape = (heads, length, 64)
        q, k, v = (torch.randn(shape, generator=make).bfloat16().cuda() for _ in range(3))
        close(lib(q, k, v), scores(q.double(), k.double(), v.double()), scores(q, k, v))


def test_tf32_only_where_it_is_allowed() -> None:

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.mT

    make = torch.Generator().manual_seed(4)
    x, w = (torch.randn(s, generator=make).cuda() for s in ((130, 512), (264, 512)))
    wanted, errors = x.double() @ w.double().T, []
    for allowed in (False, True):
        lib = tvmcap.build(
            linear, (x, w), target="cuda", allow_tf32=allowed, tune="none", verify=False
        )
        errors.append(float((lib(x, w).double() - wanted).abs().max()))
    assert errors[0] < 1e-3 and errors[1] < 0.2  # 23 and 10 bits of mantissa over 512 terms
    if torch.cuda.get_device_capability() == (9, 0):
        assert lib.manifest.coverage[0]["served_by"] == "template:hopper_gemm"
        assert errors[1] > 4 * errors[0]


def test_tuning_on_the_card_never_loses(tmp_path: Any) -> None:
    fn, args, dynamic = models.CASES["block"]()
    args = tuple(a.to(torch.bfloat16) for a in args)
    options: dict[str, Any] = {
        "target": "cuda",
        "dynamic": dynamic,
        "constants": ("w", "b"),
        "log_dir": str(tmp_path),
    }
    run = tvmcap.tune(fn, args, trials=8, **options)
    assert (tmp_path / "records.jsonl").exists(), run
    lib = tvmcap.build(fn, args, **options)
    assert lib.manifest.verified
    assert all(task["tuned"] for task in lib.manifest.coverage)


def test_loop_nests_tune_on_the_card(tmp_path: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 16, 3, padding=1), torch.nn.ReLU()).eval()
    x = torch.randn(2, 4, 16, 16)
    tvmcap.tune(net, (x,), target="cuda", trials=8, log_dir=str(tmp_path))
    assert tvmcap.build(net, (x,), target="cuda", log_dir=str(tmp_path)).manifest.verified


def test_libraries_of_one_file_outlive_each_other() -> None:
    lib, fn, (x, w, b) = build("block", torch.bfloat16, tune="none", verify=False)
    want = fn(x, w, b)
    for _ in range(4):
        other = tvmcap.load(lib.path)
        lib(x, w, b)
        lib = other
        gc.collect()
        torch.testing.assert_close(lib(x, w, b), want, rtol=2e-2, atol=2e-2)

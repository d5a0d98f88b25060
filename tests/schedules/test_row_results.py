"""The row template on a GPU: settings against float64, with PyTorch's own error as the measure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi

from tests.libs import quick, values
from tests.schedules.row_programs import (
    COLUMNS,
    DTYPES,
    PROGRAMS,
    Call,
    add_rms,
    arguments,
    call,
    extremes,
    layer_norm,
    log_softmax,
    softmax,
)
from tvmcap.base import codegen
from tvmcap.kernel.worker import compile_to
from tvmcap.schedules import row_norm as row


def run(found: Call, knobs: Any, args: Any, outs: Any, target: Any, folder: Any) -> None:
    """Compile a setting where it is not yet, run it, wait for it."""
    path = folder / f"{abs(hash(knobs))}.so"
    if not path.exists():
        problem = row.match(found.func, target)
        compile_to(row.lower(found.func, problem, knobs, target), target, str(path))
    entry = tvm.runtime.load_module(str(path))["main"]
    given = [args[i] if isinstance(i, int) else torch.from_dlpack(i) for i in found.inputs]
    torch.cuda.synchronize()
    entry(*(a.cuda() for a in given), *(outs[i] for i in found.outputs))
    torch.cuda.synchronize()


def check(fn: Any, found: Call, knobs: Any, args: Any, target: Any, folder: Any) -> None:
    """Compare a setting's results with float64; twice PyTorch's own error is allowed."""
    args = [a.cuda() for a in args]
    wanted, eager = (
        y if isinstance(y, tuple) else (y,) for y in (fn(*(a.double() for a in args)), fn(*args))
    )
    outs = [torch.full_like(y, 7.0) for y in eager]
    run(found, knobs, args, outs, target, folder)
    for got, theirs, exact in zip(outs, eager, wanted, strict=True):
        assert torch.equal(got.isnan(), exact.isnan()), knobs
        finite = exact.isfinite()
        assert torch.equal(got.isinf(), exact.isinf()), knobs
        if not finite.any():
            continue
        exact = exact[finite]
        error, eager_error = ((y[finite].double() - exact).abs().max() for y in (got, theirs))
        rounding = 8 * torch.finfo(got.dtype).eps * exact.abs().max()
        assert error <= 2 * eager_error + rounding, knobs


@pytest.mark.gpu
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_the_defaults(dtype, columns, tmp_path) -> None:
    """Each dtype and number of columns with one of the functions in turn."""
    target = codegen.make_target("cuda")
    turn = COLUMNS.index(columns) + 2 * DTYPES.index(dtype)
    fn = list(PROGRAMS)[turn % len(PROGRAMS)]
    found = call(fn, arguments(fn, 4, columns, dtype), target)
    ranged = row.ranges(row.match(found.func, target), target)
    for rows in (1, 7, 2049):
        knobs = next(k for bound, k in ranged if bound is None or rows <= bound)
        args = arguments(fn, rows, columns, dtype, seed=rows)
        check(fn, found, knobs, args, target, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("fn", [layer_norm, softmax], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "knobs",
    [
        row.Knobs(32, 2, 8),
        row.Knobs(64, 4, 4, "registers", True),
        row.Knobs(256, 1, 8, "shared", False),
        row.Knobs(128, 2, 8, "shared", True),
        row.Knobs(512, 1, 4, "reload", True),
        row.Knobs(1024, 1, 8),
        row.Knobs(256, 1, 8, dependent=True),
        row.Knobs(128, 2, 8, "shared", True, 1, True),
        row.Knobs(64, 2, 8, "registers", True, 8, True),
    ],
    ids=str,
)
def test_results_of_settings(fn, knobs, tmp_path) -> None:
    target = codegen.make_target("cuda")
    found = call(fn, arguments(fn, 4, 2056, torch.bfloat16), target)
    check(fn, found, knobs, arguments(fn, 13, 2056, torch.bfloat16), target, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_and_nans_come_out_as_in_torch(dtype, tmp_path) -> None:
    target = codegen.make_target("cuda")
    columns = 100 if dtype is torch.float16 else 4096
    for fn in (softmax, log_softmax, extremes):
        args = arguments(fn, 9, columns, dtype)
        args[-1][::2, ::3] = -torch.inf
        args[-1][3] = -torch.inf
        args[-1][4, columns // 2] = torch.nan
        found = call(fn, args, target)
        knobs = row.default(row.match(found.func, target), target)
        folder = tmp_path / fn.__name__
        folder.mkdir()
        check(fn, found, knobs, args, target, folder)


def centred(x):
    return x * 0.9 - x.mean(-1, keepdim=True)


@pytest.mark.gpu
def test_dependent_kernels_see_what_the_one_before_wrote(tmp_path) -> None:
    """A chain of kernels, each on the result of the last, in a graph that is replayed."""
    target = codegen.make_target("cuda")
    start = values(512, 4096, seed=1)
    found = call(centred, (start,), target)
    problem, graphs, steps = row.match(found.func, target), [], {}
    for dependent in (False, True):
        knobs = row.Knobs(256, 1, 4, dependent=dependent)
        path = tmp_path / f"{dependent}.so"
        compile_to(row.lower(found.func, problem, knobs, target), target, str(path))
        entry = tvm.runtime.load_module(str(path))["main"]
        steps[dependent] = [torch.zeros_like(start, device="cuda") for _ in range(9)]
        entry(*steps[dependent][:2])  # loads the kernel, which a capture cannot
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            raw = torch.cuda.current_stream().cuda_stream
            with tvm_ffi.use_raw_stream(tvm.cuda(0), raw):
                for before, after in itertools.pairwise(steps[dependent]):
                    entry(before, after)
    for seed in range(20):
        for dependent in steps:
            steps[dependent][0].copy_(values(512, 4096, seed=seed))
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        for plain, early in zip(steps[False], steps[True], strict=True):
            assert torch.equal(plain, early)


@pytest.mark.gpu
def test_a_library_serves_few_and_many_rows() -> None:
    args = [a.cuda() for a in arguments(add_rms, 64, 1024, torch.bfloat16)]
    lib = quick(add_rms, *args, dynamic={0: {0: "B"}, 1: {0: "B"}}, target="cuda")
    for rows in (1, row.SM_COUNT, 3000):
        args = [a.cuda() for a in arguments(add_rms, rows, 1024, torch.bfloat16, seed=rows)]
        for got, wanted in zip(lib(*args), add_rms(*args), strict=True):
            assert torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=2**-7)

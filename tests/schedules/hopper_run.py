"""Run a group of Hopper kernels on the GPU, in a process that may be killed where one hangs.

``python -m tests.schedules.hopper_run GROUP`` writes a line of JSON for each case: its name, and
what was wrong or null.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import tvm_ffi

from tests.schedules import hopper_cases
from tests.schedules.hopper import Case, compiled
from tests.schedules.products import TARGET
from tvmcap.base import codegen
from tvmcap.runtime.loader import ffi, load_cuda_runtime
from tvmcap.schedules import gemm_match
from tvmcap.schedules import hopper_gemm as hopper

GUARD = 1024
"""Elements of NaN before and after every tensor."""
REPEATS = 3


def load(cases: list[Case]) -> Any:
    """Compile all cases at once and return the module of their functions."""
    codegen.use_nvcc()
    load_cuda_runtime()
    with tempfile.TemporaryDirectory() as folder:
        compiled(cases).export_library(f"{folder}/kernels.so")
        return ffi().load_module(f"{folder}/kernels.so")


def inside(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a contiguous tensor of NaN on the GPU, and the larger one that it lies in."""
    size = torch.Size(shape).numel()
    room = torch.full((size + 2 * GUARD,), float("nan"), dtype=dtype, device="cuda")
    return room[GUARD : GUARD + size].view(shape), room


def operands(case: Case, shapes: list[tuple[int, ...]], make: torch.Generator) -> list[Any]:
    """Return random operands x, w, b (and r); those of tf32 have its 10 bits of mantissa."""
    dtype = getattr(torch, case.shape.get("dtype", "bfloat16"))
    given = []
    for i, shape in enumerate(shapes):
        values = torch.randn(shape, generator=make, device="cuda")
        if i == 1:
            k = -1 if case.shape.get("layout", "kn") == "nk" else -2
            values /= values.shape[k] ** 0.5
        if dtype == torch.float32:
            values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
        given.append(inside(shape, dtype)[0].copy_(values))
    return given


def split_params(func: Any, sizes: dict[str, int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shapes of the tensors and the sizes that are passed before the outputs."""
    shapes, scalars = [], []
    for param in func.params:
        shape = getattr(param, "shape", None)
        if shape is None:
            scalars.append(sizes[param.name])
        else:
            shapes.append(tuple(gemm_match.evaluate(extent, sizes) for extent in shape))
    return shapes, scalars


def reference(case: Case, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs in float64."""
    x, w, b, *r = (t.double() for t in given)
    x = x.mT if case.shape.get("a_layout", "mk") == "km" else x
    w = w.mT if case.shape.get("layout", "kn") == "nk" else w
    plain = x @ w + b
    active = F.gelu(plain, approximate="tanh") + (r[0] if r else 0)
    return [plain, active] if case.outs else [active]


def check(case: Case, kernel: Any, sizes: dict[str, int]) -> str | None:
    """Compare with float64 and with itself; nothing but the outputs may be written."""
    func = case.func
    count = 2 if case.outs else 1
    shapes, scalars = split_params(func, sizes)
    buffers = hopper.match(func, TARGET).fused.epilogue.outputs
    dtypes = [getattr(torch, str(buffer.dtype)) for buffer in buffers]
    make = torch.Generator("cuda").manual_seed(sum(map(ord, case.name)) + sum(sizes.values()))
    given = operands(case, shapes[:-count], make)
    runs = []
    for _ in range(REPEATS):
        runs.append([inside(s, d) for s, d in zip(shapes[-count:], dtypes, strict=True)])
        kernel(*given, *scalars, *(view for view, _ in runs[-1]))
    torch.cuda.synchronize()
    for (got, room), want in zip(runs[0], reference(case, given), strict=True):
        allowed = 0.51 * torch.finfo(got.dtype).eps * want.abs() + 5e-5
        wrong = ~((got.double() - want).abs() <= allowed)
        if bool(wrong.any()):
            first = wrong.nonzero()[:3].tolist()
            return f"{sizes}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {first}"
        if not bool(room[:GUARD].isnan().all() and room[-GUARD:].isnan().all()):
            return f"{sizes}: wrote outside {got.dtype}"
    views = [[view for view, _ in run] for run in runs]
    if not all(torch.equal(a, b) for run in views for a, b in zip(views[0], run, strict=True)):
        return f"{sizes}: runs differ"
    return None


def chained(kernel: Any, x: torch.Tensor, w: torch.Tensor, graph: bool) -> list[torch.Tensor]:
    """Run 20 kernels in a row, each on what the one before wrote, some halved by torch between."""
    zeros = torch.zeros(w.shape[0], dtype=x.dtype, device="cuda")
    links = [x, *(inside(tuple(x.shape), x.dtype)[0] for _ in range(20))]
    two = [inside(tuple(x.shape), x.dtype)[0] for _ in range(2)]  # whose results are overwritten

    def run() -> None:
        for i, (source, target) in enumerate(itertools.pairwise(links)):
            kernel(source, w, zeros, target)
            if i % 4 == 3:
                target.mul_(0.5)
        two[0].copy_(x)
        for i in range(20):
            kernel(two[i % 2], w, zeros, two[1 - i % 2])

    if graph:
        captured = torch.cuda.CUDAGraph()
        with tvm_ffi.use_torch_stream(torch.cuda.graph(captured)):
            run()
        captured.replay()
    else:
        run()
    torch.cuda.synchronize()
    return [*links[1:], two[0].clone()]


def check_chain(case: Case, module: Any) -> str | None:
    """Compare kernels launched early with the same launched in turn, in a graph and without."""
    make = torch.Generator("cuda").manual_seed(sum(map(ord, case.name)))
    n = case.shape["n"]
    for rows in (48, 1000):
        x = torch.randn((rows, n), generator=make, device="cuda").bfloat16()
        w = (torch.randn((n, n), generator=make, device="cuda") / n**0.5).bfloat16()
        late = module[case.name.replace("early", "late")]
        wanted = chained(late, x, w, graph=False)
        product = (x.double() @ w.double().T - wanted[0].double()).abs().max()
        if not product < 0.1 or not all(bool(t.isfinite().all()) for t in wanted):
            return f"{rows} rows: wrong without an early launch"
        for graph in (False, True, True):
            got = chained(module[case.name], x, w, graph)
            differ = [
                i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if not torch.equal(a, b)
            ]
            if differ:
                return f"{rows} rows, graph={graph}: results {differ} differ"
    return None


def main(group: str) -> None:
    """Check every case of a group."""
    cases = hopper_cases.chain() if group == "chain" else hopper_cases.GROUPS_OF_CASES[group]()
    module = load(cases)
    for case in cases:
        if group == "chain" and case.name.startswith("late"):
            continue
        print(json.dumps({"start": case.name}), flush=True)
        if group == "chain":
            error = check_chain(case, module)
        else:
            errors = (check(case, module[case.name], sizes) for sizes in case.sizes)
            error = next(filter(None, errors), None)
        print(json.dumps({"name": case.name, "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

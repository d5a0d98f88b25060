"""The CUDA source of row kernels: how they load, wait, keep a row and combine its parts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.libs import quick
from tests.schedules.products import TARGET, source_of
from tests.schedules.row_programs import (
    add_rms,
    arguments,
    call,
    extremes,
    kernel,
    kernels,
    layer_norm,
    program,
    rms_norm,
    softmax,
)
from tvmcap.schedules import row_norm as row
from tvmcap.schedules import row_plan


@pytest.mark.parametrize(
    "knobs", [row.Knobs(256), row.Knobs(32, 4), row.Knobs(128, 2, recompute=True)], ids=str
)
def test_source_reads_each_row_once_in_wide_loads(knobs) -> None:
    func = kernel(layer_norm, 4096)
    lowered = row.lower(func, row.match(func, TARGET), knobs, TARGET)
    assert lowered.attrs["tirx.is_scheduled"] and list(lowered.params) == list(func.params)
    source = source_of(lowered)
    steps = 4096 // (8 * knobs.threads)
    for param in func.params[:-1]:
        assert len(re.findall(rf"= \*\(uint4\*\)\({param.name}_ptr", source)) == steps
        assert len(re.findall(rf"\b{param.name}_ptr \+", source)) == steps
    block = knobs.threads * knobs.rows
    assert source.count("__launch_bounds__") == 2 and f"__launch_bounds__({block})" in source
    assert "__shfl_xor_sync" in source
    assert ("tvm_builtin_cuda_cta_sync();" in source) == (knobs.threads > 32)


def body_of(fn: Any, columns: int, knobs: Any) -> str:
    func = kernel(fn, columns)
    source = source_of(row.lower(func, row.match(func, TARGET), knobs, TARGET))
    return source[source.rindex('extern "C" __global__') :]


def test_a_dependent_kernel_waits_before_it_reads() -> None:
    knobs = row.Knobs(128, dependent=True)
    body = body_of(rms_norm, 4096, knobs)
    launch, wait = (body.index(f"griddepcontrol_{name}") for name in ("launch_dependents", "wait"))
    assert launch < wait < body.index("_ptr + ")
    assert "griddepcontrol" not in body_of(rms_norm, 4096, row.Knobs(128))
    lowered = row.lower(kernel(rms_norm, 4096), program(rms_norm, 4096), knobs, TARGET)
    launch_params = lowered.attrs["tirx.kernel_launch_params"]
    assert "tirx.use_programtic_dependent_launch" in list(launch_params)


def test_rows_in_shared_memory_are_copied_past_the_registers() -> None:
    """All copies of a row start before the first wait; 16 bytes each."""
    body = body_of(layer_norm, 16384, row.Knobs(256, 1, 8, "shared", True))
    copies = [m.start() for m in re.finditer(r"cp_async_cg_async_cg_shared_global_16\(", body)]
    assert len(copies) == 2 * 16384 // (256 * 8)
    assert max(copies) < body.index("cp_async_wait_all") < body.index("__shfl_xor_sync")
    assert "*(uint4*)(x_ptr" not in body
    narrow = body_of(layer_norm, 16386, row.Knobs(256, 1, 1, "shared", True))
    assert "cp_async" not in narrow  # of 2 bytes there are no copies


def test_more_blocks_share_a_multiprocessor_with_fewer_registers() -> None:
    """The bound is the compiler's, and what is kept is widened anew in every pass."""
    body = body_of(softmax, 16384, row.Knobs(256, resident=4, recompute=True))
    words = 2 * 2 * 16384 // (2 * 256)  # of two inputs, before the second and the third pass
    assert "__launch_bounds__(256, 4)" in body and body.count("tvmcap_hide(") == words
    assert "tvmcap_hide(" not in body_of(softmax, 16384, row.Knobs(512, recompute=True))


def test_shuffles_stand_outside_conditions() -> None:
    """All threads of a warp take part in each, also where a NaN is looked for."""
    func = kernel(extremes, 4096)
    source = source_of(row.lower(func, row.match(func, TARGET), row.Knobs(128), TARGET))
    shuffles = re.findall(r"(.*)__shfl_xor_sync", source)
    assert len(shuffles) == 2 * 7 and not any("?" in line or "||" in line for line in shuffles)


def test_results_of_rows_masks_and_integers() -> None:
    """A number a row beside a result of 8 bits; flags as input; powers of negative numbers."""

    def quantize(x: Any, keep: Any) -> Any:
        x = torch.where(keep, x, 0.0)
        scale = x.abs().amax(-1, keepdim=True) / 127 + x.pow(2).mean(-1, keepdim=True)
        return torch.round(x / scale).to(torch.int8), scale

    found = call(quantize, (torch.zeros(4, 256), torch.zeros(4, 256, dtype=torch.bool)))
    problem = row.match(found.func, TARGET)
    assert sorted(o.by_column for o in problem.outputs) == [False, True]
    source = source_of(row.lower(found.func, problem, row.default(problem, TARGET), TARGET))
    assert "signed char*" in source and "pow(" not in source[source.rindex("__global__") :]


def test_a_single_row_is_kept_too() -> None:
    (func,) = kernels(lambda x: torch.softmax(x, -1), (torch.zeros(4096),))
    problem = row.match(func, TARGET)
    assert problem.rows == 1 and len(row_plan.kept(problem, recompute=True)) == 1


def test_nvcc_takes_it_for_older_cards(without_gpu: None) -> None:
    args = arguments(add_rms, 4, 1000, torch.float16)
    target = {"kind": "cuda", "arch": "sm_80"}
    lib = quick(add_rms, *args, dynamic={0: {0: "B"}, 1: {0: "B"}}, target=target)
    assert [task["served_by"] for task in lib.manifest.coverage] == ["template:row_norm"]
    assert lib.executor is None and b"sm_80" in lib.path.read_bytes()

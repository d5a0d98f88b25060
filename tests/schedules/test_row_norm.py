"""The row template: what it takes, what it keeps between passes, settings that fit, its source."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import te, tirx, topi

from tests.libs import quick
from tests.schedules.products import TARGET, source_of
from tests.schedules.row_programs import (
    COLUMNS,
    PROGRAMS,
    add_rms,
    arguments,
    call,
    extremes,
    kernels,
    layer_norm,
    rms_norm,
    softmax,
)
from tvmcap.base import codegen
from tvmcap.kernel import spaces
from tvmcap.schedules import row_norm as row
from tvmcap.schedules import row_plan
from tvmcap.schedules.row_plan import shared_bytes


@functools.cache
def kernel(fn: Any, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return call(fn, arguments(fn, 4, columns, dtype)).func


@functools.cache
def program(fn: Any, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return row.match(kernel(fn, columns, dtype), TARGET)


# --- matching


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_takes_row_wise_functions_whole(fn, dtype) -> None:
    """Norms, softmax and what stands around them are one kernel, and this template serves it."""
    template, found = spaces.find(kernel(fn, 96, dtype), TARGET)
    assert template is row.TEMPLATE
    assert found.columns == 96 and isinstance(found.rows, tirx.Var)
    assert len(found.outputs) == (2 if fn is add_rms else 1)
    sizes = {found.rows.name: 10}
    half = 2 if dtype is torch.bfloat16 else 4
    kinds = PROGRAMS[fn]
    outputs = {add_rms: 2 * 960, extremes: 10}.get(fn, 960)
    wanted = kinds.count("r") * 960 + kinds.count("c") * 96 + outputs
    scalars = sum(4 for p in found.params if not p.shape)  # constants of the function
    assert found.bytes(sizes) == half * wanted + scalars and found.flops(sizes) >= 960


def test_rows_and_columns_may_be_several_dimensions() -> None:
    x, mask = torch.zeros(4, 3, 5, 64), torch.zeros(4, 1, 5, 64)
    (func,) = kernels(lambda x, m: torch.softmax(x + m, -1), (x, mask))
    found = row.match(func, TARGET)
    assert found.columns == 64 and found.trailing == 1 and found.bytes({"B": 2}) == 4 * 64 * 70
    (func,) = kernels(lambda x: F.layer_norm(x, (5, 64)), (x,))
    found = row.match(func, TARGET)
    assert found.columns == 320 and found.trailing == 2 and row_plan.vector(found) == 4


def size(value: int) -> Any:
    return tirx.IntImm("int64", value)


def sum_over(extent: Any, shape: Any, value: Any) -> Any:
    """Return the tensor of sums of ``value(k, *index)``."""
    k = te.reduce_axis((size(0), extent), "k")
    return te.compute(shape, lambda *at: te.sum(value(k, *at), axis=k))


def matched(*tensors: Any) -> bool:
    return row.match(te.create_prim_func(tensors), TARGET) is not None


def test_leaves_other_reductions_alone() -> None:
    n, c = tirx.Var("n", "int64"), size(64)
    x = te.placeholder((n, c), "float32", "x")
    w = te.placeholder((size(32), c), "float32", "w")
    row_sums = sum_over(c, (n,), lambda k, i: x[i, k])
    assert matched(x, row_sums)
    llvm = codegen.make_target({"kind": "llvm"})
    assert row.match(te.create_prim_func([x, row_sums]), llvm) is None
    assert not matched(x, w, sum_over(c, (n, size(32)), lambda k, i, j: x[i, k] * w[j, k]))
    assert not matched(x, sum_over(n, (c,), lambda k, j: x[k, j]))  # of columns
    assert not matched(x, sum_over(size(4), (n, size(31)), lambda k, i, j: x[i, j * 2 + k]))
    wide = te.placeholder((c, n), "float32", "wide")
    assert not matched(wide, sum_over(n, (c,), lambda k, i: wide[i, k]))  # columns unknown
    assert not matched(x, te.compute((n, c), lambda i, j: x[i, j] * 2.0))


def test_leaves_other_rows_and_guarded_reads_alone() -> None:
    r, c = size(16), size(64)
    x = te.placeholder((r, c), "float32", "x")
    total = sum_over(c, (r,), lambda k, i: x[i, k])
    assert matched(x, te.compute((r, c), lambda i, j: x[i, j] + total[i]))
    assert not matched(x, te.compute((r, c), lambda i, j: x[i, j] + total[15 - i]))

    def before(i: Any, j: Any) -> Any:
        return tirx.if_then_else(j > 0, x[i, j - 1], tirx.const(0.0, "float32")) + total[i]

    assert not matched(x, te.compute((r, c), before))


def test_leaves_reductions_of_pairs_alone() -> None:
    x = te.placeholder((size(16), size(64)), "float32", "x")
    assert not matched(x, topi.argmax(x, axis=1))
    assert matched(x, topi.max(x, axis=1))


# --- what stays between the passes


def test_a_row_is_kept_in_16_bits_where_it_can_be() -> None:
    found = program(layer_norm, 4096)
    (summed,) = row_plan.kept(found, recompute=False)
    assert summed.dtype == "bfloat16" and summed.kind == "stage"
    inputs = row_plan.kept(found, recompute=True)
    assert [v.kind for v in inputs] == ["load"] * 2
    kept = row_plan.kept(program(softmax, 4096), recompute=False)
    assert [v.dtype for v in kept] == ["bfloat16", "float32"]  # the scores, their exponentials


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_every_row_of_a_parameter_is_loaded_once(fn, recompute) -> None:
    found = program(fn, 4096)
    passes = row_plan.plan(found, row_plan.kept(found, recompute))
    loads = [v for p in passes for v in p.values if v.kind == "load" and v.by_row]
    assert len(loads) == len(set(loads)) == PROGRAMS[fn].count("r")
    outputs = [o for p in passes for o in p.outputs]
    assert len(outputs) == len([o for o in found.outputs if o.by_column])


# --- knobs


@pytest.mark.parametrize("columns", COLUMNS)
def test_settings_fit_the_machine(columns) -> None:
    for fn, dtype in ((rms_norm, torch.float32), (softmax, torch.bfloat16)):
        found = program(fn, columns, dtype)
        points, ranged = row.space(found, TARGET), row.ranges(found, TARGET)
        assert len(set(points)) == len(points) >= 1
        assert {knobs for _, knobs in ranged} <= set(points)
        assert row.default(found, TARGET) == ranged[-1][1]
        assert [bound for bound, _ in ranged] in ([None], [row.SM_COUNT, None])
        for knobs in points:
            block = knobs.threads * knobs.rows
            assert block % 32 == 0 and block <= 1024 and columns % knobs.vector == 0
            assert knobs.vector * dtype.itemsize <= 16
            limit = 232448 if knobs.keep == "shared" else 48 * 1024
            assert shared_bytes(found, knobs) <= limit


def test_unaligned_rows_take_narrower_loads() -> None:
    for columns, lanes in ((4096, 8), (100, 4), (102, 2), (101, 1)):
        assert row_plan.vector(program(rms_norm, columns)) == lanes
    assert row_plan.vector(program(rms_norm, 4096, torch.float32)) == 4


def test_features_tell_settings_apart() -> None:
    found = program(softmax, 16384)
    points = row.space(found, TARGET)
    table = row.features(found, points, TARGET)
    assert table.shape == (len(points), len(row.FEATURES)) and table.dtype == np.float32
    assert np.isfinite(table).all() and len(np.unique(table, axis=0)) == len(points)
    assert row.features(found, [], TARGET).shape == (0, len(row.FEATURES))


def test_settings_round_trip() -> None:
    knobs = row.Knobs(256, 2, 4, "shared", True)
    assert row.TEMPLATE.knobs_from_json(row.TEMPLATE.knobs_to_json(knobs)) == knobs


# --- source


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

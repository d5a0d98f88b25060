"""The row template: what it takes, what it keeps between passes, settings that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import te, tirx, topi

from tests.schedules.products import TARGET
from tests.schedules.row_programs import (
    COLUMNS,
    PROGRAMS,
    add_rms,
    extremes,
    kernel,
    kernels,
    layer_norm,
    program,
    rms_norm,
    softmax,
)
from tvmcap.base import codegen
from tvmcap.kernel import spaces
from tvmcap.schedules import row_estimate, row_plan
from tvmcap.schedules import row_norm as row
from tvmcap.schedules.row_plan import shared_bytes

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
    assert found.bytes(sizes) == half * wanted and found.flops(sizes) >= 960


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
        *bounds, last = (bound for bound, _ in ranged)
        assert last is None and bounds == sorted(set(bounds)) and set(bounds) <= set(row.RANGES)
        for knobs in points:
            block = knobs.threads * knobs.rows
            assert block % 32 == 0 and block <= 1024 and columns % knobs.vector == 0
            assert knobs.vector * dtype.itemsize <= 16
            limit = 232448 if knobs.keep == "shared" else 48 * 1024
            assert shared_bytes(found, knobs) <= limit
            assert block * knobs.resident <= 2048
            if knobs.resident > 1:
                assert row_estimate.resident_blocks(found, knobs) >= knobs.resident


def fixed(fn: Any, rows: int, columns: int) -> Any:
    found = dataclasses.replace(program(fn, columns), rows=rows)
    return found, row.default(found, TARGET)


@pytest.mark.parametrize("fn", [layer_norm, rms_norm, add_rms], ids=lambda fn: fn.__name__)
def test_few_long_rows_are_all_in_flight_at_once(fn) -> None:
    """No block of the default waits for another to leave, nor needs more registers than it has."""
    found, knobs = fixed(fn, 512, 16384)
    resident = row_estimate.resident_blocks(found, knobs)
    assert resident * row.SM_COUNT * knobs.rows >= 512
    assert not row_estimate.is_short(found, knobs)


def test_the_estimate_counts_bytes_and_rows() -> None:
    """Memory's rate bounds it from below; more rows, or a dtype of twice the bytes, take longer."""
    for fn in (rms_norm, softmax):
        times = []
        for rows in (1, 512, 8192):
            found, knobs = fixed(fn, rows, 4096)
            (us,) = row.estimate(found, [knobs], TARGET)
            assert us == min(row.estimate(found, row.space(found, TARGET), TARGET))
            assert us > sum(row_estimate.row_bytes(found)) * rows / 4.8e6 if rows > 1 else us < 10
            times.append(us)
        assert times == sorted(times)
        wide = dataclasses.replace(program(fn, 4096, torch.float32), rows=8192)
        (us,) = row.estimate(wide, [row.default(wide, TARGET)], TARGET)
        assert us > 1.5 * times[-1]


def test_older_cards_get_no_dependent_launch() -> None:
    found = program(rms_norm, 16384)
    older = codegen.make_target({"kind": "cuda", "arch": "sm_80"})
    assert not any(knobs.dependent for knobs in row.space(found, older))
    oldest = codegen.make_target({"kind": "cuda", "arch": "sm_75"})
    assert not any(knobs.keep == "shared" for knobs in row.space(found, oldest))
    assert {knobs.dependent for knobs in row.space(found, TARGET)} == {False, True}


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
    knobs = row.Knobs(256, 2, 4, "shared", True, 2, True)
    assert row.TEMPLATE.knobs_from_json(row.TEMPLATE.knobs_to_json(knobs)) == knobs

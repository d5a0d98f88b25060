"""The budget admits what eager itself does, and nothing that a user would call wrong."""

import math

import numpy as np
import pytest
import torch

from tvmcap.base.numerics import Comparison, compare, to_numpy, ulp


def matmul_case(seed: int, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return (reference in float64, eager in float32) of a product with fresh inputs."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(rows, 256)), rng.normal(size=(256, 96))
    x, w = x.astype(np.float32), w.astype(np.float32)
    return x.astype(np.float64) @ w.astype(np.float64), x @ w


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_ulp_is_numpys_spacing_for_normal_numbers(dtype):
    values = np.random.default_rng(1).normal(size=1000).astype(dtype)
    assert np.array_equal(
        ulp(values.astype(np.float64), dtype), np.abs(np.spacing(values)).astype(np.float64)
    )


def test_ulp_of_bfloat16_and_floors():
    assert ulp(np.array([1.0, 1.99, 2.0, 256.0]), "bfloat16").tolist() == [2**-7, 2**-7, 2**-6, 2.0]
    assert ulp(np.array([0.0]), "float32")[0] == 2.0**-126
    assert ulp(np.array([0.0]), "float16")[0] == 2.0**-24


def test_eager_is_within_its_own_budget_and_twice_its_error_is_too():
    ref, eager = matmul_case(2)
    assert compare(eager, ref, eager, dtype="float32").ok
    twice = (ref + 1.9 * (eager - ref)).astype(np.float32)
    assert compare(twice, ref, eager).ok


def test_error_beyond_the_budget_is_found_where_it_is():
    ref, eager = matmul_case(3)
    wrong = eager.copy()
    wrong[17, 31] += 1e-2
    c = compare(wrong, ref, eager, name="out0")
    assert not c.ok and c.index == (17, 31) and c.bad == 1
    assert c.budget < 1e-3 and abs(c.got - c.want) == pytest.approx(1e-2, rel=0.1)
    assert "out0" in str(c) and "[17, 31]" in str(c)


def test_small_rows_beside_large_ones_are_checked_at_their_own_scale():
    ref, eager = matmul_case(4)
    scale = np.logspace(8, -8, len(ref))[:, None]
    ref, eager = ref * scale, (eager * scale).astype(np.float32)
    assert compare(eager, ref, eager).ok
    wrong = eager.copy()
    wrong[-1] *= 1.01
    assert not compare(wrong, ref, eager).ok


def test_without_eager_one_ulp_is_all():
    ref = np.linspace(1, 2, 50)
    ours = ref.astype(np.float32)
    assert compare(ours, ref).ok
    assert not compare(ours + np.float32(1e-6), ref).ok


def test_nan_and_inf_must_stand_in_place():
    ref, eager = matmul_case(5)
    ref[1, 2], ref[3, 4], ref[5, 6] = math.nan, math.inf, -math.inf
    eager = ref.astype(np.float32)
    assert compare(eager, ref, eager).ok
    for at, value in [
        ((1, 2), 0.0),
        ((3, 4), -math.inf),
        ((5, 6), math.nan),
        ((7, 8), math.nan),
        ((9, 9), math.inf),
    ]:
        wrong = eager.copy()
        wrong[at] = value
        c = compare(wrong, ref, eager)
        assert not c.ok and c.index == at and c.misplaced == 1


def test_overflow_of_the_dtype_counts_as_infinity_or_as_eager_has_it():
    ref = np.array([1e6, 65519.0, 1.0, 2.0])
    eager = np.array([np.inf, 65504.0, 1.0, 2.0], dtype=np.float16)
    assert compare(eager, ref, eager).ok
    assert not compare(np.array([65504.0, 65504.0, 1.0, 2.0], np.float16), ref, eager).ok


def test_an_overflow_of_eagers_own_does_not_widen_the_budget():
    ref = np.array([100.0, 1.0, 2.0])
    eager = np.array([np.inf, 1.0, 2.0], dtype=np.float16)
    assert compare(ref.astype(np.float16), ref, eager).ok
    assert not compare(np.array([100.0, 1.5, 2.0], np.float16), ref, eager).ok


def test_exact_zeros():
    zeros = np.zeros((4, 16))
    assert compare(np.zeros((4, 16), np.float32), zeros, np.zeros((4, 16), np.float32)).ok
    assert not compare(np.full((4, 16), 1e-30, np.float32), zeros, np.zeros((4, 16), np.float32)).ok


def test_integers_and_bools_are_exact():
    ref = np.arange(12).reshape(3, 4)
    assert compare(ref.astype(np.int32), ref).ok
    c = compare(ref + (ref == 5), ref)
    assert not c.ok and c.index == (1, 1) and c.bad == 1
    assert not compare(np.array([True, False]), np.array([True, True])).ok


def test_shapes_and_empty_tensors():
    assert compare(np.zeros((0, 4), np.float32), np.zeros((0, 4))).ok
    c = compare(np.zeros((2, 4), np.float32), np.zeros((3, 4)))
    assert not c.ok and "(3, 4)" in c.name
    assert compare(np.float32(1.0), np.float64(1.0)).ok


def test_torch_bfloat16_is_read_exactly_and_large_tensors_in_blocks():
    gen = torch.Generator().manual_seed(6)
    ref = torch.randn(3000, 1024, generator=gen)
    eager = ref.bfloat16()
    c = compare(eager, ref, eager)
    assert c.ok and c.dtype == "bfloat16" and c.max_ulps <= 0.5
    assert np.array_equal(to_numpy(eager), eager.float().numpy())
    wrong = eager.clone()
    wrong[2999, 1023] += 1
    assert compare(wrong, ref, eager).index == (2999, 1023)


def test_json_has_no_bare_nan():
    data = Comparison("y", "float32", (1,), got=math.nan).to_json()
    assert data["got"] == "nan" and data["ok"] is True

"""The measures of what quantization costs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmcap.base.accuracy import AccuracyReport
from tvmcap.base.numerics import compare
from tvmcap.graph.layers import Layer
from tvmcap.graph.quantize import Plan, quantized_weight
from tvmcap.verify.accuracy import LayerNoise, Noise, decibels, hold, imitate, report


def measured(*pairs):
    noise = Noise()
    for want, got in pairs:
        noise.add(np.asarray(want, np.float32), np.asarray(got, np.float32))
    return noise


def test_signal_to_noise_of_known_values() -> None:
    noise = measured(([3, 4], [3, 4.5]))
    assert noise.sqnr_db == pytest.approx(20.0) and noise.most == 0.5
    assert measured(([3], [3]), ([4], [4.5])).sqnr_db == pytest.approx(20.0)
    assert measured(([1, 0], [0, 1])).cosine == 0
    assert measured(([1, 2], [1, 2])).sqnr_db == math.inf
    assert measured(([0], [0])).cosine == 1 and measured(([0], [1])).sqnr_db == -math.inf
    lost = measured(([1, 2], [1, np.nan]), ([1], [1]))
    assert lost.sqnr_db == -math.inf and math.isnan(lost.most)
    assert measured(([1, np.nan], [1, 5])).sqnr_db == math.inf


def layer(k=64, n=8, seed=0):
    weight = np.random.default_rng(seed).standard_normal((k, n), dtype=np.float32)
    return Layer("up", None, None, relax.const(weight)), weight


@pytest.mark.parametrize(
    ("plan", "least", "most"),
    [
        (Plan("int8"), 36, 46),
        (Plan("int8", weight_only=True), 40, 52),
        (Plan("float8_e4m3fn"), 24, 32),
        (Plan("int8", clip=1.0), 0, 20),
    ],
)
def test_the_noise_of_a_scheme_is_what_its_bits_say(plan, least, most) -> None:
    _, weight = layer()
    x = np.random.default_rng(1).standard_normal((256, 64), dtype=np.float32)
    got, outside = imitate(x, *quantized_weight(weight, plan), plan)
    assert least < measured((x @ weight, got)).sqnr_db < most
    assert outside == (int((np.abs(x) > 1).sum()) if plan.clip else 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("plan", [Plan("int8"), Plan("int8", clip=3.0), Plan("float8_e4m3fn")])
def test_rows_that_are_not_finite_do_not_count(plan) -> None:
    found, weight = layer()
    x = np.random.default_rng(3).standard_normal((16, 64), dtype=np.float32)
    want = x @ weight
    results = []
    for spoilt in (False, True):
        if spoilt:
            x[3, 5], x[7, 9] = np.nan, np.inf
            want[[3, 7]] = np.nan
        one = LayerNoise(found, plan)
        one.add(x, want, want)
        results.append(one.result())
    assert results[1].sqnr_db == math.inf
    assert results[1].own_db == pytest.approx(results[0].own_db, abs=1.5)


def test_a_report_is_sorted_worst_first_and_survives_json() -> None:
    found, weight = layer()
    other = LayerNoise(Layer("kept", None, None, relax.const(weight + 1)), None)
    one = LayerNoise(found, Plan("int8", clip=2.0))
    x = np.random.default_rng(2).standard_normal((16, 64), dtype=np.float32)
    other.add(x, x @ weight, x @ weight)
    one.add(x, x @ weight, x @ weight + 0.1)
    made = report([other, one], {"out0": measured(([1, 2], [1, 2.01]))}, 30.0, 1, "inputs")
    assert [a.name for a in made.layers] == ["up", "kept"] and made.ok
    up = made.layers[0]
    assert up.saturation == pytest.approx((np.abs(x) > 2).mean())
    assert (up.bytes_before, up.bytes_after) == (64 * 8 * 4, 64 * 8 + 8 * 4)
    assert made.bytes_after == up.bytes_after + 64 * 8 * 4
    assert AccuracyReport.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert not report([one], {"out0": measured(([1], [2]))}, 30.0, 1, "inputs").ok
    again = LayerNoise(Layer("up#2", None, None, found.weight), Plan("int8", clip=9.0))
    again.add(x, x @ weight, x @ weight)
    assert report([one, again], {}, 30.0, 1, "inputs").bytes_after == up.bytes_after  # one weight


def test_a_quantized_output_is_judged_by_its_noise() -> None:
    want = np.array([1.0, 2.0, 4.0], np.float32)
    noisy = want + np.array([0.01, -0.02, 0.01], np.float32)
    outside = compare(noisy, want, want)
    assert not outside.ok
    assert hold(outside, noisy, want, want, 30.0).ok
    assert not hold(outside, noisy, want, want, 60.0).ok
    nan = np.array([1.0, np.nan, 4.0], np.float32)
    assert not hold(compare(nan, want, want), nan, want, want, 30.0).ok
    assert not hold(compare(nan, want, want), nan, want, want, -np.inf, clipped=True).ok
    ids = np.array([1, 2]), np.array([1, 3])
    assert hold(compare(*ids), *ids, ids[1], 30.0).ok


@pytest.mark.parametrize("clipped", [False, True])
def test_where_eager_and_the_reference_differ_in_kind_anything_will_do(clipped) -> None:
    """Of two rows hidden by a mask, one path of PyTorch makes zeros, another NaN."""
    rng = np.random.default_rng(0)
    want = rng.standard_normal((6, 16)).astype(np.float32)
    ours = want + np.float32(1e-3) * rng.standard_normal((6, 16)).astype(np.float32)
    odd = want.copy()
    odd[2:4] = np.nan
    for filler in (np.nan, 5.0):
        ours[2:4] = filler
        for reference, eager in ((want, odd), (odd, want)):
            result = compare(ours, reference, eager)
            held = hold(result, ours, reference, eager, 40.0, clipped=clipped)
            assert held.ok and 50 < decibels(held.signal, held.noise) < 70
            wrong = ours.copy()
            wrong[5, 0] = np.nan
            result = compare(wrong, reference, eager)
            assert not hold(result, wrong, reference, eager, 40.0, clipped=clipped).ok


def test_static_ranges_may_make_numbers_of_what_is_not_finite() -> None:
    want = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
    ours = np.array([[1.01, 2.0], [3.0, 4.0]], np.float32)
    result = compare(ours, want, want)
    assert not result.ok and not hold(result, ours, want, want, 20.0).ok
    assert hold(result, ours, want, want, 20.0, clipped=True).ok


def test_a_layer_knows_its_weight() -> None:
    found, weight = layer(4, 2)
    assert found.k == 4 and found.bytes == 32
    np.testing.assert_array_equal(found.values(), weight)
    half = relax.const(tvm.runtime.tensor(weight.astype(np.float16)))
    assert Layer("h", None, None, half).bytes == 16

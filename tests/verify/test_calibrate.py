"""Calibration: what an observer sees, where each method clips, what smoothing divides by."""

from __future__ import annotations

import numpy as np
import pytest

from tvmcap.base.errors import QuantizeError
from tvmcap.base.quantization import Quantize
from tvmcap.base.ranges import Range
from tvmcap.graph.quantize import rounded
from tvmcap.verify.calibrate import Observer, least_entropy, least_squares, smoothing


def seen(options, *inputs):
    observer = Observer("layer", options)
    for number, x in enumerate(inputs):
        observer.see(np.asarray(x, np.float32), f"input {number}")
    return observer.range()


def noise(values, clip, dtype):
    scale = clip / {"int8": 127, "float8_e4m3fn": 448}[dtype]
    back = rounded(values / scale, dtype).astype(np.float32) * scale
    return np.square(values - back).mean()


def outliers():
    rng = np.random.default_rng(0)
    values = np.abs(rng.standard_normal(50_000)).astype(np.float32)
    values[:5] = 60.0
    return values


def test_minmax_is_the_largest_magnitude_of_all_inputs() -> None:
    static = Quantize(activations="static")
    assert seen(static, [[1, -3]], np.zeros((0, 2)), [[2, 0.5]]) == Range(-3, 2, 3)


def test_percentile_leaves_outliers_out() -> None:
    values = outliers()
    options = Quantize(activations="static", method="percentile", percentile=99.9)
    assert 3 < seen(options, values.reshape(-1, 10)).clip < 4


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_mse_has_no_more_noise_than_its_neighbours(dtype) -> None:
    values = outliers()
    clip = least_squares(values, 60.0, dtype)
    at = noise(values, clip, dtype)
    assert at <= noise(values, 60.0, dtype)
    assert at <= min(noise(values, clip * f, dtype) for f in (0.5, 0.75, 1.5, 2)) * 1.001


def test_entropy_clips_a_long_tail_and_not_an_even_spread() -> None:
    rng = np.random.default_rng(1)
    tail = np.abs(rng.laplace(size=100_000)).astype(np.float32)
    assert least_entropy(tail, float(tail.max())) < 0.9 * tail.max()
    even = rng.random(100_000, dtype=np.float32)
    assert least_entropy(even, 1.0) > 0.95
    assert least_entropy(np.zeros(9, np.float32), 3.0) == 3.0  # the largest was left out


@pytest.mark.parametrize("method", ["percentile", "mse", "entropy"])
def test_every_method_gives_a_range_inside_what_was_seen(method) -> None:
    rng = np.random.default_rng(2)
    options = Quantize(activations="static", method=method)
    found = seen(options, *(rng.standard_normal((32, 8)) for _ in range(3)))
    assert 0 < found.clip <= max(-found.low, found.high)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([[[1.0, np.nan]]], r"input 0 makes NaN or Inf in the input of layer 'layer'.*keep="),
        ([[[1.0, 2.0]], [[np.inf, 1.0]]], "input 1 makes NaN or Inf"),
        ([[[0.5, 0.5]], [[0.5, 0.5]]], r"is 0\.5 everywhere"),
        ([np.zeros((0, 3))], "no calibration input reaches layer 'layer'"),
    ],
)
def test_activations_that_give_no_scale(inputs, message) -> None:
    with pytest.raises(QuantizeError, match=message):
        seen(Quantize(activations="static"), *inputs)


def test_smoothing_is_shared_by_the_layers_of_one_input() -> None:
    ranges = [Range(-4, 4, 4, (4.0, 1.0, 0.0)), Range(-4, 4, 4, (1.0, 9.0, 0.0))]
    weights = [np.array([[1.0], [-1.0], [1.0]]), np.array([[0.25], [4.0], [1.0]])]
    assert smoothing(ranges, weights, 0.5) == (2.0, 1.5, 1.0)
    assert smoothing(ranges, weights, 1.0) == (4.0, 9.0, 1.0)


def test_channels_are_kept_for_smoothing_alone() -> None:
    assert seen(Quantize(smooth=0.5), [[1, -3]], [[-2, 1]]).channels == (2, 3)
    assert seen(Quantize(activations="static"), [[1, -3]]).channels == ()

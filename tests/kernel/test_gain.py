"""What measuring more should gain: much where scores promise it, nothing where they do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tvmcap.kernel.gain import LEAST, expected_gain, noise


def measured(deviation: float, count: int = 40, seed: int = 0):
    """Scores and times that fall by 10% a unit of the score, but for noise."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0, 10, count)
    return scores, 100 * np.exp(-0.1 * scores + rng.normal(0, deviation, count))


def test_a_better_score_promises_what_the_line_says() -> None:
    scores, times = measured(0.001)
    promised = expected_gain(scores, times, [scores[np.argmin(times)] + 2.0])
    assert promised == pytest.approx(0.2, abs=0.01)


def test_worse_scores_promise_nothing() -> None:
    scores, times = measured(0.001)
    assert expected_gain(scores, times, np.linspace(0, 5, 8)) < 1e-6


def test_the_less_scores_tell_the_more_there_is_to_find() -> None:
    gains = []
    for deviation in (0.01, 0.05, 0.2):
        scores, times = measured(deviation)
        gains.append(expected_gain(scores, times, np.full(8, 8.0)))
    assert gains[0] < gains[1] < gains[2]


def test_scores_that_rank_backwards_count_as_telling_nothing() -> None:
    scores, times = measured(0.01)
    flat = expected_gain(np.zeros(40), times, np.zeros(8))
    assert expected_gain(-scores, times, -np.full(8, 100.0)) == pytest.approx(flat)


def test_expectation_agrees_with_a_simulation() -> None:
    scores, times = measured(0.05, count=2000)
    rng = np.random.default_rng(1)
    line = np.polyfit(scores, np.log(times), 1)
    rest = np.log(times) - np.polyval(line, scores)
    drawn = np.polyval(line, 9.9) + rng.normal(0, rest.std(), 200_000)
    simulated = np.maximum(np.log(times.min()) - drawn, 0).mean()
    assert expected_gain(scores, times, [9.9]) == pytest.approx(simulated, rel=0.1)


def test_too_few_to_tell_and_nothing_left() -> None:
    scores, times = measured(0.01, LEAST - 1)
    assert expected_gain(scores, times, [5.0]) == math.inf
    assert expected_gain(*measured(0.01), []) == 0.0
    assert math.isfinite(expected_gain(*measured(0.01, LEAST), [5.0]))


def test_noise_is_the_usual_relative_spread() -> None:
    assert noise([(9.0, 10.0, 11.0), (99.0, 100.0, 101.0), (9.8, 10.0, 10.2)]) == pytest.approx(
        0.02
    )
    assert noise([]) == 0.0

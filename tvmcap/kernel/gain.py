"""What measuring more candidates should gain, from how well scores told the times so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST = 24
"""Measured candidates from which on scores can be compared with times."""


def expected_gain(scores: Any, times_us: Any, left: Any) -> float:
    """Return the share of the best time by which the candidates ``left`` should improve on it.

    Logarithms of times are fitted as a falling line of the scores; what the line leaves is taken as
    normal. The sum of the expected improvements (Mockus 1978) bounds that of the best of ``left``.
    Infinite with fewer than ``LEAST`` measurements.

    Parameters
    ----------
    scores, times_us: of the measured candidates, larger scores being better.
    left: scores of those that would be measured next.
    """
    if len(times_us) < LEAST:
        return math.inf
    if len(left) == 0:
        return 0.0
    x, y = np.asarray(scores, np.float64), np.log(np.asarray(times_us, np.float64))
    slope = falling(x, y)
    rest = y - y.mean() - slope * (x - x.mean())
    deviation = max(float(np.sqrt((rest**2).sum() / (len(y) - 2))), 1e-9)
    ahead = y.min() - (y.mean() + slope * (np.asarray(left, np.float64) - x.mean()))
    z = ahead / deviation
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return float((ahead * below + deviation * density).sum())


def falling(x: Any, y: Any) -> float:
    """Return the slope of the line that fits ``y`` best over ``x``; 0 where it would rise."""
    spread = x.var()
    return min(float(np.mean((x - x.mean()) * (y - y.mean()))) / spread, 0.0) if spread else 0.0


def noise(spreads: Sequence[tuple[float, float, float]]) -> float:
    """Return the usual half of p10 to p90 of measurements, relative to their medians.

    ``spreads`` has (p10, median, p90) a measurement.
    """
    return (
        float(np.median([(high - low) / 2 / mid for low, mid, high in spreads])) if spreads else 0.0
    )

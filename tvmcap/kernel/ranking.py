"""How good an order of candidates is: which pairs count, and how many of them stand right."""

from __future__ import annotations

from typing import Any

import numpy as np

CLOSE = 0.02
"""Pairs closer than this share in time do not count: measuring again may turn them round."""


def pairs(times_us: Any) -> tuple[Any, Any, Any]:
    """Return the pairs of candidates, and which of them are far enough apart to count."""
    i, j = np.triu_indices(len(times_us), 1)
    apart = np.abs(times_us[i] - times_us[j]) / np.minimum(times_us[i], times_us[j])
    return i, j, apart >= CLOSE


def hits(scores: Any, times_us: Any) -> tuple[float, int]:
    """Return how many of the pairs that count ``scores`` put right, and how many there are.

    Larger scores are for shorter times; a tie is half a hit.

    Parameters
    ----------
    scores, times_us: float arrays (candidates,).
    """
    i, j, far = pairs(times_us)
    order = (scores[i] > scores[j]) == (times_us[i] < times_us[j])
    hit = np.where(scores[i] == scores[j], 0.5, order)
    return float(hit[far].sum()), int(far.sum())

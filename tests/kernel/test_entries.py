"""Which session of a tuning run goes next."""

from __future__ import annotations

from tvmcap.kernel import entries


def test_weights_prefer_the_heavy_task() -> None:
    entry = dict(session=None, batch=4, before=None)
    heavy = entries.Entry(weight=0.9, **entry)  # type: ignore[arg-type]
    light = entries.Entry(weight=0.1, **entry)  # type: ignore[arg-type]
    assert heavy.priority > light.priority
    heavy.gain, heavy.batches = 0.0, 60
    assert light.priority > heavy.priority

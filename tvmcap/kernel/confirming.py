"""The fastest candidates of a session, measured a second time: a lucky timing is not kept."""

from __future__ import annotations

from collections.abc import Callable

from tvmcap.kernel.candidates import Measurement
from tvmcap.kernel.records import Record
from tvmcap.kernel.search import Proposal, Session

CONFIRMED = 3
"""Candidates that are measured again at once."""
_MOST = 3 * CONFIRMED


def confirm(
    session: Session,
    measure: Callable[[list[Proposal], float | None], list[Measurement]],
    keep: Callable[[list[Record]], None],
) -> None:
    """Measure a session's fastest again, until the best was measured twice; the later time counts.

    ``measure`` takes proposals and the best time so far in microseconds; ``keep`` writes records.
    """
    confirmed: set[str] = set()
    while len(confirmed) < _MOST:
        best = session.best()
        if best is None or best.candidate in confirmed:
            break
        again = session.repeat(_fastest(session, confirmed))
        if not again:
            break
        measured = measure(again, best.median_us)
        records = [session.record(p, r) for p, r in zip(again, measured, strict=True)]
        keep(records)
        confirmed |= {r.candidate for r in records}


def _fastest(session: Session, confirmed: set[str]) -> list[Record]:
    good = [
        r
        for r in session.latest().values()
        if r.median_us is not None and r.candidate not in confirmed
    ]
    return sorted(good, key=lambda r: r.median_us or 0.0)[:CONFIRMED]

"""How tuning went, read off records."""

from __future__ import annotations

import datetime

import pytest
from test_records import record

from tvmcap.kernel import history
from tvmcap.kernel.history import PAUSE_S

START = datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.timezone.utc)


def at(seconds: float, tile: int, us: float | None, **changes: object):
    date = (START + datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")
    return record(tile, us, date=date, **changes)


def test_the_clock_stands_still_in_pauses_and_without_a_date() -> None:
    records = [at(s, i, 1.0) for i, s in enumerate((0, 3, 3, 3 + PAUSE_S, 9000, 9002))]
    records.insert(1, record(9))
    records[1] = record(9, date="yesterday")
    assert history.clock(records) == [0, None, 3, 3, 3 + PAUSE_S, 3 + PAUSE_S, 5 + PAUSE_S]


def test_steps_know_the_best_by_then_and_the_later_time_counts() -> None:
    rows = {"rows": 1}
    records = [
        at(0, 1, None),
        at(1, 2, 8.0),
        at(2, 3, 4.0),
        at(2, 7, 3.0, sizes=rows),
        at(4, 3, 6.0),  # measured again: slower
        at(5, 4, 7.0),
    ]
    first, second = history.histories(records)
    assert [s.best_us for s in first.steps] == [None, 8.0, 4.0, 6.0, 6.0]
    assert [s.trial for s in first.steps] == [1, 2, 3, 5, 6]
    assert [s.seconds for s in first.steps] == [0, 1, 2, 4, 5]
    assert (first.first_us, first.best_us, first.failures) == (8.0, 6.0, {"compile": 1})
    assert second.sizes == rows and second.best_us == 3.0 and second.failures == {}


def test_merged_records_are_put_in_the_order_of_their_dates() -> None:
    records = [at(8, 1, 2.0), at(9, 2, 1.0), at(0, 3, 5.0), at(1, 4, 4.0)]
    (found,) = history.histories(records)
    assert [s.best_us for s in found.steps] == [5.0, 4.0, 2.0, 1.0]


def test_speed_ends_at_1_and_starts_where_the_first_candidates_were() -> None:
    rows = {"rows": 1}
    records = [at(0, 1, 8.0), at(1, 2, 2.0), at(2, 1, 9.0, sizes=rows), at(3, 2, 1.0, sizes=rows)]
    curve = history.speed(history.histories(records))
    assert [(trial, seconds) for trial, seconds, _ in curve] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    expected = [(1 / 4 / 9) ** 0.5, 1 / 3, 1 / 3, 1.0]
    assert [value for _, _, value in curve] == pytest.approx(expected)
    assert history.speed(history.histories([at(0, 1, None)])) == []

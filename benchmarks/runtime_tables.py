"""Tables of what benchmarks/runtime_host.py measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
_CALL = "call, "
_WINDOWS = "p99_over_p50_of_windows"


def host_times(rows: list[Row]) -> Table:
    """One line a way of calling; the last cells where rows tell of each window."""
    head = ["call", "median, us", "10th to 90th percentile", "99th", "99th over median"]
    windows = max((len(row.get(_WINDOWS, ())) for row in calls(rows)), default=0)
    if windows:
        head += [f"in {windows} windows: least, median, most", "plain Python in them"]
    body = [
        [
            row["figure"].removeprefix(_CALL),
            f"{row['median']:.2f}",
            f"{row['p10']:.2f} to {row['p90']:.2f}",
            f"{row['p99']:.2f}",
            f"{row['p99_over_p50']:.2f}",
            *(_steadiness(row) if windows else ()),
        ]
        for row in calls(rows)
    ]
    return head, body


def counts(rows: list[Row]) -> Table:
    """One line a figure of memory, captures and loading."""
    body = []
    for row in others(rows):
        value = f"{row['median']:.3g} {row['unit']}".strip()
        spread = f"{row['p10']:.3g} to {row['p90']:.3g}" if "p10" in row else ""
        body.append([row["figure"], value, spread])
    return ["figure", "value", "least to most"], body


def calls(rows: list[Row]) -> list[Row]:
    """Return the rows of host time."""
    return [row for row in rows if row["figure"].startswith(_CALL)]


def others(rows: list[Row]) -> list[Row]:
    """Return the other rows."""
    return [row for row in rows if not row["figure"].startswith(_CALL)]


def _steadiness(row: Row) -> tuple[str, str]:
    """Return how far calls and reference spread in all windows."""
    if _WINDOWS not in row:
        return "", ""
    return _least_to_most(row[_WINDOWS]), _least_to_most(row["reference_of_windows"])


def _least_to_most(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}, {median(ratios):.2f}, {max(ratios):.2f}"


def part(select: Callable[[list[Row]], list[Row]]) -> Callable[[Row], tuple[Row, list[Row]]]:
    """Return what takes the meta data and some rows from a file, none where there is none."""
    return lambda data: (data.get("meta", {}), select(data.get("rows", [])))

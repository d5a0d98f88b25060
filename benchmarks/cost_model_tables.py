"""Tables of how well the cost model ranks, from what cost_model.py writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
_COLUMNS = {
    "pairwise": "pairs in order",
    "best_of_1": "best of 1",
    "best_of_5": "best of 5",
    "top8_regret": "regret of 8",
    "zero_trial": "pick without trials",
    "search_8": "search, 8 trials",
    "search_16": "16",
    "search_32": "32",
}
_ORDERS = {
    "ours": "the cost model",
    "ndcg": "with rank:ndcg",
    "regression": "with squared error",
    "prior": "the estimate alone",
    "stock": "MetaSchedule's XGBModel",
    "random": "random",
}
_TAUGHT = {
    "none": "bf16 alone",
    "few": "bf16, and a few of fp16",
    "all": "bf16, and all of fp16",
    "few_alone": "a few of fp16 alone",
    "all_alone": "all of fp16 alone",
}


def part(target: str, section: str | None = None) -> Callable[[Row], tuple[Row, list[Row]]]:
    """Return what takes the meta data and the rows of a target from the file."""

    def read(result: Row) -> tuple[Row, list[Row]]:
        rows = result[target] if section is None else result[section][target]
        return result["metas"][target], [{"row": name, **row} for name, row in rows.items()]

    return read


def data(target: str) -> Callable[[Row], tuple[Row, list[Row]]]:
    """Return what takes the meta data of a target from the file, and what its records are."""
    return lambda result: (result["metas"][target], [result["data"][target]])


def orders(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line an order of candidates: the mean over seeds, and the least and largest."""
    return _table("order", _ORDERS, rows, [])


def transfer(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line for what was learnt from, with the number of records of the other dtype."""
    return _table("learnt from", _TAUGHT, rows, ["records"])


def records(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line: what was learnt from and tested on."""
    (found,) = rows
    again = "not measured twice"
    if found["ceiling"] is not None:
        again = f"{found['ceiling']:.3f} of {found['ceiling_pairs']} pairs"
    head = ["candidates", "failed", "shapes", "with 100 or more", "(K, N)", "epilogues"]
    head += [f"pairs closer than {found['dropped_below']:.0%}", "pairs a second time in order"]
    names = ("candidates", "failed", "shapes", "shapes_of_100", "pairs_of_k_and_n", "epilogues")
    return head, [[*(str(found[n]) for n in names), f"{found['dropped_pairs']:.1%}", again]]


def _table(
    title: str, names: dict[str, str], rows: list[Row], counts: list[str]
) -> tuple[list[str], list[list[str]]]:
    known = [c for c in _COLUMNS if any(c in row for row in rows)]
    head = [title, *counts, *(_COLUMNS[c] for c in known)]
    body = []
    for row in rows:
        cells = [f"{row[c]:.0f}" if c in row else "-" for c in counts]
        body.append([names[row["row"]], *cells, *(_cell(row, c) for c in known)])
    return head, body


def _cell(row: Row, column: str) -> str:
    if column not in row:
        return "-"
    low, high = row["spread"][column]
    return f"{row[column]:.3f} ({low:.3f} to {high:.3f})"

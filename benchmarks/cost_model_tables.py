"""Tables of how well the cost model ranks, from what cost_model.py writes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean
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
    "stores": "with MetaSchedule's features",
    "stock": "MetaSchedule's XGBModel",
    "random": "random",
}
_TAUGHT = {
    "none": "{source} alone",
    "few": "{source}, and a few of {own}",
    "all": "{source}, and all of {own}",
    "few_alone": "a few of {own} alone",
    "all_alone": "all of {own} alone",
}


def part(target: str, section: str | None = None) -> Callable[[Row], tuple[Row, list[Row]]]:
    """Return what takes the meta data and the rows of a target from the file."""

    def read(result: Row) -> tuple[Row, list[Row]]:
        rows = (result if section is None else result.get(section, {})).get(target, {})
        return _meta(result, target), [{"row": name, **row} for name, row in rows.items()]

    return read


def data(target: str) -> Callable[[Row], tuple[Row, list[Row]]]:
    """Return what takes the meta data of a target from the file, and what its records are."""

    def read(result: Row) -> tuple[Row, list[Row]]:
        found = result.get("data", {}).get(target)
        return _meta(result, target), [found] if found else []

    return read


def _meta(result: Row, target: str) -> Row:
    found: Row = result.get("metas", {}).get(target, {})
    return found


def orders(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line an order of candidates: the mean over seeds, and the least and largest."""
    return _table("order", _ORDERS, rows, [])


def transfer(source: str, own: str) -> Callable[[list[Row]], tuple[list[str], list[list[str]]]]:
    """One line for what was learnt from, with the number of own records."""
    names = {name: text.format(source=source, own=own) for name, text in _TAUGHT.items()}
    return lambda rows: _table("learnt from", names, rows, ["records"])


def trials(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a task: the trials of each search to the latency that stock has in the end.

    The last line has the geometric means over tasks.
    """
    head = [
        "task",
        "measured on",
        "its latency, us",
        "MetaSchedule's trials",
        "without warm-up",
        "ours",
        "fewer",
        "as `tune` does",
        "mean of the seeds: MetaSchedule's trials",
        "ours",
        "fewer",
    ]
    body, every, means = list[list[str]](), list[float](), list[float]()
    for row in rows:
        found = [_reached(row, method) for method in ("stock", "eager", "ours")]
        product = _reached(row, "product")
        each = ratios(row)
        every.append(geometric_mean(each))
        fewer = f"{every[-1]:.1f}x ({min(each):.1f}x to {max(each):.1f}x)"
        goals = f"{min(row['goal_us']):.0f} to {max(row['goal_us']):.0f}"
        stock, ours = of_means(row)
        means.append(stock / ours)
        reached = [str(stock), str(ours) if ours <= row["trials"] else f">{row['trials']}"]
        line = [row["task"], row["machine"], goals, *found, fewer, product]
        body.append([*line, *reached, f"{means[-1]:.1f}x"])
    if rows:
        seeds, mean = (f"{geometric_mean(values):.1f}x" for values in (every, means))
        body.append(["all tasks", *[""] * 5, seeds, "", "", "", mean])
    return head, body


def of_means(row: Row) -> tuple[int, int]:
    """Return the trials of stock and ours to stock's last latency, all by the mean over seeds.

    The mean is the geometric one of the best so far. One more than all trials where they did not
    suffice.
    """
    curves = {
        method: [geometric_mean(at) for at in zip(*row["curves_us"][method], strict=False)]
        for method in ("stock", "ours")
    }
    goal = curves["stock"][row["trials"] - 1]
    stock, ours = (
        next((i + 1 for i, us in enumerate(c[: row["trials"]]) if us <= goal), row["trials"] + 1)
        for c in curves.values()
    )
    return stock, ours


def ratios(row: Row, method: str = "ours") -> list[float]:
    """Return, by seed, how many times as many trials stock took as a method.

    Where the method did not reach stock's latency, it counts as if its next trial had.
    """
    columns = (row["reached"]["stock"], row["reached"][method], row["asked"][method])
    return [stock / (own or asked + 1) for stock, own, asked in zip(*columns, strict=True) if asked]


def overhead(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a task: the time of a tuning run, and what of it the search took."""
    head = ["task", "trials", "processes that compile", "seconds"]
    head += ["neither compiling nor measuring, s", "share", "processor time of the search, s"]
    return head, [
        [
            *(row["task"], str(row["trials"]), str(row["workers"]), f"{row['seconds']:.1f}"),
            *(f"{row['overhead_s']:.1f}", f"{row['share']:.1%}", f"{row['search_cpu_s']:.1f}"),
        ]
        for row in rows
    ]


def _reached(row: Row, method: str) -> str:
    pairs = zip(row["reached"][method], row["asked"][method], strict=True)
    found = [str(own or f">{asked}") for own, asked in pairs if asked]
    return ", ".join(found) or "-"


def records(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """One line: what was learnt from and tested on."""
    (found,) = rows
    again = "not measured twice"
    if found["ceiling"] is not None:
        again = f"{found['ceiling']:.3f} of {found['ceiling_pairs']} pairs"
    machine = {"measured on": found["machine"]} if "machine" in found else {}
    head = [*machine, "candidates", "failed", "shapes", "with 100 or more", "(K, N)", "epilogues"]
    head += [f"pairs closer than {found['dropped_below']:.0%}", "pairs a second time in order"]
    names = ("candidates", "failed", "shapes", "shapes_of_100", "pairs_of_k_and_n", "epilogues")
    return head, [
        [*machine.values(), *(str(found[n]) for n in names), f"{found['dropped_pairs']:.1%}", again]
    ]


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

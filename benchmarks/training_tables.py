"""Tables of the benchmark of training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
_BASELINES = {
    "three_matmuls": "three products",
    "eager": "eager",
    "torch_compile": "torch.compile",
}


def layers(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a shape: times, and what each takes over the three products."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["M", "K", "N", "library", "kernels", "tvmcap, us"]
        head += [f"{name}, us" for name in _BASELINES.values()]
        head += ["tvmcap over products", "eager over", "torch.compile over", "right"]
        body = []
        for r in (r for r in rows if r["kind"] == "layer"):
            size = [str(r[name]) for name in "MKN"]
            if "failed" in r:
                body.append([*size, f"failed: {_plain(r['failed'])}", *[""] * (len(head) - 4)])
                continue
            times = [us(r["baselines_us"].get(name)) for name in _BASELINES]
            over = [_x(r["over_matmuls"].get(n)) for n in ("ours", "eager", "torch_compile")]
            right = "yes" if r["right"] else "**no**"
            own = [r["case"], str(r["kernels"]), us(r["ours_us"])]
            body.append([*size, *own, *times, *over, right])
        return head, body

    return make


def planned(rows: Sequence[Row]) -> Table:
    """One line a library: its budgets, and what it says of its memory."""
    head = ["model", "memory_budget", "saved", "of eager's", "planned peak", "kernels"]
    body = []
    for of in _by_library(rows):
        r = of[0]
        end = [_mib(r["peak_bytes_planned"]), str(r["kernels"])]
        body.append([r["case"], _range(of), *_saved(r), *end])
    return head, body


def budgets(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a library: its budgets, what is saved, beside eager, and the time of a step."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["model", "memory_budget", "saved", "of eager's", "planned peak", "measured peak"]
        head += ["eager's peak", "tvmcap, us", "over budget 1", "eager, us", "torch.compile, us"]
        head += ["right"]
        found = [r for r in rows if r["kind"] == "budget"]
        body = [
            [f"failed: {_plain(r['failed'])}", *[""] * (len(head) - 1)]
            for r in found
            if "failed" in r
        ]
        for of in _by_library([r for r in found if "failed" not in r]):
            r = of[0]
            times = [us(r["baselines_us"].get(name)) for name in ("eager", "torch_compile")]
            peaks = [_mib(r[name]) for name in _PEAKS]
            own = [us(r["ours_us"]), _x(r["over_budget_1"])]
            right = "yes" if r["right"] else "**no**"
            body.append([r["case"], _range(of), *_saved(r), *peaks, *own, *times, right])
        return head, body

    return make


_PEAKS = ("peak_bytes_planned", "peak_bytes", "eager_peak_bytes")


def _by_library(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows by library, in order; those of one are equal but for the budget."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["library"], []).append(row)
    return list(found.values())


def _range(rows: Sequence[Row]) -> str:
    """Name the budgets of rows, which are next to each other."""
    first, last = rows[0]["memory_budget"], rows[-1]["memory_budget"]
    return f"{first:g}" if len(rows) == 1 else f"{first:g} to {last:g}"


def _saved(row: Row) -> list[str]:
    return [_mib(row["saved_bytes"]), _x(row["saved_bytes"] / row["eager_saved_bytes"])]


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"

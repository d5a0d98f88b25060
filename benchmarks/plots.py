"""Figures of docs/ from benchmarks/results/*.json, as SVG.

A figure carries a digest of what it was drawn from, so that whether it is out of date is known
without drawing it again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Data = dict[str, list[Row]]
"""Rows by result file; none where it is not there."""
_OPTIONS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tvmcap",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_USED = ("memory_budget", "saved_bytes", "eager_saved_bytes", "peak_bytes_planned")
_MEASURED = ("peak_bytes", "eager_peak_bytes")


def training_memory(data: Data, axes: Any) -> None:
    """Draw what is saved and the peak over memory budgets: as planned, and where measured."""
    planned, measured = data["training_memory"], data["training"]
    x = [row["memory_budget"] for row in planned]

    def line(rows: Sequence[Row], name: str, **style: Any) -> None:
        axes.plot([r["memory_budget"] for r in rows], [r[name] / 2**20 for r in rows], **style)

    line(planned, "peak_bytes_planned", color="C0", marker=".", label="peak, planned")
    line(planned, "saved_bytes", color="C1", marker=".", label="saved")
    line(planned, "eager_saved_bytes", color="C1", linestyle=":", label="saved by eager")
    if measured:
        style = {"marker": "x", "linestyle": "none", "color": "C3"}
        line(measured, "peak_bytes", label="peak, measured", **style)
        line(
            measured, "eager_peak_bytes", color="C3", linestyle=":", label="peak of eager, measured"
        )
    axes.set_title(f"Memory of a training step, {planned[0]['case']}")
    axes.set_xlabel("memory_budget")
    axes.set_ylabel("MiB")
    axes.set_xlim(max(x), min(x))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower left")


PLOTS: dict[str, tuple[tuple[str, ...], Callable[[Data, Any], None]]] = {
    "training_memory.svg": (("training_memory", "training"), training_memory),
}
"""Name of a figure to the result files it is made of, the first of which it needs, and what draws
it."""


def outdated(docs: Path, results: Path) -> list[str]:
    """Name the figures that lack or are of other rows than the result files now hold."""
    found = []
    for name, (files, _) in PLOTS.items():
        data = _data(results, files)
        path = docs / name
        text = path.read_text() if path.is_file() else ""
        if data[files[0]] and f"rows {_digest(data)}" not in text:
            found.append(name)
    return found


def draw(name: str, docs: Path, results: Path) -> None:
    """Draw a figure; needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    files, make = PLOTS[name]
    data = _data(results, files)
    with matplotlib.rc_context(_OPTIONS):
        figure = Figure((6.4, 3.6), layout="constrained")
        make(data, figure.subplots())
        out = io.StringIO()
        about = {"Date": None, "Description": f"rows {_digest(data)}"}
        figure.savefig(out, format="svg", metadata=about)
    lines = out.getvalue().splitlines()
    (docs / name).write_text("\n".join(line.rstrip() for line in lines) + "\n")


def _data(results: Path, files: Sequence[str]) -> Data:
    """Read the rows of the budgets that were measured, each cut to what is drawn."""
    found = {}
    for file in files:
        path = results / f"{file}.json"
        rows = json.loads(path.read_text())["rows"] if path.is_file() else []
        wanted = [r for r in rows if r.get("kind") == "budget" and "failed" not in r]
        found[file] = [{k: r[k] for k in ("case", *_USED, *_MEASURED) if k in r} for r in wanted]
    return found


def _digest(data: Data) -> str:
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

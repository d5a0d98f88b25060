"""A tuning report as one HTML page that needs nothing beside it: tables, and figures as SVG."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tvmcap.base.errors import ConfigError
from tvmcap.base.folders import write_whole
from tvmcap.kernel.history import PAUSE_S, History
from tvmcap.view import plots
from tvmcap.view.records import workload_text
from tvmcap.view.report import sizes_text
from tvmcap.view.tuning import TuningReport

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .7em; text-align: left }
th { border-bottom: 1px solid #999 } td.number { text-align: right }
tr:nth-child(even) td { background: #f4f4f4 } code { word-break: break-all }
.panels { display: flex; flex-wrap: wrap } svg { max-width: 100%; height: auto }
"""
_CURVES = f"""The share of the final speed is the geometric mean over all tasks of the best time in
the end over the best time by then; before a task is measured it counts with its first time, which
is that of the default. Seconds are those between one record and the next, by the dates of the
records, to the second. Gaps of more than {PAUSE_S:.0f} s are pauses and do not count, nor does what
a run did before its first record."""
_PREDICTED = """Every candidate is predicted by a model that learnt from other workloads alone (from
other candidates where there is one workload). A model orders candidates; a line fitted to each task
turns its scores into times, so that the order is what is tested. The importance of a feature is its
share of what the splits of the trees gained; where a template has an estimate of its own, the trees
correct it, and what it explains is not in these shares."""


def html_page(report: TuningReport) -> str:
    """Return the page of a report; raises ToolchainError where matplotlib is missing."""
    plots.check()
    title = f"Tuning records of {report.target}"
    panels = (_own_ids(svg, f"panel{i}") for i, svg in enumerate(plots.panel_svgs(report)))
    parts = [
        f"<h1>{escape(title)}</h1>",
        _summary(report),
        "<h2>Tuning curves, predictions and failures</h2>",
        f'<div class="panels">{"".join(panels)}</div>',
        f"<p>{_CURVES}</p><p>{_PREDICTED}</p>",
        _models(report),
        "<h2>Tasks</h2>",
        _table(_TASK_COLUMNS, [_task_cells(h) for h in report.histories]),
        *(_task(i, h, report) for i, h in enumerate(report.histories, 1)),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _summary(report: TuningReport) -> str:
    spent = "" if report.seconds is None else f" in {report.seconds:.0f} s of tuning"
    lines = [
        f"{report.measurements} measurements of {len(report.histories)} tasks{spent}, "
        f"{sum(report.failures.values())} failed",
        *(f"records: {folder}" for folder in report.folders),
        *report.notes,
    ]
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    rows = [(name, str(count)) for name, count in report.status.items()]
    return f"<ul>{listed}</ul>" + _table(("status", "records"), rows)


def _models(report: TuningReport) -> str:
    columns = ("model of", "learns from", "not taught", "pairs in order", "best over first pick")
    rows = [
        (
            judgement.template,
            f"{judgement.measurements} measurements",
            f"other {judgement.held_out}",
            "-" if judgement.pairwise is None else f"{judgement.pairwise:.3f}",
            f"{judgement.best_of_1:.3f}",
        )
        for judgement in report.judgements
    ]
    return _table(columns, rows) if rows else "<p>Too few measurements to learn from.</p>"


_TASK_COLUMNS = (
    "", "what", "space", "sizes", "measured", "failed", "first, us", "best, us", "gain",
    "best candidate",
)  # fmt: skip


def _task_cells(history: History) -> tuple[str, ...]:
    first, best = history.first_us, history.best_us
    failed = ", ".join(f"{n} {cause}" for cause, n in sorted(history.failures.items()))
    return (
        history.key.workload_hash[:8],
        workload_text(history.key, history.workload),
        history.key.template or "loop nest",
        sizes_text(history.sizes),
        str(len(history.steps)),
        failed or "0",
        "-" if first is None else f"{first:.4g}",
        "-" if best is None else f"{best:.4g}",
        "-" if not first or not best else f"{first / best:.2f}x",
        _candidate(history),
    )


def _candidate(history: History) -> str:
    if history.best is None:
        return "-"
    if history.best.knobs is None:
        return "the rule's own" if history.best.trace == [] else "a trace"
    return ", ".join(f"{name}={value}" for name, value in history.best.knobs.items())


def _task(number: int, history: History, report: TuningReport) -> str:
    what = workload_text(history.key, history.workload) or "loop nest"
    name = f"{history.key.workload_hash[:8]} {what}, {sizes_text(history.sizes)}"
    shown = " open" if number == 1 else ""
    figure = _own_ids(plots.task_svg(history, report), f"task{number}")
    return f"<details{shown}><summary>{escape(name)}</summary>{figure}</details>"


def _own_ids(svg: str, name: str) -> str:
    """Prefix the ids of a figure: those of all figures of a page must differ."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    number = ' class="number"' if text.rstrip("x%").replace(".", "", 1).isdecimal() else ""
    return f"<td{number}>{escape(text)}</td>"


def write_report(report: TuningReport, path: Path) -> None:
    """Write a report as a page (``.html``) or its figures as a picture (``.png``), whole or not.

    Raises
    ------
    ConfigError: the name ends otherwise, or the file cannot be written.
    ToolchainError: matplotlib is missing.
    """
    check_output(path)
    data = plots.overview_png(report) if path.suffix == ".png" else html_page(report).encode()
    try:
        write_whole(path, data)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror or e}") from e


def check_output(path: Path) -> None:
    """Raise ConfigError where a report cannot go to ``path``, which is known before it is made."""
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"{path}: expected a file name that ends in .html or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written: choose another file name")
    plots.check()

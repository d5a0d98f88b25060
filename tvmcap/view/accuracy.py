"""The report of what quantization costs, as text and as a page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from tvmcap.base.accuracy import Accuracy, AccuracyReport
from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.folders import write_whole

_COLUMNS = {
    "layer": "its name, or an output of the model",
    "holds": "dtype of the weight; 'kept' layers stay as they were",
    "SQNR dB": "signal to quantization noise of its result, noise of earlier layers included",
    "alone dB": "the same on the unquantized model's input: what this layer alone adds",
    "cosine": "of the angle between its result and the unquantized model's",
    "max error": "largest absolute difference from the unquantized model",
    "saturated": "share of its inputs outside the range of their scale",
    "KiB": "its weight before and after, scales included",
}

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }}
table {{ border-collapse: collapse; margin: 1em 0 }}
th, td {{ padding: .2em .8em; border-bottom: 1px solid #ccc; text-align: right }}
td {{ white-space: nowrap }}
th:nth-child(-n+3), td:nth-child(-n+3) {{ text-align: left }}
td:nth-child(3) {{ min-width: 10em }}
div {{ background: #cfe3f7; padding-left: .3em }}
tr.low div {{ background: #f7cfcf }}
.OUTSIDE {{ color: #a00 }}
dt {{ font-weight: 600; float: left; clear: left; width: 6.5em }}
dd {{ margin-left: 7em }}
</style>
<h1>{title}</h1>
<p class="{state}">{verdict}</p>
<table>
<tr>{head}</tr>
{rows}
</table>
<p>{sizes}</p>
<dl>
{legend}
</dl>
</html>
"""


def text(report: AccuracyReport) -> str:
    """Return a table of the outputs and the layers, worst first, and the bytes of the weights."""
    rows = [tuple(_COLUMNS), *map(_row, report.outputs), *map(_row, report.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  "
        + "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([f"quantized: {_verdict(report)}", *lines, *_sizes(report)])


def html(report: AccuracyReport, title: str = "What quantization costs") -> str:
    """Return the same as one page that needs no other file; bars show the noise in the model."""
    rows = [*report.outputs, *report.layers]
    finite = [x.sqnr_db for x in rows if math.isfinite(x.sqnr_db)]
    most = max([*finite, report.budget_db, 1.0])
    return _PAGE.format(
        title=escape(title),
        state=_state(report),
        verdict=escape(_verdict(report)),
        head="".join(f'<th title="{escape(note)}">{name}</th>' for name, note in _COLUMNS.items()),
        rows="\n".join(_html_row(x, report.budget_db, most) for x in rows),
        sizes="<br>\n".join(map(escape, _sizes(report))),
        legend="\n".join(
            f"<dt>{name}</dt><dd>{escape(note)}</dd>" for name, note in _COLUMNS.items()
        ),
    )


def write(report: AccuracyReport, path: str | os.PathLike[str]) -> Path:
    """Write the report to a file, as its suffix says: ``.html``, ``.json`` or ``.txt``.

    Raises ConfigError for another suffix, LibraryError where the file cannot be written.
    """
    file = check_path(path)
    forms: dict[str, Callable[[], str]] = {
        ".html": lambda: html(report),
        ".json": lambda: json.dumps(report.to_json(), indent=1) + "\n",
        ".txt": lambda: text(report) + "\n",
    }
    try:
        write_whole(file, forms[file.suffix]().encode())
    except OSError as e:
        raise LibraryError(f"{file}: the report cannot be written: {e.strerror or e}") from e
    return file


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a report, which is known to be one before there is a report.

    Raises ConfigError for a suffix that names no form of it, LibraryError where no file can be.
    """
    file = Path(path)
    if file.suffix not in (".html", ".json", ".txt"):
        raise ConfigError(f"{file}: expected the name of a .html, .json or .txt file")
    if not file.parent.is_dir():
        raise LibraryError(
            f"{file}: the report cannot be written: there is no folder {file.parent}"
        )
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise LibraryError(f"{file}: the report cannot be written: choose another file name")
    return file


def _state(report: AccuracyReport) -> str:
    return "within" if report.ok else "OUTSIDE"


def _verdict(report: AccuracyReport) -> str:
    return (
        f"{_state(report)} the budget of {report.budget_db:g} dB ({report.inputs} {report.source})"
    )


def _sizes(report: AccuracyReport) -> list[str]:
    """Say how large the listed weights and the library are, before and after."""
    sizes: Sequence[tuple[str, int | None, int | None]] = [
        ("weights", report.bytes_before, report.bytes_after),
        ("library", report.library_before, report.library_after),
    ]
    lines = []
    for name, before, after in sizes:
        if before is None or after is None:
            continue
        share = f" ({after / before:.3f}x)" if before else ""
        lines.append(f"{name}: {before / 1024:.1f} KiB before, {after / 1024:.1f} KiB after{share}")
    return lines


def _row(x: Accuracy) -> tuple[str, ...]:
    alone = "" if x.own_db is None else f"{x.own_db:.1f}"
    common = (x.name, x.scheme or "output", f"{x.sqnr_db:.1f}", alone, f"{x.cosine:.6f}")
    weight = f"{x.bytes_before / 1024:.1f} -> {x.bytes_after / 1024:.1f}"
    weight = weight if x.bytes_before or x.bytes_after else ""
    share = f"{x.saturation:.2%}" if x.scheme else ""
    return (*common, f"{x.max_error:.3g}", share, weight)


def _html_row(x: Accuracy, budget_db: float, most: float) -> str:
    """Return one row, with a bar of its noise; red where it is below the budget."""
    share = min(max(x.sqnr_db, 0.0) / most, 1.0)
    cells = [escape(cell) for cell in _row(x)]
    cells[2] = f'<div style="width: {share:.0%}">{cells[2]}</div>'
    low = ' class="low"' if x.sqnr_db < budget_db else ""
    return f"<tr{low}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

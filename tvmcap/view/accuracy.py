"""The report of what quantization costs, as text."""

from __future__ import annotations

from tvmcap.verify.accuracy import Accuracy, AccuracyReport

_COLUMNS = ("layer", "holds", "SQNR dB", "alone dB", "cosine", "max error", "saturated", "KiB")


def text(report: AccuracyReport) -> str:
    """Return a table of the outputs and the layers, worst first, and the bytes of the weights."""
    state = "within" if report.ok else "OUTSIDE"
    head = (
        f"quantized: {state} the budget of {report.budget_db:g} dB "
        f"({report.inputs} {report.source})"
    )
    rows = [_COLUMNS, *map(_row, report.outputs), *map(_row, report.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  "
        + "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    before, after = report.bytes_before, report.bytes_after
    share = f" ({after / before:.3f}x)" if before else ""
    size = f"weights: {before / 1024:.1f} KiB before, {after / 1024:.1f} KiB after{share}"
    return "\n".join([head, *lines, size])


def _row(x: Accuracy) -> tuple[str, ...]:
    alone = "" if x.own_db is None else f"{x.own_db:.1f}"
    common = (x.name, x.scheme or "output", f"{x.sqnr_db:.1f}", alone, f"{x.cosine:.6f}")
    weight = f"{x.bytes_before / 1024:.1f} -> {x.bytes_after / 1024:.1f}" if x.bytes_before else ""
    share = f"{x.saturation:.2%}" if x.scheme else ""
    return (*common, f"{x.max_error:.3g}", share, weight)

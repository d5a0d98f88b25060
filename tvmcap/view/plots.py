"""Figures of a tuning report, by matplotlib: as SVG for a page, or as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tvmcap.base.errors import ToolchainError
from tvmcap.kernel.history import History, speed
from tvmcap.view.tuning import TuningReport

_OPTIONS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tvmcap",  # the same figure is the same file
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SHOWN_FEATURES = 12
_PANEL = (4.4, 3.1)
"""Inches of a panel, width and height."""


def check() -> None:
    """Raise ToolchainError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ToolchainError(
            "figures of tuning need matplotlib, which is not installed: "
            "pip install 'tvmcap[report]' (or pip install matplotlib)"
        ) from e


def overview_png(report: TuningReport) -> bytes:
    """Draw all panels of a report as one PNG."""
    draws = panels(report)
    columns = 2
    rows = -(-len(draws) // columns)
    return _render(draws, (rows, columns), "png")


def panel_svgs(report: TuningReport) -> list[str]:
    """Draw each panel of a report as SVG."""
    return [_svg([draw], (1, 1)) for draw in panels(report)]


def task_svg(history: History, report: TuningReport) -> str:
    """Draw one task as SVG: its curves, and predicted against measured where that is known."""
    draws = _curves([history])
    found = [p for p in report.predictions(history) if len(p.measured_us)]
    if found:
        name = history.key.template or "loop_nest"
        draws.append(partial(_predictions, [(name, found)]))
    return _svg(draws, (1, len(draws)))


def panels(report: TuningReport) -> list[Any]:
    """Return what draws each panel of a report on axes."""
    found = [(j.template, j.predictions) for j in report.judgements]
    draws: list[Any] = [
        *_curves(report.histories),
        partial(_predictions, found),
        partial(_failures, report),
    ]
    return draws + [partial(_importance, judgement) for judgement in report.judgements]


def _curves(histories: Sequence[History]) -> list[Any]:
    """Return what draws the curves against measurements and seconds: in us for one task."""
    if len(histories) == 1:
        return [partial(_task_curve, histories[0], seconds) for seconds in (False, True)]
    return [partial(_speed, histories, seconds) for seconds in (False, True)]


def _render(draws: Sequence[Any], shape: tuple[int, int], kind: str) -> bytes:
    check()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_OPTIONS):
        width, height = _PANEL
        figure = Figure((width * shape[1], height * shape[0]), layout="constrained")
        axes = figure.subplots(*shape, squeeze=False).ravel()
        for draw, own in zip(draws, axes, strict=False):
            draw(own)
        for own in axes[len(draws) :]:
            own.set_axis_off()
        out = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(out, format=kind, dpi=150, metadata=metadata)
        return out.getvalue()


def _svg(draws: Sequence[Any], shape: tuple[int, int]) -> str:
    text = _render(draws, shape, "svg").decode("utf-8")
    return text[text.index("<svg") :]


def _speed(histories: Sequence[History], by_seconds: bool, axes: Any) -> None:
    points = [
        (seconds if by_seconds else trial, value)
        for trial, seconds, value in speed(histories)
        if not by_seconds or seconds is not None
    ]
    what = "seconds" if by_seconds else "measurements"
    axes.set_title(f"Speed of the kernels against {what}")
    axes.set_xlabel("seconds of tuning" if by_seconds else "measurements")
    axes.set_ylabel("share of the final speed")
    if points:
        axes.step(*zip(*points, strict=True), where="post", color="C0")
        axes.margins(y=0.1)
    else:
        _say(axes, "the records have no dates" if by_seconds else "no measurement ran")


def _task_curve(history: History, by_seconds: bool, axes: Any) -> None:
    steps = [
        (s.seconds if by_seconds else float(i), s)
        for i, s in enumerate(history.steps, 1)
        if not by_seconds or s.seconds is not None
    ]
    axes.set_title(f"Best against {'seconds' if by_seconds else 'measurements'}")
    axes.set_xlabel("seconds of tuning, all tasks" if by_seconds else "measurements of this task")
    axes.set_ylabel("microseconds")
    ran = [(x, s.median_us) for x, s in steps if s.median_us is not None]
    best = [(x, s.best_us) for x, s in steps if s.best_us is not None]
    if not ran:
        undated = by_seconds and history.best is not None
        _say(axes, "the records have no dates" if undated else "every measurement failed")
        return
    axes.scatter(*zip(*ran, strict=True), s=9, color="0.6", label="candidate")
    axes.step(*zip(*best, strict=True), where="post", color="C0", label="best so far")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.legend(frameon=False)


def _predictions(found: Sequence[tuple[str, Sequence[Any]]], axes: Any) -> None:
    """Draw times over the best of their task, so that what tasks differ in does not flatter."""
    axes.set_title("Predicted against measured")
    axes.set_xlabel("measured, over the best of the task")
    axes.set_ylabel("predicted, over the best of the task")
    limits: list[float] = []
    for name, predictions in found:
        if predictions:
            x = np.concatenate([p.measured_us / p.measured_us.min() for p in predictions])
            y = np.concatenate([p.predicted_us / p.measured_us.min() for p in predictions])
            # thousands of marks make a page slow: as vectors only where they are few
            axes.scatter(x, y, s=7, alpha=0.6, linewidths=0, label=name, rasterized=len(x) > 1000)
            limits += [float(v) for v in (x.min(), x.max(), y.min(), y.max())]
    if not limits:
        _say(axes, "too few measurements to learn from")
        return
    ends = (min(limits), max(limits))
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.legend(frameon=False)


def _importance(judgement: Any, axes: Any) -> None:
    shown = judgement.importance[:_SHOWN_FEATURES][::-1]
    axes.set_title(f"Feature importance, {judgement.template}")
    axes.set_xlabel("share of what the trees' splits gained")
    axes.barh([name for name, _ in shown], [share for _, share in shown], color="C2")


def _failures(report: TuningReport, axes: Any) -> None:
    causes = sorted(report.failures.items(), key=lambda pair: pair[1])
    axes.set_title(f"Failures by cause, of {report.measurements} measurements")
    axes.set_xlabel("measurements")
    if causes:
        bars = axes.barh([c for c, _ in causes], [n for _, n in causes], color="C3")
        axes.bar_label(bars, padding=2)
        axes.margins(x=0.12)
    else:
        _say(axes, "none")


def _plain_ticks(axis: Any) -> None:
    """Write the ticks of a logarithmic axis as plain numbers, few of them."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="0.4")
    axes.set_xticks([])
    axes.set_yticks([])

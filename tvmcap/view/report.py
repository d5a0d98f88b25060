"""Tables for people: Score, the walk, VerifyReport, tuning and doctor, as rich renderables.

Each has its JSON beside it (``to_json`` of the object); ``text`` renders to a string.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tvmcap.base.score import Latency, Score
from tvmcap.verify.result import Check, VerifyReport

_DASH = "-"
UNSTEADY = "the timings spread by more than 2x (is the machine busy?): measure again"


def text(renderable: RenderableType, width: int = 110) -> str:
    """Render without colour, as a log or a file takes it."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


def bytes_text(count: float | None) -> str:
    """Write a number of bytes with a binary unit."""
    if count is None:
        return _DASH
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def latency_text(latency: Latency | None) -> str:
    """Median and spread in microseconds."""
    if latency is None:
        return _DASH
    return f"{latency.median:.1f} us ({latency.p10:.1f} to {latency.p90:.1f})"


def _ratio(value: float | None) -> str:
    return _DASH if value is None else f"{value:.2f}x"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Write symbolic sizes as ``B=16 T=8``, or "static"."""
    return " ".join(f"{k}={v}" for k, v in sizes.items()) or "static"


def score_table(score: Score, kernels: bool = True) -> RenderableType:
    """One row a quantity, ours beside eager and torch.compile; then one row a kernel."""
    table = Table(title=f"Scoreboard at {sizes_text(score.sizes)}", title_justify="left")
    for name in ("", "tvmcap", "eager", "torch.compile"):
        table.add_column(name, justify="left" if not name else "right")
    compiled, eager = score.torch_compile_us, score.eager_us
    rows: list[tuple[str, ...]] = [
        ("kernels", _number(score.kernels), _number(score.eager_kernels)),
        ("HBM bytes", bytes_text(score.hbm_bytes), bytes_text(score.eager_hbm_bytes)),
        (
            "activation traffic",
            _ratio(score.activation_traffic),
            _ratio(score.eager_activation_traffic),
        ),
        ("frozen weights", bytes_text(score.weight_bytes)),
        ("peak planned", bytes_text(score.peak_bytes_planned)),
        ("peak measured", bytes_text(score.peak_bytes_measured)),
        ("latency", latency_text(score.latency_us), latency_text(eager), latency_text(compiled)),
        ("speed-up of tvmcap", "", _over(eager, score), _over(compiled, score)),
    ]
    for row in rows:
        table.add_row(*row, *[""] * (4 - len(row)))
    parts: list[RenderableType] = [table, Text(_footnote(score))]
    if kernels and score.per_kernel:
        parts.append(kernel_table(score))
    return Group(*parts)


def _number(value: int | None) -> str:
    return _DASH if value is None else str(value)


def _over(base: Latency | None, score: Score) -> str:
    if base is None or score.latency_us is None:
        return _DASH
    return _ratio(base.median / score.latency_us.median)


def _footnote(score: Score) -> str:
    verified = {True: "verified", False: "NOT verified", None: "not verified yet"}[score.verified]
    parts = [f"{score.tuned_tasks} of {score.tasks} tasks tuned", verified]
    if score.build_s is not None:
        parts.append(f"built in {score.build_s:.1f} s")
    if _unsteady(score):
        parts.append(UNSTEADY)
    if score.eager_parts:
        parts.append(f"left to PyTorch: {', '.join(score.eager_parts)}")
    return "; ".join(parts)


def _unsteady(*scores: Score) -> bool:
    """Whether some 90th percentile is over twice the 10th."""
    taken = (t for s in scores for t in (s.latency_us, s.eager_us, s.torch_compile_us) if t)
    return any(t.p90 > 2 * t.p10 for t in taken)


def kernel_table(score: Score) -> Table:
    """One row a call of a kernel."""
    table = Table(title="Kernels of one call", title_justify="left")
    for name in ("kernel", "reads", "writes", "scheduled by"):
        table.add_column(name, justify="right" if name in ("reads", "writes") else "left")
    for k in score.per_kernel:
        table.add_row(k.name, bytes_text(k.read_bytes), bytes_text(k.write_bytes), k.scheduled_by)
    return table


def walk_table(rows: Sequence[Any]) -> RenderableType:
    """Show the walk from eager to compiled; ``rows`` have ``name`` and ``score``."""
    table = Table(title="From eager to compiled", title_justify="left")
    columns = ("step", "kernels", "HBM bytes", "traffic", "peak", "latency (us)", "vs eager")
    for name in columns:
        table.add_column(name, justify="left" if name == "step" else "right")
    first: Score = rows[0].score
    table.add_row(
        "eager",
        _number(first.eager_kernels),
        bytes_text(first.eager_hbm_bytes),
        _ratio(first.eager_activation_traffic),
        _DASH,
        _DASH if first.eager_us is None else f"{first.eager_us.median:.1f}",
        "1.00x",
    )
    for row in rows:
        s: Score = row.score
        table.add_row(
            row.name,
            _number(s.kernels),
            bytes_text(s.hbm_bytes),
            _ratio(s.activation_traffic),
            bytes_text(s.peak_bytes_planned),
            _DASH if s.latency_us is None else f"{s.latency_us.median:.1f}",
            _ratio(s.speedup),
        )
    last: Score = rows[-1].score
    notes = [f"{rows[-1].name}: {last.tuned_tasks} of {last.tasks} tasks tuned"]
    if _unsteady(*(row.score for row in rows)):
        notes.append(UNSTEADY)
    return Group(table, Text("; ".join(notes)))


def verify_table(report: VerifyReport) -> RenderableType:
    """One row an output of each set of inputs."""
    table = Table(title=f"Against the {report.reference} reference", title_justify="left")
    for name in ("inputs", "sizes", "output", "max abs", "eager", "budget", "ulps", ""):
        table.add_column(name, justify="left" if name in ("inputs", "sizes", "output") else "right")
    for check in report.checks:
        for row in _check_rows(check):
            table.add_row(check.kind, sizes_text(check.sizes), *row)
    late = f"; {report.left_out} sets left out for time" if report.left_out else ""
    outcome = "verified" if report.ok else "NOT verified"
    return Group(table, Text(f"{outcome}, largest error {report.max_abs:.3g}{late}"))


def _check_rows(check: Check) -> Iterable[tuple[str, ...]]:
    if check.skipped:
        yield (Text("skipped: ").plain + check.skipped, *[""] * 4, "skip")
    for o in check.outputs:
        figures = (f"{v:.3g}" for v in (o.max_abs, o.eager_abs, o.budget, o.max_ulps))
        yield (o.name, *figures, "pass" if o.ok else "FAIL")


def tune_table(run: Any) -> Table:
    """One row a task of a tuning run (``TuneRun.to_json()`` gives ``tasks``)."""
    data = run.to_json() if hasattr(run, "to_json") else run
    return dict_table("Tuning", data.get("tasks", []))


def dict_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Show plain rows: one column a key of the first, numbers to the right."""
    table = Table(title=title, title_justify="left")
    keys = list(rows[0]) if rows else []
    for key in keys:
        numeric = all(isinstance(r.get(key), int | float) for r in rows)
        table.add_column(key, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return _DASH
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return str(value)


def findings_table(findings: Sequence[Any]) -> Table:
    """Show what doctor found: ``name``, ``status``, ``detail``, ``cure``."""
    colours = {"ok": "green", "warn": "yellow", "error": "red"}
    table = Table(title="tvmcap doctor", title_justify="left")
    for name in ("check", "status", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for f in findings:
        table.add_row(f.name, Text(f.status, style=colours[f.status]), f.detail, f.cure)
    return table

"""Progress of tuning: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

logger = logging.getLogger("tvmcap")

_LOG_EVERY_S = 10.0


class LogProgress:
    """Tells progress as log lines, at most one in ten seconds."""

    def __init__(self) -> None:
        self._total = 0
        self._last = 0.0

    def start(self, trials: int) -> None:
        """Note how many trials there will be."""
        self._total, self._last = trials, time.monotonic()
        logger.info("tuning: at most %d trials", trials)

    def update(
        self, task: str, best_us: float | None, trials: int, failures: int, left_s: float | None
    ) -> None:
        """Log where tuning is, unless it was logged just now."""
        if time.monotonic() - self._last >= _LOG_EVERY_S or trials == self._total:
            self._last = time.monotonic()
            logger.info(
                "tuning: %d/%d trials, %s best %s, %d failed, %s left",
                trials, self._total, task, format_us(best_us), failures, format_s(left_s),
            )  # fmt: skip

    def finish(self) -> None:
        """Need nothing."""


class RichProgress:
    """Shows the task, its best time, trials, failures and the time left, in one live line."""

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._bar: Any = None
        self._id: Any = None

    def start(self, trials: int) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.fields[name]}"),
            BarColumn(bar_width=6),
            MofNCompleteColumn(),
            TextColumn(
                "best {task.fields[best]}, {task.fields[failures]} failed, {task.fields[left]} left"
            ),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._id = self._bar.add_task("", total=trials, name="...", best="-", failures=0, left="?")
        self._bar.start()

    def update(
        self, task: str, best_us: float | None, trials: int, failures: int, left_s: float | None
    ) -> None:
        """Redraw the line."""
        values = {
            "name": shorten(task),
            "best": format_us(best_us),
            "failures": failures,
            "left": format_s(left_s),
        }
        self._bar.update(self._id, completed=trials, **values)

    def finish(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def default_progress() -> LogProgress | RichProgress:
    """Return a live line where standard error is a terminal and rich is there, else log lines."""
    if not sys.stderr.isatty():
        return LogProgress()
    try:
        from rich.console import Console
    except ImportError:
        return LogProgress()
    return RichProgress(Console(stderr=True))


def shorten(name: str, width: int = 24) -> str:
    """Cut a name in the middle, so that the line fits a terminal and the sizes stay."""
    half = (width - 1) // 2
    return name if len(name) <= width else f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"


def format_us(value: float | None) -> str:
    """Spell microseconds for people."""
    if value is None:
        return "-"
    return f"{value / 1000:.2f} ms" if value >= 10_000 else f"{value:.1f} us"


def format_s(value: float | None) -> str:
    """Spell seconds for people."""
    if value is None:
        return "?"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"

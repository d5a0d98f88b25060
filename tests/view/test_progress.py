"""What tuning shows while it runs, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tvmcap.view import progress as view


def test_progress_views(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(view.default_progress(), view.LogProgress)
    out = io.StringIO()
    shown = view.RichProgress(Console(file=out, force_terminal=True, width=120))
    with caplog.at_level("INFO", logger="tvmcap"):
        for p in (shown, view.LogProgress()):
            p.start(2)
            p.update("task", None, 1, 0, 100.0)
            p.update("task", 12345.6, 2, 1, 3.0)
            p.finish()
    assert "12.35 ms" in out.getvalue() and "1 failed" in out.getvalue()
    assert "2/2 trials" in caplog.text and "12.35 ms" in caplog.text
    assert capsys.readouterr().out == ""

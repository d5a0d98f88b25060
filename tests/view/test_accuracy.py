"""The report as text."""

from __future__ import annotations

from tvmcap.verify.accuracy import Accuracy, AccuracyReport
from tvmcap.view.accuracy import text


def test_the_table_says_what_was_measured() -> None:
    up = Accuracy("up.weight", "int8", 31.25, 38.0, 0.9996, 0.125, 0.015, 4096, 1088)
    head = Accuracy("head.weight", "kept", 35.0, None, 0.9999, 0.01, 0.0, 1024, 1024)
    out = Accuracy("out0", "", 29.5, None, 0.999, 0.5)
    made = AccuracyReport((out,), (up, head), 30.0, 2, "inputs held out of calibration")
    lines = text(made).splitlines()
    assert lines[0] == ("quantized: OUTSIDE the budget of 30 dB (2 inputs held out of calibration)")
    assert lines[2].split() == ["out0", "output", "29.5", "0.999000", "0.5"]
    row = "up.weight int8 31.2 38.0 0.999600 0.125 1.50% 4.0 -> 1.1"
    assert lines[3].split() == row.split()
    assert lines[4].split()[:3] == ["head.weight", "kept", "35.0"]
    assert lines[-1] == "weights: 5.0 KiB before, 2.1 KiB after (0.412x)"

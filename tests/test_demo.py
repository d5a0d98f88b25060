"""The demo runs, and its table holds every batch size."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_demo_with_a_small_budget(tmp_path):
    command = [sys.executable, "examples/demo.py", "--trials", "3", "--seconds", "5"]
    place = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **place}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for part in ("1. build", "2. tune", "verified, largest error", "block.so", "tuning: at most 3"):
        assert part in done.stdout
    rows = re.findall(r"│ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +([\d.]+)x │ +(\S+) │", done.stdout)
    assert [int(row[0]) for row in rows] == [1, 16, 128, 512]
    for _, eager, _, tuned, ratio, error in rows:
        # medians are printed to a microsecond
        assert abs(int(eager) / int(tuned) - float(ratio)) < 0.02 * float(ratio) + 0.01
        assert float(error) < (0.1 if "bfloat16" in done.stdout else 1e-4)
    assert not (tmp_path / "data").exists(), "the demo leaves no records behind"

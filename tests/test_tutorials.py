"""The tutorials run top to bottom; their own asserts check what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.py"))


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(tutorial, tmp_path):
    places = {
        "XDG_CACHE_HOME": tmp_path / "cache",
        "XDG_DATA_HOME": tmp_path / "data",
        "TMPDIR": tmp_path,
    }
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}}
    command = [sys.executable, str(tutorial)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert not list(tmp_path.glob("tvmcap-tutorial-*")), "a tutorial leaves nothing behind"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_cells_of_prose_and_code(tutorial):
    first, *cells = re.split(r"^# %%", tutorial.read_text(), flags=re.MULTILINE)
    assert first == "" and len(cells) > 8
    prose = [cell for cell in cells if cell.startswith(" [markdown]\n")]
    assert len(prose) >= len(cells) / 3
    for cell in prose:
        body = cell.split("\n", 1)[1]
        assert all(line.startswith("#") or not line.strip() for line in body.splitlines())


def test_there_are_tutorials():
    names = [path.name for path in TUTORIALS]
    assert names[:2] == ["01_build_and_export.py", "02_tune_and_read_a_log.py"]

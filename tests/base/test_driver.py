"""The stand-in for NVIDIA's driver, in a process that only builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tvmcap.base import codegen, driver
from tvmcap.base.errors import ToolchainError


def test_without_cudart_the_error_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "find_cudart", lambda: None)
    with pytest.raises(ToolchainError, match=r"libcudart.*tvmcap\[cuda\]"):
        driver.preload()


def test_the_stand_in_reports_no_device(tmp_path: Path) -> None:
    code = (
        "import ctypes, pathlib, sys; from tvmcap.base import driver\n"
        "driver._load_stand_in(pathlib.Path(sys.argv[1])); cuda = ctypes.CDLL('libcuda.so.1')\n"
        "print(cuda.cuInit(0), cuda.cuModuleLoadData(None, None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["100", "100"]

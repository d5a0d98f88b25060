"""A failed call leaves no error in the CUDA runtime, and a process without one gets none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tvmcap.base import cudart

_STAND_IN = """
static int last;
int cudaMalloc(void) { return last = 2; }
int cudaPeekAtLastError(void) { return last; }
int cudaGetLastError(void) { int was = last; last = 0; return was; }
"""
_SCRIPT = """
import ctypes, sys
from tvmcap.base import cudart
cudart.forget_error()
print(cudart.loaded())
runtime = ctypes.CDLL(sys.argv[1])
print(runtime.cudaMalloc(), runtime.cudaPeekAtLastError())
cudart.forget_error()
print(runtime.cudaPeekAtLastError())
"""


def test_the_error_is_forgotten_in_the_runtime_that_is_loaded(tmp_path: Path) -> None:
    source, library = tmp_path / "cudart.c", tmp_path / "anywhere" / "lib.so"
    source.write_text(_STAND_IN)
    library.parent.mkdir()
    shared = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{cudart.NAME}", "-o", str(library)]
    subprocess.run([*shared, str(source)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(library)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", "2", "2", "0"]

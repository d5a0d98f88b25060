"""Cross-compilation: a cubin on a machine without a GPU, in a process of its own.

Without libcuda.so.1 TVM's CUDA side library does not load and `tvm.compile` would put CUDA *source*
in the library. A stand-in for the driver lets it load; it stays in a child process, so that it can
never spoil a later start of CUDA.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmcap.base import codegen
from tvmcap.base.errors import BuildError, ToolchainError

_DRIVER_FUNCTIONS = (
    "cuInit cuDeviceGetCount cuDeviceGet cuDeviceGetName cuFuncSetAttribute cuGetErrorName "
    "cuGetErrorString cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleUnload "
    "cuTensorMapEncodeTiled"
).split()
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h)


@dataclass(frozen=True)
class Apart:
    """A planned module that a child process compiles when written; stands in for a VMExecutable."""

    mod: Any
    target: dict[str, Any]

    def export_library(self, path: str) -> None:
        """Compile and link to ``path``; raises BuildError with the child's last words."""
        import json

        import tvm

        codegen.require_nvcc()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "module.json")
            source.write_text(tvm.ir.save_json(self.mod))
            module = [sys.executable, "-m", "tvmcap.library.cross"]
            command = [*module, str(source), json.dumps(self.target), path]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            last = lines[-1] if lines else f"exit code {done.returncode}"
            arch = self.target["arch"]
            raise BuildError(f"cross-compiling for {arch} failed: {last}\n{done.stderr[-4000:]}")


def preload_driver_stand_in(folder: str) -> None:
    """Load libcudart and a driver without a device into this process, which must only build."""
    cudart = codegen.find_cudart()
    if cudart is None:
        raise ToolchainError(
            "cross-compiling needs libcudart.so.13; pip install 'tvmcap[cuda]' brings it"
        )
    source, library = Path(folder, "cuda.c"), Path(folder, "libcuda.so.1")
    source.write_text(
        "".join(f"int {name}(void){{return {_NO_DEVICE};}}\n" for name in _DRIVER_FUNCTIONS)
    )
    compiler = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*compiler, "-o", str(library), str(source)], check=True)
    for path in (cudart, library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main(source: str, target: str, path: str) -> None:
    """Compile the module of ``source`` (TVM's JSON) for ``target`` (JSON) into ``path``."""
    with tempfile.TemporaryDirectory() as folder:
        preload_driver_stand_in(folder)
        import tvm

        from tvmcap.library.lower import compile_module

        mod = tvm.ir.load_json(Path(source).read_text())
        compile_module(mod, codegen.make_target(target)).export_library(path)


if __name__ == "__main__":
    main(*sys.argv[1:])

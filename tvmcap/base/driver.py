"""What TVM's CUDA side library needs in a process that builds kernels and runs none.

Without libcuda.so.1 it does not load, and `tvm.compile` would put CUDA *source* in a library. A
stand-in for the driver lets it load.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

from tvmcap.base import codegen
from tvmcap.base.errors import ToolchainError

_DRIVER_FUNCTIONS = (
    "cuInit cuDeviceGetCount cuDeviceGet cuDeviceGetName cuFuncSetAttribute cuGetErrorName "
    "cuGetErrorString cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleUnload "
    "cuTensorMapEncodeTiled"
).split()
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h)


def preload() -> None:
    """Load libcudart, and a driver without a device where there is no driver.

    For a process of its own that runs nothing on a GPU: CUDA cannot start in it any more. To be
    called before TVM is imported.
    """
    cudart = codegen.find_cudart()
    if cudart is None:
        raise ToolchainError(
            "cross-compiling needs libcudart.so.13; pip install 'tvmcap[cuda]' brings it"
        )
    ctypes.CDLL(str(cudart), mode=ctypes.RTLD_GLOBAL)
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            _load_stand_in(Path(folder))


def _load_stand_in(folder: Path) -> None:
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(
        "".join(f"int {name}(void){{return {_NO_DEVICE};}}\n" for name in _DRIVER_FUNCTIONS)
    )
    compiler = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*compiler, "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

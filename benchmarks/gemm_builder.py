"""A process that compiles kernels for a GPU: ``tvmcap.kernel.worker`` without torch.

torch costs seconds a start and a CUDA context. On a machine without a GPU a stand-in for the
driver lets TVM's CUDA side library load.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

from tvmcap.base import codegen
from tvmcap.library.cross import preload_driver_stand_in

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi imports it where it can


def main() -> None:
    """Bring the CUDA runtime into the process, then serve."""
    os.environ.setdefault("TVM_NUM_THREADS", "1")
    if codegen.gpu_architecture() is None:
        with tempfile.TemporaryDirectory() as folder:
            preload_driver_stand_in(folder)
    else:
        ctypes.CDLL(str(codegen.find_cudart() or "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
    from tvmcap.kernel import worker

    worker.main()


if __name__ == "__main__":
    main()

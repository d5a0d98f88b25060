"""A process that compiles kernels for a GPU: ``tvmcap.kernel.worker`` without torch.

torch costs seconds a start and a CUDA context. On a machine without a GPU a stand-in for the
driver lets TVM's CUDA side library load.
"""

from __future__ import annotations

import os
import sys

from tvmcap.base import driver

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi imports it where it can


def main() -> None:
    """Bring the CUDA runtime into the process, then serve."""
    os.environ.setdefault("TVM_NUM_THREADS", "1")
    driver.preload()
    from tvmcap.kernel import worker

    worker.main()


if __name__ == "__main__":
    main()

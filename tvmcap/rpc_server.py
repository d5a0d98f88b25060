"""The server of a device for ``tvmcap tune --rpc``: ``python -m tvmcap.rpc_server --key NAME``.

It is TVM's RPC server, registered at a tracker, and goes on after a kernel that crashed: TVM's own
(``python -m tvm.exec.rpc_server``) does as well until then, and from then on serves nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Sequence

from tvmcap.base.config import Config
from tvmcap.base.errors import ConfigError, ToolchainError

_FIRST_PORT, _LAST_PORT = 9090, 9199


def make_parser() -> argparse.ArgumentParser:
    """Describe the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tvmcap.rpc_server",
        description="Let `tvmcap tune --rpc TRACKER --key NAME` measure kernels on this machine. "
        "Whoever reaches the port can run what they like here: for networks that you trust.",
    )
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT")
    parser.add_argument("--key", required=True, metavar="NAME", help="names this kind of device")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen at")
    parser.add_argument("--port", type=int, help="default: a free one from 9090 to 9199")
    parser.add_argument("--custom-addr", metavar="HOST", help="what the tracker tells of this host")
    return parser


def _prepare() -> None:
    """Have what TVM needs for CUDA here, and nothing that starts CUDA.

    Sessions are forks of this process, which CUDA does not survive; with torch installed, tvm_ffi
    asks torch for a GPU when it is imported, unless it is told not to.
    """
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    from tvmcap.runtime.loader import load_cuda_runtime

    with contextlib.suppress(ToolchainError):  # a machine without CUDA serves its CPU
        load_cuda_runtime()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until the process is killed."""
    _prepare()
    from tvm.rpc.server import PopenRPCServerState, logger

    from tvmcap.kernel.tracker import Tracker

    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        tracker = Tracker.of(Config(rpc=options.tracker, key=options.key))
    except ConfigError as e:
        parser.error(str(e))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the threads of the server would outlive Ctrl-C
    first, last = options.port or _FIRST_PORT, options.port or _LAST_PORT
    home = os.getcwd()
    while True:
        server = PopenRPCServerState(
            options.host,
            first,
            last + 1,
            tracker_addr=(tracker.host, tracker.port),
            key=tracker.key,
            custom_addr=options.custom_addr,
        )
        server.thread.join()  # it ends where a session's process crashed or the tracker is gone
        server.sock.close()
        os.chdir(home)
        logger.warning("the server ended (see above) and starts again")


if __name__ == "__main__":
    main()

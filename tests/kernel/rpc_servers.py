"""A real RPC tracker and servers on loopback, honest ones, lying ones and TVM's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tvmcap.base.errors import TuneError
from tvmcap.kernel.tracker import Tracker

# starts each process by a fork, which spares it the seconds of TVM's import
_PARENT = """
import json, os, signal, sys, threading
sys.modules["torch"] = None
import tvm.rpc.server, tvm.rpc.tracker, tvmcap.rpc_server, tvmcap.kernel.tracker
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    request = json.loads(line)
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        print(os.getpid(), flush=True)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        exec(request["script"])
        threading.Event().wait()
"""
_TRACKER = """
state = tvm.rpc.tracker.PopenTrackerServerState("127.0.0.1", {port}, {port} + 1)
"""
_SERVER = """
options = ["--tracker", "127.0.0.1:{port}", "--key", {key!r}, "--host", "127.0.0.1"]
tvmcap.rpc_server.main([*options, "--port", "{own}"])
"""
_STOCK = """
tracker = ("127.0.0.1", {port})
state = tvm.rpc.server.PopenRPCServerState(
    "127.0.0.1", {own}, {own} + 1, tracker_addr=tracker, key={key!r}
)
"""
#: Runs ``wrong`` instead of what was uploaded, from the load with number ``first`` of a session on.
LIES = """
load, loads = tvm.rpc.server._load_module, []
def lie(path):
    loads.append(path)
    return load({wrong!r} if len(loads) > {first} else path)
tvm.rpc.server._load_module = lie
"""


@dataclass(eq=False)
class Farm:
    """Processes of one tracker; ``start`` adds servers to it."""

    folder: Path
    port: int
    parent: subprocess.Popen[str]
    pids: dict[str, int] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, name: str, script: str) -> None:
        assert self.parent.stdin is not None and self.parent.stdout is not None
        request = {"log": str(self.folder / f"{name}.log"), "script": script}
        self.parent.stdin.write(json.dumps(request) + "\n")
        self.parent.stdin.flush()
        self.pids[name] = int(self.parent.stdout.readline())
        self.groups.append(self.pids[name])

    def start(self, *names: str, key: str, before: str = "", stock: bool = False) -> None:
        """Start servers and wait until they are registered."""
        tracker = Tracker("127.0.0.1", self.port, key)
        expected = len(tracker.servers().get(key, [])) + len(names)
        for name in names:
            text = before + (_STOCK if stock else _SERVER)
            self.run(name, text.format(port=self.port, own=free_port(), key=key))
        wait(lambda: len(tracker.check()) == expected)

    def kill(self, *names: str) -> None:
        """Kill servers and what they started."""
        for name in names:
            self.end(self.pids[name])

    def end(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def loads(self, name: str) -> int:
        """Count the libraries that a server loaded."""
        return (self.folder / f"{name}.log").read_text().count("load_module")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(TuneError):
            if reached():
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def farm(folder: Path) -> Iterator[Farm]:
    """Run a tracker; everything ends with the block."""
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        made = Farm(folder, free_port(), parent)
        try:
            made.run("tracker", _TRACKER.format(port=made.port))
            wait(lambda: Tracker("127.0.0.1", made.port, "").servers() is not None)
            yield made
        finally:
            for group in made.groups:
                made.end(group)

"""Child processes that build and run candidates, and survive what candidates do to them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tvmcap.base import codegen
from tvmcap.base.errors import TuneError
from tvmcap.kernel import registry

_ROOM = 1 << 20  # bytes that a candidate and its compiler need at least


@dataclass(eq=False)
class Worker:
    """A child process and what it said. ``call`` restarts it where it died or had to be killed."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    served: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _errors: Path = field(default=Path())

    @property
    def pid(self) -> int | None:
        """The process's id; None where it does not run."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process where it does not run."""
        if self._process is None or self._process.poll() is not None:
            try:
                self._process = self._started()
            except OSError as e:
                raise TuneError(
                    f"cannot start a process to tune with: {e}; make room in {self.folder.parent} "
                    "or set TMPDIR to a folder with room, then tune again"
                ) from e
            self.served = 0
        return self._process

    def _started(self) -> subprocess.Popen[bytes]:
        handle, name = tempfile.mkstemp(suffix=".stderr", dir=self.folder)
        self._errors = Path(name)
        try:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                env=self.environment,
                start_new_session=True,
            )
        finally:
            os.close(handle)

    def call(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply; a crash or a time-out is a reply with an error."""
        process, what = self.start(), request["op"]
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write((json.dumps(dict(request)) + "\n").encode())
            process.stdin.flush()
            line = _read_line(process, time.monotonic() + timeout_s)
        except BrokenPipeError:
            line = b""
        except BaseException:
            self.stop()
            raise
        self.served += 1
        if line is None:
            self.stop()
            return {
                "error": {"cause": f"{what} timeout", "message": f"killed after {timeout_s:g} s"}
            }
        reply = _parse(line)
        if reply is None:
            return {"error": {"cause": f"{what} crash", "message": self._last_words(process)}}
        return reply

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        self.stop()
        code = process.returncode
        name = (
            signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        )
        lines = [
            line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()
        ]
        return f"the process ended with {name}\n" + "\n".join(lines[-40:])

    def end(self, timeout_s: float) -> None:
        """Let the process end by itself once its input ends; kill it where it does not."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(timeout_s)
        self.stop()

    def stop(self) -> None:
        """Kill the process and whatever it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None


class _Stoppable(Protocol):
    def stop(self) -> None: ...


_Server = TypeVar("_Server", bound=_Stoppable)
_Item = TypeVar("_Item")


def share_out(
    threads: Executor,
    servers: Sequence[_Server],
    items: Iterable[_Item],
    work: Callable[[_Server, _Item], None],
) -> None:
    """Call ``work`` for each item, on every server at once, the next item as soon as one is free.

    Where a call raises, all servers are stopped and the error goes on.
    """
    queue = [*items][::-1]

    def serve(server: _Server) -> None:
        while queue:
            try:
                item = queue.pop()
            except IndexError:  # another took the last one
                return
            work(server, item)

    try:
        list(threads.map(serve, servers))
    except BaseException:
        queue.clear()
        for server in servers:
            server.stop()
        raise


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a reply; None for what a candidate may have left of one."""
    try:
        reply = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) else None


def of_machine(reply: Mapping[str, Any], folder: Path) -> bool:
    """Whether it is no candidate that failed: a compiler, memory or room in ``folder`` is missing.

    A compiler that finds no room may say so or just crash.
    """
    if "error" not in reply:
        return False
    said = os.strerror(errno.ENOSPC) in reply["error"]["message"]
    return bool(reply.get("machine")) or said or shutil.disk_usage(folder).free < _ROOM


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Read one reply; None at the deadline, what came so far where the process ended."""
    assert process.stdout is not None
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not data.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return data
            data += part
    return data


def command(device: str, *, builds: bool = False) -> tuple[str, ...]:
    """Return the command line of a worker for kernels of a device.

    Only one that runs kernels on a GPU has a use for torch, which takes seconds to import.
    """
    worker = (sys.executable, "-m", "tvmcap.kernel.worker")
    if device == "cpu":
        return (*worker, "--without-torch")
    if builds and codegen.find_cudart() is not None:
        return (*worker, "--without-torch", f"--{device}")
    return worker


def environment(target: Any) -> dict[str, str]:
    """Return the environment of a worker: the path of imports, and the threads of the target."""
    threads = str(int(target.attrs.get("num-cores", os.cpu_count() or 1)))
    path = os.pathsep.join(os.path.abspath(p) for p in [*sys.path, *registry.folders()])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TVM_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }


def target_json(target: Any) -> dict[str, Any]:
    """Return a target as a request to a worker holds it."""
    return {str(k): _plain(v) for k, v in target.export().items()}


def _plain(value: Any) -> Any:
    """Turn TVM containers and numbers into JSON data."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if hasattr(value, "value"):
        return value.value
    return [_plain(v) for v in value]

"""The process that has candidates measured on a remote device, by one RPC session at a time.

``python -m tvmcap.kernel.remote_worker HOST PORT KEY``: requests and replies as those of
``tvmcap.kernel.worker``. Inputs are drawn and outputs compared here; a server gets libraries and
arrays, and is believed only while it computes the unscheduled kernel right.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmcap.kernel import worker  # first: it decides about torch

import numpy as np  # isort: skip
import tvm  # isort: skip

from tvmcap.kernel import arrays
from tvmcap.kernel.tracker import Address, NoServerError, Tracker

#: A session without requests for so long is given back; the server ends it after so long at last.
_IDLE_S, _SESSION_S = 1.0, 120.0
#: Bytes written between two calls on a GPU, so that each sees its inputs cold.
_FLUSHED = {"cpu": 0, "cuda": 160 << 20}
_MOST_FLUSHES = 100


class WrongServer(Exception):
    """A server cannot run the unscheduled kernel, or computes something else."""


@dataclass(eq=False)
class Session:
    """A session on a server, with the arguments of one workload on its device."""

    remote: Any
    address: Address
    device: Any
    opened: float = field(default_factory=time.monotonic)
    key: str = ""
    tensors: list[Any] = field(default_factory=list)
    drawn: dict[int, Any] = field(default_factory=dict)

    def left_s(self) -> float:
        """Seconds until the server ends the session."""
        return self.opened + _SESSION_S - time.monotonic()

    def put(self, data: arrays.HostArrays, written: Sequence[int]) -> None:
        """Upload all arguments, as they were drawn; those that kernels write twice."""
        (self.tensors,) = data.sets(1, written)
        self.drawn = {i: tvm.runtime.tensor(data.inputs[i], self.device) for i in written}

    def call(self, library: str, numbers: Sequence[Sequence[int]] = ()) -> Any:
        """Upload a library and call it, on arguments as they were drawn; return the module."""
        name = Path(library).name
        self.remote.upload(library, name)
        module = self.remote.load_module(name)
        self.remote.remove(name)
        for i, values in self.drawn.items():
            values.copyto(self.tensors[i])
        module["main"](*self.args(numbers))
        self.device.sync()
        return module

    def args(self, numbers: Sequence[Sequence[int]]) -> list[Any]:
        """Return the arguments of a call."""
        return worker.with_numbers(self.tensors, [list(n) for n in numbers])

    def works(self) -> bool:
        """Whether the device still does what it is asked for."""
        try:
            self.device.sync()
            tvm.runtime.tensor(np.zeros(1, np.float32), self.device).numpy()
            return True
        except Exception:
            return False

    def connected(self) -> bool:
        """Whether the server still answers."""
        try:
            self.remote.get_function("runtime.config_threadpool")
            return True
        except Exception:
            return False


class Client:
    """What the requests of this process are answered with."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.session: Session | None = None
        self.data: tuple[str, arrays.HostArrays] | None = None
        self.right: set[tuple[Address, str]] = set()

    def release(self) -> None:
        """Give the server back: a session ends once nothing here refers to it."""
        self.session = None
        if self.data is not None:
            self.data[1].device = None

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have a session that holds a workload's arguments, on a server that computes it right."""
        try:
            session = self._open(request)
        except NoServerError as e:
            return _error("no server", str(e))
        where = {"server": session.address}
        try:
            machine = _machine(session, request["device"], request["threads"])
            if session.key != request["outputs"]:
                self._fill(session, request)
            return {**where, "machine": machine}
        except WrongServer as e:
            self.release()
            return _error("server", str(e)) | where
        except Exception as e:
            self.release()
            return worker.failure("server lost", e) | where

    def _open(self, request: dict[str, Any]) -> Session:
        """Return the session where it lasts long enough, else a new one."""
        refused = {(host, port) for host, port in request["refused"]}
        if self.session is not None:
            if self.session.left_s() >= request["need_s"] and self.session.address not in refused:
                return self.session
            self.release()
        remote, address = self.tracker.open(refused, _SESSION_S, request["patience_s"])
        self.session = Session(remote, address, remote.device(request["device"], 0))
        return self.session

    def _fill(self, session: Session, request: dict[str, Any]) -> None:
        key = request["outputs"]
        data = self._drawn(request, session.device)
        session.put(data, request["written"])
        if (session.address, key) not in self.right:
            session.call(request["plain"])
            wrong = data.mismatch(session.tensors)
            if wrong is not None:
                raise WrongServer(f"it computes the unscheduled kernel wrong: {wrong}")
            self.right.add((session.address, key))
        session.key = key

    def _drawn(self, request: dict[str, Any], device: Any) -> arrays.HostArrays:
        """Return a workload's arguments and expected outputs, here."""
        key = request["outputs"]
        if self.data is None or self.data[0] != key:
            data = arrays.HostArrays(request["args"], request["seed"], device)
            with np.load(key) as saved:
                data.expect({int(k): saved[k] for k in saved.files})
            self.data = (key, data)
        self.data[1].device = device
        return self.data[1]

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check one candidate against the reference's outputs, then time it."""
        session = self.session
        if session is None or session.key != request["outputs"]:
            return {"released": True}
        where = {"server": session.address}
        try:
            module, wrong = self._checked(session, request)
            if wrong is not None:
                return _error("wrong result", wrong)
            if not request["time_s"]:
                return {"us": []}
            return {"us": _time(session, module, request)}
        except WrongServer as e:
            self.release()
            return _error("server", str(e)) | where
        except Exception as e:
            if session.works():
                return worker.failure("run", e)
            self.release()
            return worker.failure("run" if session.connected() else "server lost", e) | where

    def _checked(self, session: Session, request: dict[str, Any]) -> tuple[Any, str | None]:
        """Call a candidate once; where its outputs are wrong, see whose fault that is."""
        data = self._drawn(request, session.device)
        module = session.call(request["path"], request["numbers"])
        wrong = data.mismatch(session.tensors)
        if wrong is not None:
            # an earlier candidate may have written where it should not
            session.put(data, request["written"])
            self.right.discard((session.address, request["outputs"]))
            self._fill(session, request)
            session.put(data, request["written"])
            module = session.call(request["path"], request["numbers"])
            wrong = data.mismatch(session.tensors)
        return module, wrong


def _error(cause: str, message: str) -> dict[str, Any]:
    return {"error": {"cause": cause, "message": message}}


def _machine(session: Session, name: str, threads: int) -> dict[str, Any]:
    """Set the threads of kernels and say what computes; raises WrongServer without the device."""
    if not session.device.exist:
        raise WrongServer(f"its machine has no {name} device")
    if name == "cpu":
        session.remote.get_function("runtime.config_threadpool")(1, threads)
        return {"name": None, "units": None, "memory_gib": None}
    if not session.works():  # memory on the device starts CUDA, which the driver's name needs
        raise WrongServer(f"its {name} device gives no memory")
    return {
        "name": str(session.device.device_name),
        "units": int(session.device.multi_processor_count),
        "memory_gib": round(session.device.total_global_memory / 2**30),
    }


def _time(session: Session, module: Any, request: dict[str, Any]) -> list[float]:
    """Sample microseconds a call by the server's clock, as the local worker does by this one's."""
    flushed = _FLUSHED[request["device"]]
    args = session.args(request["numbers"])

    def sample(number: int, repeat: int) -> list[float]:
        evaluator = module.time_evaluator(
            "main", session.device, number, repeat, cache_flush_bytes=flushed
        )
        seconds = [float(s) for s in evaluator(*args).results]
        if len(seconds) != repeat or not all(math.isfinite(s) and s > 0 for s in seconds):
            raise WrongServer(f"its times are {seconds}")
        return seconds

    (once,) = sample(1, 1)
    limit = request["limit_us"]
    if limit is not None and once * 1e6 > 4 * limit:
        return [s * 1e6 for s in sample(1, 3)]
    number, count = worker.samples(min(once, *sample(1, 1)), request["time_s"])
    if flushed:
        number, count = 1, min(number * count, _MOST_FLUSHES)
    return [s * 1e6 for s in sample(number, count)]


def main() -> None:
    """Serve requests until standard input ends."""
    host, port, key = sys.argv[1:4]
    client = Client(Tracker(host, int(port), key))
    operations = {"prepare": client.prepare, "run": client.run, "ping": lambda _: {}}
    worker.serve(operations, (_IDLE_S, client.release))


if __name__ == "__main__":
    main()

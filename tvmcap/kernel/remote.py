"""Runners whose candidates are measured by RPC servers, with what is known of those servers.

What a candidate does to a server and what a server does by itself are told apart: a candidate is
blamed for a crash only while its server stands.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from tvmcap.base.codegen import make_target
from tvmcap.base.config import Config
from tvmcap.kernel import process, tasks
from tvmcap.kernel.candidates import Workload
from tvmcap.kernel.process import Worker
from tvmcap.kernel.runner import Runner
from tvmcap.kernel.tracker import PATIENCE_S, Address, NoServerError, Tracker, reachable

log = logging.getLogger("tvmcap")

_PREPARE_TIMEOUT_S = 300.0
#: How long a process that was killed may take to close its ports.
_SETTLE_S = 0.5
#: A candidate that so many servers were lost with is not tried on another.
_SERVERS_A_CANDIDATE = 2
_NAMES = ("name", "units")


@dataclass(eq=False)
class Servers:
    """The servers under a tracker's key, as all runners of a run see them.

    Attributes
    ----------
    count: how many measure at the same time; ``threads``: what a CPU kernel may use on each.
    patience_s: how long one may take to come back before it counts as gone.
    machine: what they are; see ``RemoteRunner.machine``.
    plain: the library of the unscheduled kernel, by the file of a workload's outputs.
    host: the process that computes references on this machine's CPU.
    """

    tracker: Tracker
    count: int
    threads: int
    patience_s: float
    machine: dict[str, Any] | None = None
    plain: dict[str, str] = field(default_factory=dict)
    refused: dict[Address, str] = field(default_factory=dict)
    lost: list[Address] = field(default_factory=list)
    host: Worker | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _computing: threading.Lock = field(default_factory=threading.Lock)

    def compute(self, func: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Compute a function on this machine's CPU into the file of outputs of its inputs."""
        path = f"{inputs['outputs']}.so"
        target = process.target_json(make_target("llvm"))
        build = {"op": "build_plain", "func": func, "target": target, "path": path}
        compute = {**inputs, "op": "reference", "device": "cpu", "library": path}
        with self._computing:
            assert self.host is not None
            reply = self.host.call(build, _PREPARE_TIMEOUT_S)
            return reply if "error" in reply else self.host.call(compute, _PREPARE_TIMEOUT_S)

    def refuse(self, address: Address, why: str) -> None:
        """Have no more to do with a server."""
        with self._lock:
            if address not in self.refused:
                log.warning("RPC server %s:%d is left out: %s", *address, why)
            self.refused[address] = why

    def stands(self, address: Address) -> bool:
        """Whether a server whose session ended is there itself; note one that went away."""
        time.sleep(_SETTLE_S)
        if reachable(address):
            return True
        with self._lock:
            log.warning("RPC server %s:%d went away; its work goes to another", *address)
            self.lost.append(address)
        return False

    def agree(self, address: Address, machine: dict[str, Any]) -> bool:
        """Whether a server computes on what the first one did; refuse it where it does not."""
        with self._lock:
            first = self.machine = self.machine or machine
        if any(first[k] != machine[k] for k in _NAMES):
            self.refuse(address, f"it has a {machine['name']}, and others a {first['name']}")
            return False
        return True


class RemoteRunner(Runner):
    """Measures on one server at a time; gives it back when idle, takes another when it is gone.

    The reference is computed on this machine's CPU, so that no server is asked to vouch for itself.
    """

    def __init__(
        self, worker: Worker, device: str, time_s: float, timeout_s: float, servers: Servers
    ) -> None:
        super().__init__(worker, device, time_s, timeout_s)
        self.servers = servers

    def stop(self) -> None:
        """End the processes; what is being measured in another thread ends in CancelledError."""
        super().stop()
        if self.servers.host is not None:
            self.servers.host.stop()

    def machine(self) -> dict[str, Any]:
        """Return what measures: name and units of a GPU and its memory_gib; nothing of a CPU."""
        self._server({"device": self.device, "outputs": ""}, self.timeout_s)
        assert self.servers.machine is not None
        return self.servers.machine

    def reference(self, workload: Workload, library: str, outputs: str) -> dict[str, Any]:
        """Compute the unscheduled function here, and find a server that agrees."""
        self.servers.plain[outputs] = library
        inputs = self._inputs(workload, outputs)
        func = tvm.ir.save_json(tasks.bind(workload.task, workload.sizes))
        reply = self.servers.compute(func, inputs)
        if self.stopped:
            raise CancelledError
        if "error" in reply:
            return reply
        wrong: dict[Address, str] = {}
        while True:
            reply = self._asked(inputs, self.timeout_s, [*self.servers.refused, *wrong])
            if "error" not in reply:
                for address, why in wrong.items():
                    self.servers.refuse(address, why)
                return {}
            if "server" in reply:
                if why := self._why(reply):
                    wrong[_address(reply)] = why
            elif not wrong:
                raise self._none_left(reply)
            else:
                said = [f"RPC server {host}:{port}: {why}" for (host, port), why in wrong.items()]
                return {"error": {"cause": "servers", "message": "\n".join(said)}}

    def _inputs(self, workload: Workload, outputs: str) -> dict[str, Any]:
        return {**super()._inputs(workload, outputs), "plain": self.servers.plain[outputs]}

    def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Have a request to run answered; what it needs is prepared along the way."""
        if request["op"] == "prepare":
            return {}
        lost = 0
        while True:
            address = self._server(request, timeout_s)
            reply = super()._call(request, timeout_s)
            if reply.get("released"):
                continue
            if self._answers(reply, address):
                return reply
            lost += reply["error"]["cause"] != "server"
            if lost == _SERVERS_A_CANDIDATE:
                return reply

    def _answers(self, reply: dict[str, Any], address: Address) -> bool:
        """Whether a reply is about the candidate, and not about the server that had it.

        A candidate whose server stands has crashed by itself; it is also to blame once it was the
        last thing that several servers did.
        """
        cause = reply.get("error", {}).get("cause")
        if cause == "server":
            self.servers.refuse(address, reply["error"]["message"])
            return False
        if cause == "server lost":
            reply["error"]["cause"] = "run crash"
        return cause not in ("server lost", "run timeout") or self.servers.stands(address)

    def _server(self, request: dict[str, Any], need_s: float) -> Address:
        """Have a server that is ready for a request; raises NoServerError where there is none."""
        while True:
            reply = self._asked(request, need_s, list(self.servers.refused))
            if "server" not in reply:
                raise self._none_left(reply)
            address = _address(reply)
            if "error" not in reply and self.servers.agree(address, reply["machine"]):
                return address
            if "error" in reply and (why := self._why(reply)):
                self.servers.refuse(address, why)

    def _asked(
        self, request: dict[str, Any], need_s: float, refused: list[Address]
    ) -> dict[str, Any]:
        """Ask the process for a session of at least ``need_s`` seconds, ready for a request."""
        more = {
            "op": "prepare",
            "need_s": need_s,
            "threads": self.servers.threads,
            "patience_s": self.servers.patience_s,
            "refused": refused,
        }
        return super()._call({**request, **more}, _PREPARE_TIMEOUT_S)

    def _none_left(self, reply: dict[str, Any]) -> NoServerError:
        """Say that nothing is left to measure on, and what became of the servers."""
        message = reply["error"]["message"]
        if reply["error"]["cause"] == "prepare timeout":
            message = f"no server under {self.servers.tracker.key!r} was free: {message}"
        left_out, lost = self.servers.refused, self.servers.lost
        said = [f"{host}:{port} was left out: {why}" for (host, port), why in left_out.items()]
        said += [f"{host}:{port} went away" for host, port in lost]
        return NoServerError("\n".join([message, *said]))

    def _why(self, reply: dict[str, Any]) -> str:
        """Say why a server that did not get ready cannot be used; nothing where it went away."""
        error = reply["error"]
        if error["cause"] == "server":
            return str(error["message"])
        if not self.servers.stands(_address(reply)):
            return ""
        return f"it stopped while it ran the unscheduled kernel ({error['message']})"


def _address(reply: dict[str, Any]) -> Address:
    host, port = reply["server"]
    return host, port


def connect(config: Config, target: Any) -> Servers | None:
    """Return the servers that the options name; None where this machine measures.

    Raises TuneError where there is no tracker, or no server under the key.
    """
    if config.rpc is None:
        return None
    tracker = Tracker.of(config)
    found = len(tracker.check())
    count = min(config.workers or found, found)
    if config.workers is not None and config.workers > found:
        log.warning("workers=%d, but %d servers are registered", config.workers, found)
    threads = int(target.attrs.get("num-cores", os.cpu_count() or 1))
    return Servers(tracker, count, threads, PATIENCE_S)


def open_runners(
    servers: Servers, device: str, folder: Path, time_s: float, timeout_s: float
) -> list[Runner]:
    """Return a runner for each server that measures at the same time."""
    host = make_target("llvm")
    servers.host = Worker(process.command("cpu"), process.environment(host), folder)
    tracker = servers.tracker
    session = (tracker.host, str(tracker.port), tracker.key, "--without-torch")
    command = (sys.executable, "-m", "tvmcap.kernel.remote_worker", *session)
    workers = [Worker(command, process.environment(host), folder) for _ in range(servers.count)]
    return [RemoteRunner(w, device, time_s, timeout_s, servers) for w in workers]

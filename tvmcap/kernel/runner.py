"""A process that checks and times candidates on one device."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import tvm

from tvmcap.base.errors import TuneError
from tvmcap.kernel import prim_func, process
from tvmcap.kernel.candidates import Candidate, Measurement, Workload
from tvmcap.kernel.process import Worker

_REFERENCE_TIMEOUT_S = 300.0
_LEAST_S, _SLOWER = 3.0, 10.0
"""After its first batch a run of a workload may take so many times what the slowest right one of
that batch took, and so many seconds at least: a load by others on the machine is no failure."""


class WorkloadError(TuneError):
    """A workload cannot be measured: it has no arguments, or nothing to check against."""


class Runner:
    """Measures one candidate after another.

    A candidate may leave the process in ruins without failing itself. So what ends in a crash, a
    time-out or a broken device where another candidate ran before is run again in a new process.

    Parameters
    ----------
    worker: the process; it sees one device.
    device: the device's name for TVM, such as "cuda".
    time_s: seconds of timing a candidate gets; 0 checks without timing.
    timeout_s: when a run is given up, unless more is known of its workload.
    """

    def __init__(self, worker: Worker, device: str, time_s: float, timeout_s: float) -> None:
        self.worker, self.device = worker, device
        self.time_s, self.timeout_s = time_s, timeout_s
        self.stopped = False
        self.took_s = 0.0  # the last run
        self._prepared: tuple[int | None, str] | None = None
        self._used: int | None = None  # the process in which a candidate ran last

    def stop(self) -> None:
        """End the process; what is being measured in another thread ends in CancelledError."""
        self.stopped = True
        self.worker.stop()

    def machine(self) -> dict[str, Any] | None:
        """Return what measures, as a fingerprint says it, where that is not this machine."""
        return None

    def reference(self, workload: Workload, library: str, outputs: str) -> dict[str, Any]:
        """Compute the unscheduled function of ``library`` into the file ``outputs``."""
        request = {**self._inputs(workload, outputs), "library": library, "op": "reference"}
        return self._unspoilt(lambda: self._call(request, _REFERENCE_TIMEOUT_S))

    def run(
        self,
        workload: Workload,
        candidate: Candidate,
        library: str,
        outputs: str,
        limit_us: float | None,
        timeout_s: float | None = None,
    ) -> Measurement:
        """Check a candidate's library against the file of outputs, then time it.

        Raises WorkloadError where not even the arguments can be made.
        """
        inputs = self._inputs(workload, outputs)
        numbers = [] if candidate.bound else _numbers(workload)
        more = {"numbers": numbers, "path": library, "time_s": self.time_s}
        request = {**inputs, **more, "limit_us": limit_us, "op": "run"}

        def attempt() -> dict[str, Any]:
            self._prepare(inputs)
            start = time.monotonic()
            reply = self._call(request, timeout_s or self.timeout_s)
            self.took_s = time.monotonic() - start
            if reply.get("broken"):
                self.worker.stop()
            return reply

        reply = self._unspoilt(attempt)
        self._used = self.worker.pid
        return failed(reply) if "error" in reply else _measurement(reply)

    def _unspoilt(self, attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the reply, that of a new process where an earlier candidate may have failed it."""
        shared = self._used is not None and self._used == self.worker.pid
        reply = attempt()
        return attempt() if shared and "error" in reply and self.worker.pid is None else reply

    def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        reply = {} if self.stopped else self.worker.call(request, timeout_s)
        if self.stopped:
            self.worker.stop()
            raise CancelledError
        return reply

    def _inputs(self, workload: Workload, outputs: str) -> dict[str, Any]:
        return {
            "args": [a for a in workload.args if "shape" in a],
            "seed": workload.seed,
            "written": prim_func.written(workload.task.func),
            "device": self.device,
            "outputs": outputs,
        }

    def _prepare(self, inputs: dict[str, Any]) -> None:
        """Have the process make a workload's arguments where it has not."""
        if self._prepared != (self.worker.pid, inputs["outputs"]):
            request = {**inputs, "op": "prepare"}
            reply = self._unspoilt(lambda: self._call(request, _REFERENCE_TIMEOUT_S))
            if "error" in reply:
                error = reply["error"]
                raise WorkloadError(
                    f"no arguments to measure with: {error['cause']}\n{error['message']}"
                )
            self._prepared = (self.worker.pid, inputs["outputs"])


def open_runners(
    target: Any, device: str, folder: Path, time_s: float, timeout_s: float
) -> list[Runner]:
    """Return one runner a GPU of this machine, or one for the CPU; none where there is no device.

    GPUs that CUDA_VISIBLE_DEVICES hides are left alone.
    """
    count = 0
    while tvm.device(device, count).exist and (count == 0 or device != "cpu"):
        count += 1
    environment = process.environment(target)
    names = [n.strip() for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if n.strip()]
    runners = []
    for i in range(count):
        alone = {} if count == 1 else {"CUDA_VISIBLE_DEVICES": names[i] if names else str(i)}
        worker = Worker(process.command(device), {**environment, **alone}, folder)
        runners.append(Runner(worker, device, time_s, timeout_s))
    return runners


def time_limit(first_s: Sequence[float]) -> float:
    """Return the seconds that a run may take, from those of the first batch's right ones."""
    return max(_LEAST_S, _SLOWER * max(first_s))


def _measurement(reply: Mapping[str, Any]) -> Measurement:
    us = reply.get("us")
    if not isinstance(us, list) or not all(isinstance(t, float) and 0 < t < math.inf for t in us):
        return Measurement(cause="timing", message=f"no times but {us!r}")
    if not us:
        return Measurement()
    us = sorted(us)
    rank = (len(us) - 1) / 10
    return Measurement(statistics.median(us), us[round(rank)], us[round(9 * rank)], len(us))


def failed(reply: Mapping[str, Any]) -> Measurement:
    """Turn a worker's error into a measurement without a time."""
    return Measurement(cause=reply["error"]["cause"], message=reply["error"]["message"])


def _numbers(workload: Workload) -> Sequence[tuple[int, int]]:
    return [(i, a["value"]) for i, a in enumerate(workload.args) if "value" in a]

"""A process that checks and times candidates on one device."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import tvm

from tvmcap.kernel import process, tasks
from tvmcap.kernel.candidates import Candidate, Measurement, Workload
from tvmcap.kernel.process import Worker

_REFERENCE_TIMEOUT_S = 300.0


class Runner:
    """Measures one candidate after another.

    Parameters
    ----------
    worker: the process; it sees one device.
    device: the device's name for TVM, such as "cuda".
    time_s: seconds of timing a candidate gets; 0 checks without timing.
    timeout_s: when a run is given up.
    """

    def __init__(self, worker: Worker, device: str, time_s: float, timeout_s: float) -> None:
        self.worker, self.device = worker, device
        self.time_s, self.timeout_s = time_s, timeout_s
        self.stopped = False
        self._prepared: tuple[int | None, str] | None = None

    def stop(self) -> None:
        """End the process; what is being measured in another thread ends in CancelledError."""
        self.stopped = True
        self.worker.stop()

    def reference(self, workload: Workload, library: str, outputs: str) -> dict[str, Any]:
        """Compute the unscheduled function of ``library`` into the file ``outputs``."""
        request = {**self._inputs(workload, outputs), "library": library}
        return self._call({**request, "op": "reference"}, _REFERENCE_TIMEOUT_S)

    def run(
        self,
        workload: Workload,
        candidate: Candidate,
        library: str,
        outputs: str,
        limit_us: float | None,
    ) -> Measurement:
        """Check a candidate's library against the file of outputs, then time it."""
        inputs = self._inputs(workload, outputs)
        reply = self._prepare(inputs)
        if reply is None:
            numbers = [] if candidate.bound else _numbers(workload)
            more = {"numbers": numbers, "path": library, "time_s": self.time_s}
            request = {**inputs, **more, "limit_us": limit_us, "op": "run"}
            reply = self._call(request, self.timeout_s)
            if reply.get("broken"):
                self.worker.stop()
        if "error" in reply:
            return failed(reply)
        us = sorted(reply["us"])
        if not us:
            return Measurement()
        rank = (len(us) - 1) / 10
        return Measurement(statistics.median(us), us[round(rank)], us[round(9 * rank)], len(us))

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
            "written": tasks.written(workload.task.func),
            "device": self.device,
            "outputs": outputs,
        }

    def _prepare(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """Have the process make a workload's arguments where it has not; return a failure."""
        if self._prepared != (self.worker.pid, inputs["outputs"]):
            reply = self._call({**inputs, "op": "prepare"}, _REFERENCE_TIMEOUT_S)
            if "error" in reply:
                return reply
            self._prepared = (self.worker.pid, inputs["outputs"])
        return None


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


def failed(reply: Mapping[str, Any]) -> Measurement:
    """Turn a worker's error into a measurement without a time."""
    return Measurement(cause=reply["error"]["cause"], message=reply["error"]["message"])


def _numbers(workload: Workload) -> Sequence[tuple[int, int]]:
    return [(i, a["value"]) for i, a in enumerate(workload.args) if "value" in a]

"""Measure candidates: build in parallel processes, then check and time in another, one by one.

Nothing that a candidate does, be it a crash, a hang or a wrong result, ends the run: it becomes a
    failure with a cause. Nothing compiles while anything is timed.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from tvmcap.base.errors import TuneError
from tvmcap.kernel import process, tasks
from tvmcap.kernel.process import Worker
from tvmcap.kernel.tasks import Task

log = logging.getLogger("tvmcap")

_BUILDS_A_WORKER = 100
_REFERENCE_TIMEOUT_S = 300.0


@dataclass(frozen=True, eq=False)
class Candidate:
    """One kernel to try: ``func``, or what a template makes of it with ``knobs`` (JSON text).

    Equal ``name`` means equal code: its library is built once in a run. ``bound`` says that the
    symbolic extents are numbers already.
    """

    name: str
    func: Any
    template: Any = None
    knobs: str | None = None
    bound: bool = False


@dataclass(frozen=True)
class Measurement:
    """Microseconds a call (median, percentiles, number of timings), or why there are none."""

    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    samples: int = 0
    cause: str | None = None
    message: str | None = None

    @property
    def error(self) -> dict[str, str] | None:
        """Cause and first line of a failure, as records hold it."""
        if self.cause is None:
            return None
        return {"cause": self.cause, "message": _first_line(self.message or "")}


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:500]


@dataclass(frozen=True, eq=False)
class Workload:
    """A task at given sizes: what its kernels are called with, and what they should return."""

    task: Task
    sizes: dict[str, int]
    seed: int

    @property
    def args(self) -> list[dict[str, Any]]:
        """Shapes and dtypes of the arguments at these sizes."""
        return tasks.argument_specs(self.task.func, self.task.vars, self.sizes)


class Measurer:
    """Builds, checks and times candidates for one target; owns its processes and files.

    Parameters
    ----------
    target: what to compile for; this machine must have it.
    workers: processes that build at the same time; by default one a core.
    time_s: seconds of timing a candidate gets; 0 checks without timing.
    build_timeout_s, run_timeout_s: when a build or a run is given up.
    """

    def __init__(
        self,
        target: Any,
        *,
        workers: int | None = None,
        time_s: float = 0.15,
        build_timeout_s: float = 60.0,
        run_timeout_s: float = 30.0,
    ) -> None:
        self.target = target
        self.time_s, self.build_timeout_s, self.run_timeout_s = (
            time_s,
            build_timeout_s,
            run_timeout_s,
        )
        self.device = device_of(target)
        if not tvm.device(self.device, 0).exist:
            raise TuneError(
                f"no {self.device} device here to measure on; tune on a machine that has one"
            )
        self._target_json = {str(k): _plain(v) for k, v in target.export().items()}
        self._folder = Path(tempfile.mkdtemp(prefix="tvmcap-tune-"))
        self._built: dict[str, dict[str, Any]] = {}
        self._references: dict[Any, str] = {}
        command, environment = process.command(self.device), process.environment(target)
        count = workers or os.cpu_count() or 1
        self._builders = [Worker(command, environment, self._folder) for _ in range(count)]
        self._runner = Worker(command, environment, self._folder)

    def __enter__(self) -> Measurer:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes and delete the files."""
        self.close()

    def close(self) -> None:
        """End the processes and delete the files."""
        for worker in [*self._builders, self._runner]:
            worker.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], limit_us: float | None = None
    ) -> Iterator[Measurement]:
        """Build a batch, then yield one measurement a candidate, in order, as soon as it is made.

        Candidates far slower than ``limit_us`` get fewer timings.
        """
        outputs = self.reference(workload)
        for candidate, result in zip(candidates, self._build(candidates), strict=True):
            if "error" in result:
                yield _failed(result)
            else:
                yield self._run(workload, candidate, result["path"], outputs, limit_us)

    def _build(self, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
        new = {c.name: c for c in candidates if c.name not in self._built}
        queue = list(new.values())

        def serve(worker: Worker) -> None:
            while queue:
                try:
                    candidate = queue.pop()
                except IndexError:
                    return
                self._built[candidate.name] = self._build_one(worker, candidate)
            if worker.served > _BUILDS_A_WORKER:
                worker.stop()

        with ThreadPoolExecutor(len(self._builders)) as pool:
            try:
                list(pool.map(serve, self._builders))
            except BaseException:
                queue.clear()
                for worker in self._builders:
                    worker.stop()
                raise
        return [self._built[c.name] for c in candidates]

    def _build_one(self, worker: Worker, candidate: Candidate) -> dict[str, Any]:
        path = str(self._folder / f"kernel{len(self._built)}-{time.monotonic_ns()}.so")
        request = {
            "op": "build",
            "target": self._target_json,
            "func": tvm.ir.save_json(candidate.func),
            "template": None if candidate.template is None else template_ref(candidate.template),
            "knobs": candidate.knobs,
            "path": path,
        }
        return {**worker.call(request, self.build_timeout_s), "path": path}

    def reference(self, workload: Workload) -> str:
        """Compute the unscheduled function on the workload's inputs, once; return the file.

        Raises TuneError where that fails.
        """
        key = (id(workload.task), tuple(workload.sizes.items()), workload.seed)
        if key not in self._references:
            path = str(self._folder / f"reference{len(self._references)}.npz")
            request = {
                **self._inputs(workload),
                "op": "reference",
                "device": self.device,
                "target": self._target_json,
                "func": tvm.ir.save_json(tasks.bind(workload.task, workload.sizes)),
                "written": tasks.written(workload.task.func),
                "outputs": path,
            }
            reply = self._runner.call(request, _REFERENCE_TIMEOUT_S)
            if "error" in reply:
                raise TuneError(
                    f"the unscheduled kernel {workload.task.name} at {workload.sizes} cannot be "
                    f"computed, so nothing can be checked against it: {reply['error']['cause']}\n"
                    f"{reply['error']['message']}"
                )
            self._references[key] = path
        return self._references[key]

    def _inputs(self, workload: Workload) -> dict[str, Any]:
        return {"args": [a for a in workload.args if "shape" in a], "seed": workload.seed}

    def _run(
        self,
        workload: Workload,
        candidate: Candidate,
        path: str,
        outputs: str,
        limit_us: float | None,
    ) -> Measurement:
        numbers = (
            []
            if candidate.bound
            else [(i, a["value"]) for i, a in enumerate(workload.args) if "value" in a]
        )
        request = {
            **self._inputs(workload),
            "numbers": numbers,
            "op": "run",
            "device": self.device,
            "path": path,
            "outputs": outputs,
            "time_s": self.time_s,
            "limit_us": limit_us,
        }
        reply = self._runner.call(request, self.run_timeout_s)
        if "error" in reply:
            return _failed(reply)
        us = sorted(reply["us"])
        if not us:
            return Measurement()
        rank = (len(us) - 1) / 10
        return Measurement(statistics.median(us), us[round(rank)], us[round(9 * rank)], len(us))


def _failed(reply: Mapping[str, Any]) -> Measurement:
    return Measurement(cause=reply["error"]["cause"], message=reply["error"]["message"])


def template_ref(template: Any) -> str:
    """Name of a template that another process can import: ``"module:attribute"``."""
    parts = (template.lower, template.match, template.space, template.default, template.features)
    names = [part.__module__ for part in parts]
    names += [name for name in sorted(sys.modules) if name.startswith("tvmcap.schedules")]
    for module in names:
        for name, value in vars(sys.modules[module]).items():
            if value is template:
                return f"{module}:{name}"
    raise TuneError(f"template {template.name!r} must be a variable of the module of its functions")


def device_of(target: Any) -> str:
    """Name of the device that a target's kernels run on."""
    kind = str(target.kind.name)
    return "cpu" if kind == "llvm" else kind


def _plain(value: Any) -> Any:
    """Turn TVM containers and numbers into JSON data."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if hasattr(value, "value"):
        return value.value
    return [_plain(v) for v in value]

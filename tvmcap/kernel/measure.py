"""Measure candidates: build in parallel processes, then check and time, one at a time a device.

Nothing that a candidate does, be it a crash, a hang or a wrong result, ends the run: it becomes a
    failure with a cause. Nothing compiles while anything is timed.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm

from tvmcap.base.errors import TuneError
from tvmcap.kernel import process, remote, tasks
from tvmcap.kernel.candidates import Candidate as Candidate
from tvmcap.kernel.candidates import Measurement as Measurement
from tvmcap.kernel.candidates import Workload as Workload
from tvmcap.kernel.prim_func import structure
from tvmcap.kernel.process import Worker
from tvmcap.kernel.records import canonical
from tvmcap.kernel.runner import Runner, WorkloadError, failed, open_runners, time_limit

log = logging.getLogger("tvmcap")

_BUILDS_A_WORKER = 100
_TIME_S, _RUN_TIMEOUT_S = {"cpu": 0.15, "cuda": 0.03}, {"cpu": 30.0, "cuda": 10.0}


class Measurer:
    """Builds, checks and times candidates for one target; owns its processes and files.

    Parameters
    ----------
    target: what to compile for; this machine must have it, or the servers.
    workers: processes that build at the same time; by default one a core.
    time_s: seconds of timing a candidate gets; by default 0.15 on a CPU and 0.03 on a GPU, whose
        times spread little; 0 checks without timing.
    build_timeout_s, run_timeout_s: when a build is given up, and a run of the first batch; later
        ones as ``runner.time_limit`` says.
    servers: what measures in the place of this machine.

    Raises
    ------
    TuneError: there is no such device, or no room for files.
    """

    def __init__(
        self,
        target: Any,
        *,
        workers: int | None = None,
        time_s: float | None = None,
        build_timeout_s: float = 60.0,
        run_timeout_s: float | None = None,
        servers: remote.Servers | None = None,
    ) -> None:
        self.target = target
        self.device = device_of(target)
        self.time_s = _TIME_S[self.device] if time_s is None else time_s
        self.build_timeout_s = build_timeout_s
        self.run_timeout_s = _RUN_TIMEOUT_S[self.device] if run_timeout_s is None else run_timeout_s
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="tvmcap-tune-"))
        except OSError as e:
            raise TuneError(f"no folder for what tuning compiles: {e}; set TMPDIR to one") from e
        how = (self.device, self._folder, self.time_s, self.run_timeout_s)
        self.runners: Sequence[Runner] = (
            open_runners(target, *how) if servers is None else remote.open_runners(servers, *how)
        )
        if not self.runners:
            shutil.rmtree(self._folder)
            raise TuneError(
                f"no {self.device} device here to measure on; tune on a machine that has one"
            )
        self._target_json = process.target_json(target)
        self._built: dict[str, dict[str, Any]] = {}
        self._references: dict[str, str] = {}
        self._limits_s: dict[str, float] = {}
        self._numbers = itertools.count()  # of files: threads share it
        environment = process.environment(target)
        building = process.command(self.device, builds=True)
        count = workers or os.cpu_count() or 1
        self._builders = [Worker(building, environment, self._folder) for _ in range(count)]
        # a worker dies with the thread that started it, so the threads live as long as the workers
        self._threads = ThreadPoolExecutor(count)
        self._devices = ThreadPoolExecutor(len(self.runners))

    def __enter__(self) -> Measurer:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes and delete the files."""
        self.close()

    def close(self) -> None:
        """End the processes and delete the files."""
        for worker in self._builders:
            worker.stop()
        for runner in self.runners:
            runner.stop()
        self._threads.shutdown()
        self._devices.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def workers(self) -> int:
        """How many candidates build at the same time."""
        return len(self._builders)

    def spread(self, work: Callable[[Runner, Any], None], items: Sequence[Any]) -> None:
        """Do the work for all items, on all devices at once, one item at a time on each."""
        if len(self.runners) == 1:
            for item in items:
                work(self.runners[0], item)
            return
        process.share_out(self._devices, self.runners, items, work)

    def measure(
        self,
        workload: Workload,
        candidates: Sequence[Candidate],
        limit_us: float | None = None,
        runner: Runner | None = None,
    ) -> Iterator[Measurement]:
        """Build a batch, then yield one measurement a candidate, in order, as soon as it is made.

        Candidates far slower than ``limit_us`` get fewer timings. ``runner`` is the device's, by
        default the first. The first batch of a workload with a right candidate decides how long
        runs of later ones may take.
        """
        runner = runner or self.runners[0]
        outputs = self.reference(workload, runner)
        limit_s, taken = self._limits_s.get(outputs), list[float]()
        for candidate, result in zip(candidates, self.build(candidates), strict=True):
            if "error" in result:
                yield failed(result)
                continue
            found = runner.run(workload, candidate, result["path"], outputs, limit_us, limit_s)
            if found.cause is None:
                taken.append(runner.took_s)
            yield found
        if taken:
            self._limits_s.setdefault(outputs, time_limit(taken))

    def build(
        self, candidates: Sequence[Candidate], workloads: Sequence[Workload] = ()
    ) -> list[dict[str, Any]]:
        """Build in parallel what was not built before; return the workers' replies in order.

        Candidates of several workloads, and what gives the workloads' references, may be built at
        once, ahead of ``measure``. Raises TuneError where this machine cannot build: a compiler,
        memory or room on disk is missing.
        """
        requests = {self._key(w): self._plain_request(w) for w in workloads if self._is_new(w)}
        requests |= {c.name: _request(c) for c in candidates if c.name not in self._built}

        def work(worker: Worker, item: tuple[str, dict[str, Any]]) -> None:
            name, request = item
            reply = self._build_one(worker, request)
            if process.of_machine(reply, self._folder):
                free = shutil.disk_usage(self._folder).free >> 20
                raise TuneError(
                    f"this machine cannot compile candidates (the disk of {self._folder} has "
                    f"{free} MiB left; TMPDIR names another): {reply['error']['message']}"
                )
            self._built[name] = reply

        process.share_out(self._threads, self._builders, requests.items(), work)
        for worker in self._builders:
            if worker.served > _BUILDS_A_WORKER:
                worker.stop()
        return [self._built[c.name] for c in candidates]

    def _build_one(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        path = str(self._folder / f"kernel{next(self._numbers)}.so")
        request = {**request, "target": self._target_json, "path": path}
        return {**worker.call(request, self.build_timeout_s), "path": path}

    def _key(self, workload: Workload) -> str:
        """Return what identifies a reference; tasks come and go, and so do their addresses."""
        func, sizes = structure(workload.task.func), list(workload.sizes.values())
        return f"reference {func} {sizes} {canonical(workload.args)} {workload.seed}"

    def _is_new(self, workload: Workload) -> bool:
        return self._key(workload) not in self._built

    def _plain_request(self, workload: Workload) -> dict[str, Any]:
        bound = tasks.bind(workload.task, workload.sizes)
        return {"op": "build_plain", "func": tvm.ir.save_json(bound)}

    def reference(self, workload: Workload, runner: Runner | None = None) -> str:
        """Compute the unscheduled function on the workload's inputs, once; return the file.

        Raises WorkloadError where that fails.
        """
        key = self._key(workload)
        if key not in self._references:
            self.build([], [workload])
            path = str(self._folder / f"reference{next(self._numbers)}.npz")
            reply = built = self._built[key]
            if "error" not in built:
                runner = runner or self.runners[0]
                reply = runner.reference(workload, built["path"], path)
            if "error" in reply:
                raise WorkloadError(
                    f"the unscheduled kernel {workload.task.name} at {workload.sizes} cannot be "
                    f"computed, so nothing can be checked against it: {reply['error']['cause']}\n"
                    f"{reply['error']['message']}"
                )
            self._references[key] = path
        return self._references[key]


def _request(candidate: Candidate) -> dict[str, Any]:
    return {
        "op": "build",
        "func": tvm.ir.save_json(candidate.func),
        "template": None if candidate.template is None else template_ref(candidate.template),
        "knobs": candidate.knobs,
    }


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

"""Measure candidates: build them in parallel processes, then check and time them one by one in another.

Nothing that a candidate does, be it a crash, a hang or a wrong result, ends the run: it becomes a failure with a cause.
Nothing compiles while anything is timed.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from tvmcap.base.errors import TuneError
from tvmcap.kernel import tasks
from tvmcap.kernel.tasks import Task

log = logging.getLogger("tvmcap")

_BUILDS_A_WORKER = 100
_REFERENCE_TIMEOUT_S = 300.0


@dataclass(frozen=True, eq=False)
class Candidate:
    """One kernel to try: ``func`` itself, or (with ``template``) the kernel that ``knobs`` (JSON text) make of it.

    Equal ``name`` means equal code: its library is built once in a run. ``bound`` says that the symbolic extents are
    numbers already.
    """

    name: str
    func: Any
    template: Any = None
    knobs: str | None = None
    bound: bool = False


@dataclass(frozen=True)
class Measurement:
    """Microseconds a call (median, 10th and 90th percentile, number of timings), or why there are none."""

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


@dataclass(eq=False)
class _Worker:
    """A child process and what it said. ``call`` restarts it where it died or had to be killed."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    served: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _errors: Path = field(default=Path())

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process where it does not run."""
        if self._process is None or self._process.poll() is not None:
            handle, name = tempfile.mkstemp(suffix=".stderr", dir=self.folder)
            self._errors = Path(name)
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                env=self.environment,
                start_new_session=True,
            )
            os.close(handle)
            self.served = 0
        return self._process

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
            return {"error": {"cause": f"{what} timeout", "message": f"killed after {timeout_s:g} s"}}
        if not line.endswith(b"\n"):
            return {"error": {"cause": f"{what} crash", "message": self._last_words(process)}}
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        self.stop()
        code = process.returncode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        lines = [line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended with {name}\n" + "\n".join(lines[-40:])

    def stop(self) -> None:
        """Kill the process and whatever it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self._process = None


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


class Measurer:
    """Builds, checks and times candidates for one target; a context manager that owns its processes and files.

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
        self.time_s, self.build_timeout_s, self.run_timeout_s = time_s, build_timeout_s, run_timeout_s
        self.device = device_of(target)
        if not tvm.device(self.device, 0).exist:
            raise TuneError(f"no {self.device} device here to measure on; tune on a machine that has one")
        self._target_json = {str(k): _plain(v) for k, v in target.export().items()}
        self._folder = Path(tempfile.mkdtemp(prefix="tvmcap-tune-"))
        self._built: dict[str, dict[str, Any]] = {}
        self._references: dict[Any, str] = {}
        command, environment = _command(self.device), _environment(target)
        count = workers or os.cpu_count() or 1
        self._builders = [_Worker(command, environment, self._folder) for _ in range(count)]
        self._runner = _Worker(command, environment, self._folder)

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
    ) -> list[Measurement]:
        """Measure a batch; one result a candidate, in order. Far slower ones than ``limit_us`` get fewer timings."""
        outputs = self._reference(workload)
        built = self._build(candidates)
        return [
            _failed(result) if "error" in result else self._run(workload, candidate, result["path"], outputs, limit_us)
            for candidate, result in zip(candidates, built, strict=True)
        ]

    def _build(self, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
        new = {c.name: c for c in candidates if c.name not in self._built}
        queue = list(new.values())

        def serve(worker: _Worker) -> None:
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

    def _build_one(self, worker: _Worker, candidate: Candidate) -> dict[str, Any]:
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

    def _reference(self, workload: Workload) -> str:
        """Path of the outputs of the unscheduled function on the workload's inputs."""
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
                    f"the unscheduled kernel {workload.task.name} at {workload.sizes} cannot be computed, so nothing can "
                    f"be checked against it: {reply['error']['cause']}\n{reply['error']['message']}"
                )
            self._references[key] = path
        return self._references[key]

    def _inputs(self, workload: Workload) -> dict[str, Any]:
        return {"args": [a for a in workload.args if "shape" in a], "seed": workload.seed}

    def _run(
        self, workload: Workload, candidate: Candidate, path: str, outputs: str, limit_us: float | None
    ) -> Measurement:
        numbers = [] if candidate.bound else [(i, a["value"]) for i, a in enumerate(workload.args) if "value" in a]
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
    module = sys.modules[template.lower.__module__]
    for name, value in vars(module).items():
        if value is template:
            return f"{module.__name__}:{name}"
    raise TuneError(f"template {template.name!r} must be a variable of {module.__name__}, beside its lower()")


def device_of(target: Any) -> str:
    """Name of the device that a target's kernels run on."""
    kind = str(target.kind.name)
    return "cpu" if kind == "llvm" else kind


def _command(device: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tvmcap.kernel.worker", *(["--without-torch"] if device == "cpu" else []))


def _environment(target: Any) -> dict[str, str]:
    threads = str(int(target.attrs.get("num-cores", os.cpu_count() or 1)))
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    return {**os.environ, "PYTHONPATH": path, "TVM_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}


def _plain(value: Any) -> Any:
    """Turn TVM containers and numbers into JSON data."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if hasattr(value, "value"):
        return value.value
    return [_plain(v) for v in value]

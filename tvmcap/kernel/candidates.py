"""What is measured: a candidate, the workload it runs on, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvmcap.kernel import tasks
from tvmcap.kernel.tasks import Task


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
        lines = [line.strip() for line in (self.message or "").splitlines() if line.strip()]
        return {"cause": self.cause, "message": (lines or [""])[0][:500]}


@dataclass(frozen=True, eq=False)
class Workload:
    """A task at given sizes: what its kernels are called with, and what they should return."""

    task: Task
    sizes: dict[str, int]
    seed: int

    @property
    def args(self) -> list[dict[str, Any]]:
        """Shapes and dtypes of the arguments at these sizes, and their precision if less."""
        specs = tasks.argument_specs(self.task.func, self.task.vars, self.sizes)
        if getattr(self.task.problem, "tf32", False):
            for spec in specs:
                spec.update({"precision": "tf32"} if spec["dtype"] == "float32" else {})
        return specs

"""What a tuning run tells while it runs and what it returns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


class Progress(Protocol):
    """What is told while tuning runs; ``tvmcap.view.progress`` shows it."""

    def start(self, trials: int) -> None:
        """Tell that tuning begins, with at most so many trials."""

    def update(
        self, task: str, best_us: float | None, trials: int, failures: int, left_s: float | None
    ) -> None:
        """Tell that a candidate of ``task`` was measured; counts are of the whole run."""

    def finish(self) -> None:
        """Tell that tuning ended, however it did."""


@dataclass(frozen=True)
class TaskResult:
    """What tuning did for one task at one size.

    ``before_us`` is the best kernel known before the run (else the default's), ``after_us`` the
    best one after it.
    """

    name: str
    before_us: float | None
    after_us: float | None
    trials: int
    candidate: str | None


@dataclass(frozen=True)
class TuneRun:
    """What a tuning run did.

    Attributes
    ----------
    results: one a task and size.
    trials: candidates measured; ``failures`` counts those that failed, by cause.
    seconds: duration; ``log``: the file of records.
    overhead_s: seconds of it outside compiling and measuring: the search opened, chose, learnt and
        wrote records.
    curve: (trials so far, task, its best microseconds), one a batch.
    stopped: ``"trials"``, ``"budget"``, ``"exhausted"`` (nothing left to try), ``"converged"``
        (what is left should gain less than the noise of a measurement), ``"interrupted"`` or
        ``"no server"`` (the last RPC server went away).
    """

    results: tuple[TaskResult, ...]
    trials: int
    failures: Mapping[str, int]
    seconds: float
    log: str
    curve: tuple[tuple[int, str, float], ...]
    stopped: str
    overhead_s: float = 0.0

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped the run."""
        return self.stopped == "interrupted"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``tasks`` holds the results."""
        data = asdict(self)
        return {"tasks": data.pop("results"), **data}

    def __str__(self) -> str:
        """Return a table for people."""
        width = max([len(r.name) for r in self.results], default=4)
        lines = [f"{'task':{width}}  {'before':>10}  {'after':>10}  {'gain':>6}  trials"]
        for r in self.results:
            gain = f"{r.before_us / r.after_us:.2f}x" if r.before_us and r.after_us else "-"
            times = f"{_us(r.before_us):>10}  {_us(r.after_us):>10}"
            lines.append(f"{r.name:{width}}  {times}  {gain:>6}  {r.trials:6}")
        failed = ", ".join(f"{n} {cause}" for cause, n in sorted(self.failures.items())) or "none"
        spent = (
            f"{self.trials} trials in {self.seconds:.0f} s, {self.overhead_s:.1f} s of it neither "
            f"compiling nor measuring (stopped: {self.stopped})"
        )
        lines.append(f"{spent}; failures: {failed}")
        lines.append(f"records: {self.log}")
        return "\n".join(lines)


def by_numbers(name: str) -> list[tuple[int, str]]:
    """Order names by the numbers in them: ``B=16`` stands before ``B=128``."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} us"


def all_failed(name: str, results: Sequence[Any]) -> str:
    """Say that every measurement of a first batch failed, and of what."""
    causes = Counter(r.cause for r in results)
    counted = ", ".join(f"{n} {cause}" for cause, n in causes.most_common())
    first = next(r for r in results if r.cause == causes.most_common(1)[0][0])
    return (
        f"all {len(results)} candidates of the first batch failed ({counted}), so tuning {name} "
        f"cannot go on; mend the cause and tune again. The first failure:\n{first.message}"
    )

"""Timeline: the kernels of profiled calls, as a table and as a trace for Chrome or Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.base.score import KernelScore, Latency
from tvmcap.base.timing import summarize


@dataclass(frozen=True)
class Span:
    """One run of a kernel: start and length in microseconds, and the number of its call."""

    name: str
    start_us: float
    us: float
    call: int


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a call.

    Attributes
    ----------
    nbytes: read and written by it, each tensor counted once.
    us: its time.
    percent_of_roofline: the time that the device's measured bandwidth of copies takes for
        ``nbytes``, over its time. Arithmetic is not counted, so that a kernel bound by it stays
        low; data that stays in a cache can pass 100.
    """

    name: str
    scheduled_by: str
    nbytes: int
    us: Latency
    percent_of_roofline: float


@dataclass(frozen=True)
class Profile:
    """What ``Compiled.profile`` measured; ``str`` gives a table.

    Attributes
    ----------
    device: ``"cpu:0"`` or ``"cuda:0"``.
    sizes: of the symbolic dimensions.
    bandwidth_gb_s: of a copy on this device, bytes read and written, just before.
    kernels: in the order of a call.
    calls_us: of whole calls, on the host; on a GPU until its work is done.
    spans: every kernel that ran.
    """

    device: str
    sizes: dict[str, int]
    bandwidth_gb_s: float
    kernels: tuple[KernelTime, ...]
    calls_us: Latency
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        """Return a table with one line a kernel."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        width = max([6, *(len(k.name) for k in self.kernels)])
        lines = [
            f"{self.device}{', ' + sizes if sizes else ''}; copies at {self.bandwidth_gb_s:.1f} "
            f"GB/s; a call takes {self.calls_us.median:.1f} us",
            f"{'kernel':{width}}  {'us':>9}  {'MB':>9}  {'roofline':>8}  scheduled by",
        ]
        lines += [
            f"{k.name:{width}}  {k.us.median:9.2f}  {k.nbytes / 1e6:9.3f}  "
            f"{k.percent_of_roofline:7.1f}%  {k.scheduled_by}"
            for k in self.kernels
        ]
        return "\n".join(lines)

    def write_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

        Raises LibraryError for a path that cannot be written.
        """
        by_name = {k.name: k for k in self.kernels}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": self.device}}
        ]
        for span in self.spans:
            kernel = by_name.get(span.name)
            args = {"call": span.call, **({} if kernel is None else {"bytes": kernel.nbytes})}
            event = {"name": span.name, "ph": "X", "ts": span.start_us, "dur": span.us}
            events.append({**event, "pid": 0, "tid": 0, "cat": "kernel", "args": args})
        target = Path(path)
        try:
            target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
        except OSError as e:
            raise LibraryError(f"cannot write {target}: {e.strerror or e}") from e
        return target


def summary(
    spans: Sequence[Span], kernels: Sequence[KernelScore], calls: int, gb_s: float
) -> tuple[KernelTime, ...]:
    """Group the spans of ``calls`` equal calls by their place in a call.

    Raises LibraryError where the calls did not launch equally many kernels.
    """
    if not spans:
        raise LibraryError(
            "no kernel ran, as results without elements need none: profile with larger sizes"
        )
    count, rest = divmod(len(spans), calls)
    if rest:
        raise LibraryError(
            f"{len(spans)} kernels were seen in {calls} calls, which is not a whole number a call; "
            "profile again on an idle device"
        )
    ordered = sorted(spans, key=lambda span: span.start_us)
    rows = []
    for place in range(count):
        of = ordered[place::count]
        known = kernels[place] if len(kernels) == count else None
        nbytes = known.read_bytes + known.write_bytes if known else 0
        us = summarize([span.us for span in of])
        percent = 100 * nbytes / (gb_s * 1e3) / us.median if us.median else 0.0
        by = known.scheduled_by if known else ""
        rows.append(KernelTime(of[0].name, by, nbytes, us, percent))
    return tuple(rows)

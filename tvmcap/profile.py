"""Profile: the time of every kernel of a call, beside the bytes that it moves."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.score import KernelScore
from tvmcap.base.timing import summarize
from tvmcap.view.timeline import Profile, Span, summary
from tvmcap.view.traffic import count, kernel_table, served_by

_WARM_UP = 3
#: Bytes of the copy that bandwidth is measured with: far above any cache.
_COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
_COPIES = 5


def profile(compiled: Any, args: Any, kwargs: Any, calls: int) -> Profile:
    """Measure ``calls`` equal calls; see ``Compiled.profile``."""
    if not isinstance(calls, int) or calls < 1:
        raise ConfigError(f"calls={calls!r}: expected a number of calls from 1")
    executor = compiled.executor
    kind = compiled.manifest.target["kind"]
    sizes = executor.sizes(*args, **kwargs)
    known = _known(compiled, sizes)
    run = executor if compiled.manifest.training is None else executor.step

    def call() -> None:
        run(*args, **kwargs)

    for _ in range(_WARM_UP):
        call()
    bandwidth = _gb_s("cuda" if kind == "cuda" else "cpu")
    spans, whole = (_on_gpu if kind == "cuda" else _on_cpu)(executor, call, calls)
    return Profile(
        device=str(executor.device),
        sizes=dict(sizes),
        bandwidth_gb_s=bandwidth,
        kernels=summary(spans, known, calls, bandwidth),
        calls_us=summarize(whole),
        spans=tuple(spans),
    )


def _known(compiled: Any, sizes: Mapping[str, int]) -> Sequence[KernelScore]:
    """List the kernels of a call and what they move, of both entries where there are two."""
    if compiled.manifest.training is not None:
        from tvmcap.training_score import counted

        return counted(compiled.manifest, dict(sizes)).per_kernel
    table = kernel_table(compiled)
    of_call = served_by(compiled.manifest.coverage)
    return count(table, compiled.signature, sizes, of_call).kernels if table else []


def _on_cpu(executor: Any, call: Callable[[], None], calls: int) -> tuple[list[Span], list[float]]:
    """Time calls, then kernels of further calls, between the virtual machine's marks of each."""
    spans: list[Span] = []
    whole: list[float] = []
    clock = time.perf_counter_ns
    for _ in range(calls):
        start = clock()
        call()
        whole.append((clock() - start) / 1e3)
    begin, started, number = clock(), 0, 0

    def before(name: str) -> None:
        nonlocal started
        started = clock()

    def after(name: str) -> None:
        now = clock()
        spans.append(Span(name, (started - begin) / 1e3, (now - started) / 1e3, number))

    with executor.watched(before, after):
        for number in range(calls):  # noqa: B007 - after() reads it
            call()
    return spans, whole


def _on_gpu(executor: Any, call: Callable[[], None], calls: int) -> tuple[list[Span], list[float]]:
    """Take the kernels' times from CUPTI, by way of torch's profiler."""
    torch = _torch()
    whole: list[float] = []
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as seen:
        for _ in range(calls):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call()
            torch.cuda.synchronize()
            whole.append((time.perf_counter_ns() - start) / 1e3)
    on_gpu = torch.autograd.DeviceType.CUDA
    found = [e for e in seen.events() if e.device_type == on_gpu and not _MOVE.match(e.name)]
    found.sort(key=lambda event: event.time_range.start)
    first = found[0].time_range.start if found else 0.0
    a_call = max(1, len(found) // calls)
    return [
        Span(
            event.name,
            event.time_range.start - first,
            event.time_range.end - event.time_range.start,
            i // a_call,
        )
        for i, event in enumerate(found)
    ], whole


#: What CUPTI calls copies and fills, which are no kernels.
_MOVE = re.compile(r"Mem(cpy|set)\b|(gpu_)?user_annotation|ProfilerStep")


def _torch() -> Any:
    try:
        import torch
    except ImportError as e:
        raise LibraryError(
            "profiling on a GPU takes the times from torch's profiler: pip install torch"
        ) from e
    return torch


def _gb_s(device: str) -> float:
    """Bytes read and written by a copy, a second, in GB: the best of a few."""
    if device == "cpu":
        import numpy as np

        source = np.ones(_COPIED[device] // 2, np.uint8)
        target = np.ones_like(source)
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            np.copyto(target, source)
            seconds.append(time.perf_counter() - start)
        return 2 * source.nbytes / min(seconds) / 1e9
    torch = _torch()
    source = torch.ones(_COPIED[device] // 2, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    milliseconds = []
    for _ in range(_COPIES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        milliseconds.append(start.elapsed_time(stop))
    return float(2 * source.nbytes / min(milliseconds) / 1e6)

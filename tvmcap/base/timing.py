"""Interleaved timing: what is compared is measured in turns, in one process, on one input set."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvmcap.base.score import Latency

Call = Callable[..., Any]
#: Seconds of one sample: above the clock's resolution, below the scheduler's time slice.
SAMPLE_S = 2e-3
#: Twice the last-level cache of a large CPU or GPU, for ``rotated``.
CACHE_BYTES = 256 << 20
_GRAPH_CALLS = 16
#: Longer than OpenMP's and TVM's idle threads spin for work before they sleep.
_SPIN_S = 5e-3


def measure(
    calls: Mapping[str, Call],
    inputs: Sequence[Sequence[Any]] = ((),),
    *,
    device: str = "cpu",
    samples: int = 21,
    budget_s: float = 2.0,
    graph: bool = False,
) -> dict[str, Latency]:
    """Time each of ``calls`` on ``inputs`` in turns, and return microseconds a call by name.

    Parameters
    ----------
    inputs: argument tuples that successive calls rotate through (see ``rotated``).
    device: ``"cpu"`` measures wall time; ``"cuda"`` measures between two events on torch's current
        stream.
    samples: samples of each call, taken round-robin; fewer, but at least 5, where ``budget_s``
        would be exceeded.
    budget_s: seconds to spend in all, warm-up apart.
    graph: on cuda, capture the calls in a CUDA graph and time its replay, so that host time does
        not count.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: expected 'cpu' or 'cuda'")
    samplers = {name: _sampler(call, inputs, device, graph) for name, call in calls.items()}
    estimates = {name: _calibrate(sampler) for name, sampler in samplers.items()}
    repeats = {
        name: max(1, min(10_000, round(SAMPLE_S / max(s, 1e-7)))) for name, s in estimates.items()
    }
    round_s = sum(estimates[name] * repeats[name] for name in calls)
    count = max(5, min(samples, int(budget_s / max(round_s, 1e-9))))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(count):
        names = list(calls) if turn % 2 == 0 else list(reversed(list(calls)))
        for name in names:
            if device == "cpu":
                _settle(samplers[name])
            taken[name].append(1e6 * samplers[name](repeats[name]))
    return {name: summarize(values) for name, values in taken.items()}


def _settle(sampler: Callable[[int], float]) -> None:
    """Let the other side's idle threads stop spinning, then wake this side's with one call."""
    time.sleep(_SPIN_S)
    sampler(1)


def summarize(samples: Sequence[float]) -> Latency:
    """Median, 10th and 90th percentile (nearest rank) of ``samples``."""
    ordered = sorted(samples)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9)]
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Latency(median, at[0], at[1], tuple(samples))


def rotated(
    args: Sequence[Any], at_least: int = CACHE_BYTES, most: int = 64
) -> list[tuple[Any, ...]]:
    """Clone ``args`` until they hold ``at_least`` bytes, so that no call finds its inputs in cache.

    Tensors anywhere in nested tuples, lists and dicts are cloned (``most`` sets at most);
    everything else is shared.
    """
    size = max(1, _bytes(args))
    count = max(1, min(most, -(-at_least // size)))
    return [tuple(args), *(tuple(_clone(a) for a in args) for _ in range(count - 1))]


def _bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return int(getattr(value, "nbytes", 0))


def _clone(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _clone(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clone(v) for v in value)
    if hasattr(value, "clone"):
        return value.detach().clone()
    return value.copy() if hasattr(value, "nbytes") and hasattr(value, "copy") else value


def _sampler(
    call: Call, inputs: Sequence[Sequence[Any]], device: str, graph: bool
) -> Callable[[int], float]:
    """Return ``sample(repeats)`` -> seconds a call."""
    if device == "cuda":
        return _graph_sampler(call, inputs) if graph else _event_sampler(call, inputs)
    position = 0

    def sample(repeats: int) -> float:
        nonlocal position
        start = time.perf_counter()
        for _ in range(repeats):
            call(*inputs[position])
            position = (position + 1) % len(inputs)
        return (time.perf_counter() - start) / repeats

    return sample


def _event_sampler(
    call: Call, inputs: Sequence[Sequence[Any]], ahead: int = 0
) -> Callable[[int], float]:
    """Time between two events; ``ahead`` calls keep the device busy while the timed are queued."""
    cuda: Any = importlib.import_module("torch").cuda
    position = 0

    def sample(repeats: int) -> float:
        nonlocal position
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(ahead):
            call(*inputs[position])
        start.record()
        for _ in range(repeats):
            call(*inputs[position])
            position = (position + 1) % len(inputs)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / repeats

    return sample


def _graph_sampler(call: Call, inputs: Sequence[Sequence[Any]]) -> Callable[[int], float]:
    cuda: Any = importlib.import_module("torch").cuda
    count = -(-_GRAPH_CALLS // len(inputs)) * len(inputs)
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(3):
            call(*inputs[0])
    cuda.current_stream().wait_stream(stream)
    captured = cuda.CUDAGraph()
    with cuda.graph(captured):
        for i in range(count):
            call(*inputs[i % len(inputs)])
    replay = _event_sampler(captured.replay, ((),), ahead=1)
    return lambda repeats: replay(-(-repeats // count)) / count


def _calibrate(sampler: Callable[[int], float]) -> float:
    """Warm up for three calls and 20 ms (one call where it is long); return seconds a call."""
    last, spent, calls = sampler(1), 0.0, 0
    while calls < 3 or (spent < 0.02 and calls < 1000):
        last = sampler(1)
        spent, calls = spent + last, calls + 1
        if last > 0.5:
            break
    return last

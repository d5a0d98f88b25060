"""Timing on a GPU without host time: calls captured in a CUDA graph, replayed between events."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi

from tvmcap.base import cudart

# cudaStreamNonBlocking, cudaStreamCaptureModeRelaxed (driver_types.h)
_NON_BLOCKING, _RELAXED = 1, 2
_FEWEST_CALLS, _MOST_CALLS, _GRAPH_US = 4, 64, 300.0
_FEWEST, _SAMPLES, _WARM_S = 7, 30, 0.005
#: Calls this long load the whole GPU, which lowers its clocks after some tens of milliseconds to
#: keep within its power: without the wait, the first candidate looks faster than the later ones.
_HEAVY_US, _HOT_S = 80.0, 0.06
#: Samples whose ninth decile is further above the first were taken while the clocks changed.
_STEADY, _MOST_ROUNDS = 1.05, 3
#: What one call costs the host at most, where nothing hides it.
_HOST_US = 50.0


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class _Runtime:
    """The CUDA runtime that TVM's side library has brought into the process."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(cudart.NAME)
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            cudart.forget_error()
            text = self._lib.cudaGetErrorString(status).decode()
            raise CudaError(f"{name}: {text}")


def time_graph(
    main: Any, sets: Sequence[Sequence[Any]], device: Any, time_s: float, limit_us: float | None
) -> list[float]:
    """Sample microseconds a call, calls rotating through ``sets``.

    Samples follow one another at once, so that the host's part of a launch is hidden; the clocks
    get some milliseconds to settle first, and samples that show that they did not are taken again.
    Fewer samples where a call is far slower than ``limit_us``.
    Raises CudaError where the function cannot be captured.
    """
    cuda = _Runtime()
    stream, graph, replay = (ctypes.c_void_p() for _ in range(3))
    cuda("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
    events = [ctypes.c_void_p() for _ in range(_SAMPLES + 1)]
    for event in events:
        cuda("cudaEventCreate", ctypes.byref(event))

    def elapsed_us(start: ctypes.c_void_p, stop: ctypes.c_void_p) -> float:
        elapsed = ctypes.c_float()
        cuda("cudaEventElapsedTime", ctypes.byref(elapsed), start, stop)
        return 1e3 * elapsed.value

    def sample(count: int) -> list[float]:
        """Microseconds of each of ``count`` replays, after one that hides the first launch."""
        cuda("cudaGraphLaunch", replay, stream)
        cuda("cudaEventRecord", events[0], stream)
        for event in events[1 : count + 1]:
            cuda("cudaGraphLaunch", replay, stream)
            cuda("cudaEventRecord", event, stream)
        cuda("cudaEventSynchronize", events[count])
        return [elapsed_us(a, b) for a, b in itertools.pairwise(events[: count + 1])]

    try:
        with tvm_ffi.use_raw_stream(device, stream.value):
            main(*sets[0])
            cuda("cudaEventRecord", events[0], stream)
            main(*sets[-1])
            cuda("cudaEventRecord", events[1], stream)
            cuda("cudaStreamSynchronize", stream)
            once = elapsed_us(*events[:2])
            slow = limit_us is not None and once > 4 * limit_us + _HOST_US
            calls = min(len(sets), 2) if slow else _calls(once, len(sets))
            cuda("cudaStreamBeginCapture", stream, _RELAXED)
            for i in range(calls):
                main(*sets[i % len(sets)])
            cuda("cudaStreamEndCapture", stream, ctypes.byref(graph))
        cuda("cudaGraphInstantiate", ctypes.byref(replay), graph, ctypes.c_ulonglong(0))
        once = sample(1)[0]
        if not slow:
            for count in _warming(once, once / calls):
                sample(count)
        if slow:
            return [us / calls for us in sample(3)]
        count = _count(time_s, once, _FEWEST)
        return [us / calls for us in _steady(lambda: sample(count))]
    finally:
        for event in events:
            cuda("cudaEventDestroy", event)
        if replay:
            cuda("cudaGraphExecDestroy", replay)
        if graph:
            cuda("cudaGraphDestroy", graph)
        cuda("cudaStreamDestroy", stream)


def _steady(sample: Callable[[], list[float]]) -> list[float]:
    """Sample until the samples agree, some rounds at most; the last round counts."""
    for _ in range(_MOST_ROUNDS):
        found = sample()
        p10, p90 = np.percentile(found, (10, 90))
        if p90 <= _STEADY * p10:
            break
    return found


def _calls(once_us: float, sets: int) -> int:
    """Calls of a graph: whole turns through the sets, enough of them for the clock."""
    wanted = max(_FEWEST_CALLS, min(_MOST_CALLS, math.ceil(_GRAPH_US / max(once_us, 1e-3))))
    return -(-wanted // sets) * sets


def _warming(replay_us: float, call_us: float) -> list[int]:
    """Replays to make before any that counts, in parts that have events enough."""
    seconds = _HOT_S if call_us >= _HEAVY_US else _WARM_S
    left = max(1, math.ceil(seconds / max(replay_us * 1e-6, 1e-6)))
    return [min(_SAMPLES, left - at) for at in range(0, left, _SAMPLES)]


def _count(seconds: float, once_us: float, fewest: int) -> int:
    return int(min(_SAMPLES, max(fewest, seconds / max(once_us * 1e-6, 1e-6))))

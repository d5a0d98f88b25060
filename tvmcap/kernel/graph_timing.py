"""Timing on a GPU without host time: calls captured in a CUDA graph, replayed between events."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import tvm_ffi

# cudaStreamNonBlocking, cudaStreamCaptureModeRelaxed (driver_types.h)
_NON_BLOCKING, _RELAXED = 1, 2
_CALLS = 24


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class _Runtime:
    """The CUDA runtime that TVM's side library has brought into the process."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcudart.so.13")
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            text = self._lib.cudaGetErrorString(status).decode()
            raise CudaError(f"{name}: {text}")


def time_graph(
    main: Any, sets: Sequence[Sequence[Any]], device: Any, time_s: float, limit_us: float | None
) -> list[float]:
    """Sample microseconds a call, calls rotating through ``sets``.

    Fewer samples where a call is far slower than ``limit_us``. Raises CudaError where the function
    cannot be captured.
    """
    cuda = _Runtime()
    stream, graph, replay = (ctypes.c_void_p() for _ in range(3))
    cuda("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
    events = [ctypes.c_void_p() for _ in range(2)]
    for event in events:
        cuda("cudaEventCreate", ctypes.byref(event))
    calls = -(-_CALLS // len(sets)) * len(sets)
    with tvm_ffi.use_raw_stream(device, stream.value):
        main(*sets[0])
        cuda("cudaStreamSynchronize", stream)
        cuda("cudaStreamBeginCapture", stream, _RELAXED)
        for i in range(calls):
            main(*sets[i % len(sets)])
        cuda("cudaStreamEndCapture", stream, ctypes.byref(graph))
    cuda("cudaGraphInstantiate", ctypes.byref(replay), graph, ctypes.c_ulonglong(0))

    def sample() -> float:
        elapsed = ctypes.c_float()
        cuda("cudaEventRecord", events[0], stream)
        cuda("cudaGraphLaunch", replay, stream)
        cuda("cudaEventRecord", events[1], stream)
        cuda("cudaEventSynchronize", events[1])
        cuda("cudaEventElapsedTime", ctypes.byref(elapsed), *events)
        return 1e3 * elapsed.value / calls

    try:
        once = min(sample(), sample())
        slow = limit_us is not None and once > 4 * limit_us
        count = 3 if slow else int(min(30, max(7, time_s / max(once * calls * 1e-6, 1e-6))))
        return [sample() for _ in range(count)]
    finally:
        for event in events:
            cuda("cudaEventDestroy", event)
        cuda("cudaGraphExecDestroy", replay)
        cuda("cudaGraphDestroy", graph)
        cuda("cudaStreamDestroy", stream)

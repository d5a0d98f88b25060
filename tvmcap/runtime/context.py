"""Contexts: what one thread needs to call a library. Code and weights are shared by all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.runtime.arena import Arena
from tvmcap.runtime.binding import Plan
from tvmcap.runtime.bound import Bound
from tvmcap.runtime.cuda_graph import Cuda
from tvmcap.runtime.graphs import Graphs
from tvmcap.runtime.loader import Library, configure_threads, ffi
from tvmcap.runtime.seen import Seen
from tvmcap.runtime.trace import Trace, trace_call

#: No stream has this handle.
_NO_STREAM = -1


class CpuContext:
    """A virtual machine, a thread pool and an arena of the calling thread."""

    graphs: Graphs | None = None

    def __init__(self, library: Library, manifest: Manifest) -> None:
        configure_threads()
        self._library = library
        self._weights = library.weights
        self.arena = Arena(library.new_vm(), manifest)
        self._entry = self.arena.entry
        self.bound = Bound(manifest.signature)
        self.slots: dict[int, Any] = {}
        self.seen: dict[Any, Seen] = {}

    def run(
        self,
        plan: Plan,
        values: Sequence[Any],
        targets: Sequence[Any],
        places: tuple[int, ...] | None,
    ) -> None:
        """Run the library on tensors that were checked."""
        arena = self.arena
        if not arena.bounded:
            arena.fit(plan.dims)
        self._entry(*values, *self._weights, *targets, *arena.storages)

    def trace(self, values: Sequence[Any], targets: Sequence[Any]) -> Trace:
        """Watch one call that allocates what it needs."""
        vm = self._library.new_vm()
        return trace_call(vm, lambda: vm["main"](*values, *self._weights, *targets))

    def close(self) -> None:
        """Let go of memory and code."""
        self.arena.release()
        self.slots.clear()
        self._entry = None


class CudaMachine:
    """A library's virtual machine on a GPU, which keeps weights: one for all threads, in turns."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.vm = library.new_vm()
        self.lock = threading.RLock()
        self.cuda = Cuda(library.device)


class CudaContext:
    """An arena and recorded calls of the calling thread; work goes to the caller's stream."""

    def __init__(self, machine: CudaMachine, manifest: Manifest) -> None:
        self._machine = machine
        self._cuda = machine.cuda
        self._device = machine.library.device
        self._index = self._device.index
        self._weights = machine.library.weights
        self._lock = machine.lock
        with self._lock:
            self.arena = Arena(machine.vm, manifest)
        self._bounded = self.arena.bounded
        self.bound = Bound(manifest.signature)
        self.slots: dict[int, Any] = {}
        self.seen: dict[Any, Seen] = {}
        self._planned = manifest.arena is not None
        self._needs = manifest.needs
        self._last = _NO_STREAM
        self._own = ffi().Tensor
        self.graphs: Graphs | None = None
        self._torch: Any = None
        self._stream_of_torch: Callable[[int], int] = _no_stream
        self._torch_captures: Callable[[], bool] = _never
        self._several = False

    def use_graphs(self, limit_bytes: int) -> None:
        """Record and replay calls from now on; raises LibraryError where no call can be."""
        if not self._planned:
            raise LibraryError(
                "this library allocates within a call, as an earlier version built it, so its "
                "calls cannot be recorded: build it again"
            )
        if self._needs:
            raise LibraryError(
                f"this library calls {', '.join(self._needs)}, whose work cannot be recorded: "
                "build it without vendor_matmul"
            )
        record = partial(_record, self._lock, self.arena, self._weights)
        self.graphs = Graphs(self._cuda, record, limit_bytes)

    def run(
        self,
        plan: Plan,
        values: Sequence[Any],
        targets: Sequence[Any],
        places: tuple[int, ...] | None,
    ) -> None:
        """Run the library on tensors that were checked; without addresses, never as a graph."""
        if self._torch is None:
            self._find_torch()
        stream = self._stream_of_torch(self._index)
        capturing = self._torch_captures()
        if stream != self._last and not capturing:
            self._follow(stream)
        graphs = self.graphs
        if not self._bounded and self.arena.fit(plan.dims) and graphs is not None:
            graphs.clear()
        if (
            graphs is not None
            and places is not None
            and not capturing
            and (not self._several or self._is_current())
        ):
            if graphs.replay(plan, places, values, targets, stream):
                return
        self._run(values, targets, stream)

    def _run(self, values: Sequence[Any], targets: Sequence[Any], stream: int) -> None:
        """Run without a graph. A torch tensor among the arguments brings its stream with it."""
        if targets and isinstance(targets[0], self._own):
            with ffi().use_raw_stream(self._device, stream):
                _record(self._lock, self.arena, self._weights, values, targets)
        else:
            _record(self._lock, self.arena, self._weights, values, targets)

    def _find_torch(self) -> None:
        """Take the current stream from torch where it is in use, else from TVM."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            from tvm_ffi.core import _env_get_current_stream

            kind = self._device.dlpack_device_type()
            self._stream_of_torch = lambda index: int(_env_get_current_stream(kind, index) or 0)
            return
        self._torch = torch
        self._stream_of_torch = torch._C._cuda_getCurrentRawStream
        self._torch_captures = torch._C._cuda_isCurrentStreamCapturing
        self._several = torch.cuda.device_count() > 1

    def _is_current(self) -> bool:
        """Whether the device is the current one, on which the default stream's handle, 0, is."""
        return bool(self._torch.cuda.current_device() == self._index)

    def _follow(self, stream: int) -> None:
        """Order this call after the last one, on another stream: both use the same arena."""
        if self._last != _NO_STREAM and self.arena.nbytes:
            self._cuda.order(self._last, stream)
        self._last = stream

    def trace(self, values: Sequence[Any], targets: Sequence[Any]) -> Trace:
        """Watch one call that allocates what it needs."""
        vm = self._machine.vm
        with self._lock:
            main = vm["main"]
            return trace_call(vm, lambda: main(*values, *self._weights, *targets))

    def close(self) -> None:
        """Let go of recorded calls and memory."""
        if self.graphs is not None:
            self.graphs.clear()
        self.arena.release()
        self.slots.clear()


def _record(
    lock: threading.RLock,
    arena: Arena,
    weights: Sequence[Any],
    values: Sequence[Any],
    targets: Sequence[Any],
) -> None:
    """Run a library's function; its virtual machine serves one thread at a time."""
    with lock:
        arena.entry(*values, *weights, *targets, *arena.storages)


def _no_stream(index: int) -> int:
    return 0


def _never() -> bool:
    return False

"""Contexts: what one thread needs to call a library. Code and weights are shared by all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tvmcap.base.errors import IncompatibleLibraryError, LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.runtime.arena import Arena
from tvmcap.runtime.binding import Plan
from tvmcap.runtime.bound import Bound
from tvmcap.runtime.cuda_graph import Cuda
from tvmcap.runtime.graphs import Graphs
from tvmcap.runtime.loader import Library, configure_threads, ffi
from tvmcap.runtime.seen import Seen
from tvmcap.runtime.trace import Trace, Watch, trace_call, watched

#: No stream has this handle.
_NO_STREAM = -1
#: The default stream, which cannot be captured (CUDA C++ Programming Guide, "CUDA Graphs").
_DEFAULT = 0
#: DLPack's number of CUDA devices (dlpack.h).
_CUDA = 2


class CpuContext:
    """An arena, a thread pool and a virtual machine of the calling thread."""

    graphs: Graphs | None = None

    def __init__(self, library: Library, manifest: Manifest) -> None:
        self._library = library
        self._weights = library.weights
        self.arena = Arena(library.new_vm(), manifest, library)
        self._has_pool = False
        self.bound = Bound(manifest.signature)
        self._name = manifest.entry
        self.slots: dict[int, Any] = {}
        self.seen: dict[Any, Seen] = {}
        self.last: Seen | None = None

    def follow(self) -> None:
        """Wait for nothing: a call on a CPU is done when it returns."""

    def run(
        self,
        plan: Plan,
        values: Sequence[Any],
        targets: Sequence[Any],
        places: tuple[int, ...] | None,
    ) -> None:
        """Run the library on tensors that were checked."""
        arena = self.arena
        if not self._has_pool:  # a process that forks before has none that the child lacks
            configure_threads()
            self._has_pool = True
        if not arena.bounded:
            arena.fit(plan.dims)
        arena.entry(*values, *self._weights, *targets, *arena.tail)

    def trace(self, values: Sequence[Any], targets: Sequence[Any]) -> Trace:
        """Watch one call that allocates what it needs."""
        configure_threads()
        vm = self._library.new_vm()
        return trace_call(vm, lambda: vm[self._name](*values, *self._weights, *targets))

    def watched(self, before: Watch, after: Watch) -> AbstractContextManager[None]:
        """Show both the name of each kernel of calls within; see ``trace.watched``."""
        return watched(self.arena, nullcontext(), before, after)

    def close(self) -> None:
        """Let go of memory and code."""
        self.arena.release()
        self.bound.release()
        self.slots.clear()
        self._weights = ()


class CudaMachine:
    """A library's virtual machine on a GPU, which keeps weights: it serves a thread at a time."""

    def __init__(self, library: Library, manifest: Manifest) -> None:
        if manifest.arena is None:
            raise IncompatibleLibraryError(
                "expected a library that takes the memory of its intermediates, got one of an "
                "earlier version, which allocates within a call: build it again"
            )
        self.library = library
        self.vm = library.new_vm()
        self.lock = threading.RLock()
        self.cuda = Cuda(library.device)


class CudaContext:
    """An arena and recorded calls of the calling thread; work goes to the caller's stream."""

    def __init__(self, machine: CudaMachine, manifest: Manifest) -> None:
        self._cuda = machine.cuda
        self._device = machine.library.device
        self._index = self._device.index
        self._weights = machine.library.weights
        self._lock = machine.lock
        with self._lock:
            self.arena = Arena(machine.vm, manifest, machine.library)
        self._bounded = self.arena.bounded
        self.bound = Bound(manifest.signature)
        self._name = manifest.entry
        self.slots: dict[int, Any] = {}
        self.seen: dict[Any, Seen] = {}
        self.last: Seen | None = None
        self._needs = manifest.needs
        self._last = _NO_STREAM
        self._own = ffi().Tensor
        self.graphs: Graphs | None = None
        self._torch: Any = None
        self._stream: Callable[[int], int] = _stream_of_tvm
        self._captures: Callable[[], bool] = _never
        self._several = False
        self._lent: list[tuple[Any, ...]] = []

    def use_graphs(self, limit_bytes: int) -> None:
        """Record and replay calls from now on; raises LibraryError where no call can be."""
        if self._needs:
            raise LibraryError(
                f"this library calls {', '.join(self._needs)}, whose work cannot be recorded: "
                "build it without vendor_matmul"
            )
        launch = partial(_launch, self.arena, self._weights)
        self.graphs = Graphs(self._cuda, launch, limit_bytes)

    def run(
        self,
        plan: Plan,
        values: Sequence[Any],
        targets: Sequence[Any],
        places: tuple[int, ...] | None,
    ) -> None:
        """Run the library on tensors that were checked; without addresses, never as a graph."""
        if self._torch is None and "torch" in sys.modules:
            self._find_torch()
        stream = self._stream(self._index)
        capturing = stream != _DEFAULT and self._captures()
        if stream != self._last and not capturing:
            self._follow(stream)
        graphs = self.graphs
        if not self._bounded and self.arena.fit(plan.dims) and graphs is not None:
            graphs.clear()
        if capturing:
            self._lend()
        if graphs is not None and places is not None and not capturing:
            if self._several and not self._is_current():
                graphs.fallbacks[f"another device than {self._device} is the current one"] += 1
            elif graphs.replay(plan, places, values, targets, stream):
                return
        self._run(values, targets, stream)

    def _run(self, values: Sequence[Any], targets: Sequence[Any], stream: int) -> None:
        """Run without a graph. A torch tensor among the arguments brings its stream with it."""
        if targets and isinstance(targets[0], self._own):
            with ffi().use_raw_stream(self._device, stream):
                _launch(self.arena, self._weights, values, targets)
        else:
            _launch(self.arena, self._weights, values, targets)

    def _find_torch(self) -> None:
        """Take the current stream from torch where it uses the GPU."""
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            self._torch = torch
            self._stream = torch._C._cuda_getCurrentRawStream
            self._captures = torch._C._cuda_isCurrentStreamCapturing
            self._several = torch.cuda.device_count() > 1

    def _is_current(self) -> bool:
        """Whether the device is the current one, on which the default stream's handle, 0, is."""
        return bool(self._torch.cuda.current_device() == self._index)

    def follow(self) -> None:
        """Let what comes on the caller's stream wait for the last call, before memory is shared."""
        if self._torch is None and "torch" in sys.modules:
            self._find_torch()
        stream = self._stream(self._index)
        if stream != self._last and not (stream != _DEFAULT and self._captures()):
            self._follow(stream)

    def _follow(self, stream: int) -> None:
        """Order this call after the last one, on another stream: both use the same memory."""
        if self._last != _NO_STREAM and (self.arena.nbytes or self.slots):
            self._cuda.order(self._last, stream)
        self._last = stream

    def _lend(self) -> None:
        """Keep the arena as it is now: a graph that the caller captures holds its address."""
        if not any(storages is self.arena.storages for storages in self._lent):
            self._lent.append(self.arena.storages)

    def trace(self, values: Sequence[Any], targets: Sequence[Any]) -> Trace:
        """Watch one call that allocates what it needs."""
        vm = self.arena.vm
        with self._lock:
            main = vm[self._name]
            return trace_call(vm, lambda: main(*values, *self._weights, *targets))

    def watched(self, before: Watch, after: Watch) -> AbstractContextManager[None]:
        """Show both the name of each kernel of calls within; see ``trace.watched``."""
        return watched(self.arena, self._lock, before, after)

    def close(self) -> None:
        """Let go of recorded calls and memory; a replay under way in another thread ends before."""
        self.graphs = None
        self.arena.release()
        self.bound.release()
        self.slots.clear()
        self._lent.clear()
        self._weights = ()


def _launch(
    arena: Arena, weights: Sequence[Any], values: Sequence[Any], targets: Sequence[Any]
) -> None:
    arena.entry(*values, *weights, *targets, *arena.tail)


def _stream_of_tvm(index: int) -> int:
    """Return the stream that a caller without torch set with ``tvm_ffi.use_raw_stream``."""
    from tvm_ffi.core import _env_get_current_stream

    return int(_env_get_current_stream(_CUDA, index) or 0)


def _never() -> bool:
    return False

"""CUDA graphs without a GPU: kernels are lists of addresses, launches are written down."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.runtime.cuda_graph import CaptureError
from tvmcap.runtime.patches import Kernel, Slot


class FakeNode:
    def __init__(self, places: Sequence[int]) -> None:
        self.now = list(places)
        self.kernel = Kernel((1,), tuple(p.to_bytes(8, "little") for p in places))


class FakeRuntime:
    """Stands in for libcudart: ``pending`` is its last error, which a call of ``failing`` sets.

    ``executables`` counts the executable graphs that were made and are not destroyed.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.executables = 0
        self.failing: set[str] = set()

    def fail(self, *_: Any) -> int:
        self.pending = 2  # cudaErrorMemoryAllocation
        return self.pending

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.fail() if name in self.failing else 0

    def cudaGraphInstantiate(self, made: Any, *_: Any) -> int:
        if "cudaGraphInstantiate" in self.failing:
            return self.fail()
        made._obj.value = 5
        self.executables += 1
        return 0

    def cudaGraphExecDestroy(self, replay: Any) -> None:
        assert replay.value == 5
        self.executables -= 1

    def cudaGetErrorString(self, status: int) -> bytes:
        return b"out of memory"

    def cudaGetLastError(self) -> int:
        was, self.pending = self.pending, 0
        return was


class FakeCuda:
    """Stands in for ``cuda_graph.Cuda``; ``launched`` lists (graph, addresses, stream)."""

    def __init__(self, nbytes: int = 100) -> None:
        self.recorded: list[int] = []
        self.graphs: dict[int, list[FakeNode]] = {}
        self.recorded_in: dict[int, list[int]] = {}
        self.executables: dict[int, tuple[int, list[int]]] = {}
        self.launched: list[tuple[int, tuple[int, ...], int]] = []
        self.destroyed: list[int] = []
        self.refuse = ""
        self.fixed = False
        self.fails = 0
        self._bytes = nbytes
        self._streams = 0

    def record(self, values: Sequence[Any], targets: Sequence[Any]) -> None:
        """Be the library: one kernel on all tensors."""
        self.recorded = [t.data_ptr() for t in (*values, *targets)]

    def new_stream(self) -> Any:
        self._streams += 1
        return ctypes.c_void_p(1)

    def destroy_stream(self, stream: Any) -> None:
        self._streams -= 1

    def capture(self, stream: Any, run: Callable[[], object]) -> Any:
        if self.refuse:
            raise CaptureError(self.refuse)
        run()
        handle = len(self.graphs) + 1
        self.graphs[handle] = [FakeNode(self.recorded)]
        self.recorded_in[handle] = list(self.recorded)
        return ctypes.c_void_p(handle)

    def nodes(self, graph: Any) -> list[FakeNode]:
        if self.fixed:
            raise CaptureError("it holds copies or fills beside kernels")
        return self.graphs[graph.value]

    def with_address(self, tensor_map: bytes, address: int) -> bytes:
        raise AssertionError("no tensor map here")

    def instantiate(self, graph: Any, stream: Any, nodes: int) -> tuple[Any, int]:
        made = 1000 + len(self.executables)
        self.executables[made] = graph.value, list(self.recorded_in[graph.value])
        return ctypes.c_void_p(made), self._bytes

    def write(self, node: FakeNode, slot: Slot, address: int) -> None:
        node.now[slot.param] = address + slot.offset

    def update(self, replay: Any, node: FakeNode) -> None:
        graph, places = self.executables[replay.value]
        assert node in self.graphs[graph]
        places[:] = node.now

    def launch_raw(self, replay: int, stream: int) -> int:
        graph, places = self.executables[replay]
        self.launched.append((graph, tuple(places), stream))
        return self.fails

    def check(self, status: int, what: str) -> None:
        raise RuntimeError(f"{what}: {status}")

    def destroy(self, graph: Any, replay: Any) -> None:
        if graph.value:
            self.destroyed.append(graph.value)
        if replay.value:
            del self.executables[replay.value]

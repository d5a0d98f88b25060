"""CUDA graphs through the CUDA runtime and driver, by ctypes: captured, instantiated, updated.

Nothing but the driver and the libcudart that TVM's side library needs; signatures are from cuda.h
and cuda_runtime_api.h of CUDA 13.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from tvmcap.base import cudart
from tvmcap.base.errors import LibraryError
from tvmcap.runtime.loader import ffi
from tvmcap.runtime.patches import TENSOR_MAP, Kernel, Slot

# cudaStreamNonBlocking, cudaStreamCaptureModeRelaxed, cudaEventDisableTiming, CU_GRAPH_NODE_TYPE_*
_NON_BLOCKING, _RELAXED, _NO_TIMING, _KERNEL_NODE = 1, 2, 2, 0
_MAP_ALIGNMENT = 64
#: What an instantiated graph takes on the device at least, a node; a graph smaller than the
#: driver's page of memory shows as nothing in what is free.
_NODE_BYTES = 4096


class CaptureError(Exception):
    """A call cannot be captured; the message says why."""


class _KernelNodeParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("params", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


class Cuda:
    """The functions of CUDA that graphs need, on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._runtime = ctypes.CDLL(cudart.NAME)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self.launch_raw = self._runtime.cudaGraphLaunch
        self.launch_raw.argtypes = [c_void_p, c_void_p]
        self._replace = self._driver.cuTensorMapReplaceAddress
        self._replace.argtypes = [c_void_p, c_void_p]
        self._set = self._driver.cuGraphExecKernelNodeSetParams_v2
        self._set.argtypes = [c_void_p, c_void_p, c_void_p]
        self._event, self._lock = c_void_p(), threading.Lock()

    def check(self, status: int, what: str) -> None:
        """Raise LibraryError for a status of the CUDA runtime other than success."""
        if status:
            cudart.forget_error()
            text = self._runtime.cudaGetErrorString(status).decode()
            raise LibraryError(f"{self.device}: {what} failed: {text}")

    def _call(self, name: str, *args: Any) -> None:
        self.check(getattr(self._runtime, name)(*args), name)

    def _drive(self, name: str, *args: Any) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            raise CaptureError(f"{name} returned {status}")

    def new_stream(self) -> c_void_p:
        """Return a stream of its own, for captures; ``destroy_stream`` ends it."""
        stream = c_void_p()
        self._call("cudaSetDevice", self.device.index)
        self._call("cudaStreamCreateWithFlags", byref(stream), _NON_BLOCKING)
        return stream

    def destroy_stream(self, stream: c_void_p) -> None:
        """End a stream."""
        self._runtime.cudaStreamDestroy(stream)

    def order(self, before: int, after: int) -> None:
        """Let what comes on the stream ``after`` wait for what is on ``before``."""
        with self._lock:  # one event for all threads
            if not self._event:
                self._call("cudaEventCreateWithFlags", byref(self._event), _NO_TIMING)
            self._call("cudaEventRecord", self._event, c_void_p(before))
            self._call("cudaStreamWaitEvent", c_void_p(after), self._event, 0)

    def capture(self, stream: c_void_p, run: Callable[[], object]) -> c_void_p:
        """Record what ``run`` launches on ``stream``; returns the graph.

        Raises CaptureError where something in it cannot be recorded.
        """
        graph, error = c_void_p(), None
        self._call("cudaStreamBeginCapture", stream, _RELAXED)
        try:
            with ffi().use_raw_stream(self.device, stream.value):
                run()
        except Exception as e:
            error = e
        status = self._runtime.cudaStreamEndCapture(stream, byref(graph))
        if error is None and not status and graph:
            return graph
        if graph:
            self._runtime.cudaGraphDestroy(graph)
        cudart.forget_error()
        reason = error or self._runtime.cudaGetErrorString(status).decode()
        raise CaptureError(f"the call cannot be captured: {reason}")

    def instantiate(self, graph: c_void_p, stream: c_void_p, nodes: int) -> tuple[c_void_p, int]:
        """Make a graph executable; returns it and the bytes that it takes on the device."""
        replay = c_void_p()
        before = self._free_bytes()
        self._call("cudaGraphInstantiate", byref(replay), graph, c_ulonglong(0))
        try:
            self._call("cudaGraphUpload", replay, stream)
            self._call("cudaStreamSynchronize", stream)
            return replay, max(before - self._free_bytes(), nodes * _NODE_BYTES)
        except BaseException:
            self.destroy(c_void_p(), replay)
            raise

    def _free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("cudaMemGetInfo", byref(free), byref(total))
        return free.value

    def destroy(self, graph: c_void_p, replay: c_void_p) -> None:
        """Free a graph and its executable."""
        if replay:
            self._runtime.cudaGraphExecDestroy(replay)
        if graph:
            self._runtime.cudaGraphDestroy(graph)

    def nodes(self, graph: c_void_p) -> list[Node]:
        """List the kernels of a graph, in the order captured; CaptureError for other nodes."""
        count = c_size_t()
        self._drive("cuGraphGetNodes", graph, None, byref(count))
        found = (c_void_p * count.value)()
        self._drive("cuGraphGetNodes", graph, found, byref(count))
        return [self._node(c_void_p(handle)) for handle in found]

    def _node(self, handle: c_void_p) -> Node:
        kind, params = c_int(), _KernelNodeParams()
        self._drive("cuGraphNodeGetType", handle, byref(kind))
        if kind.value != _KERNEL_NODE:
            raise CaptureError("it holds copies or fills beside kernels")
        self._drive("cuGraphKernelNodeGetParams_v2", handle, byref(params))
        if not params.func or params.extra:
            raise CaptureError("a kernel's parameters cannot be read")
        return Node(handle, params, self._sizes(params.func))

    def _sizes(self, func: int) -> list[int]:
        """Bytes of each parameter of a kernel."""
        try:
            query = self._driver.cuFuncGetParamInfo
        except AttributeError as e:
            raise CaptureError("the driver is older than CUDA 12.4") from e
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while not query(c_void_p(func), c_size_t(len(sizes)), byref(offset), byref(size)):
            sizes.append(size.value)
        return sizes

    def with_address(self, tensor_map: bytes, address: int) -> bytes:
        """Return a tensor map with another address."""
        cell = _aligned(tensor_map)
        if self._replace(ctypes.addressof(cell), address):
            raise CaptureError("a tensor map refuses another address")
        return bytes(cell)

    def update(self, replay: c_void_p, node: Node) -> None:
        """Give later launches of an executable graph the parameters that ``node`` holds now."""
        status = self._set(replay, node.handle, node.address)
        if status:
            raise LibraryError(f"{self.device}: cuGraphExecKernelNodeSetParams returned {status}")

    def write(self, node: Node, slot: Slot, address: int) -> None:
        """Put the address of a tensor where ``slot`` says."""
        if slot.is_map:
            self._replace(node.places[slot.param], address + slot.offset)
        else:
            place = node.places[slot.param] + slot.at
            c_ulonglong.from_address(place).value = address + slot.offset


class Node:
    """A kernel of a graph, with parameters of its own that can be changed."""

    def __init__(self, handle: c_void_p, params: _KernelNodeParams, sizes: list[int]) -> None:
        self.handle = handle
        images = [ctypes.string_at(params.params[i], size) for i, size in enumerate(sizes)]
        self._cells = [_aligned(image) for image in images]
        self.places = [ctypes.addressof(cell) for cell in self._cells]
        self._pointers = (c_void_p * max(1, len(sizes)))(*self.places)
        self._params = _KernelNodeParams.from_buffer_copy(params)
        self._params.params = ctypes.cast(self._pointers, POINTER(c_void_p))
        self.address = ctypes.addressof(self._params)
        launch = (params.func, *params.grid, *params.block, params.shared_bytes)
        self.kernel = Kernel(tuple(int(n) for n in launch), tuple(images))


def _aligned(data: bytes) -> Any:
    """Return a copy as a ctypes array that starts at a multiple of 64 bytes."""
    memory = (ctypes.c_char * (len(data) + _MAP_ALIGNMENT))()
    start = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    cell = (ctypes.c_char * len(data)).from_buffer(memory, start)
    ctypes.memmove(ctypes.addressof(cell), data, len(data))
    return cell


assert TENSOR_MAP % _MAP_ALIGNMENT == 0

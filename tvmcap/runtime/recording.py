"""Recording: a call captured as a CUDA graph, with where the addresses of its tensors stand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.runtime.cuda_graph import CaptureError, Cuda, Node
from tvmcap.runtime.loader import ffi
from tvmcap.runtime.patches import NotUnderstoodError, Slot, learn

#: How far the second capture moves the first tensor; each next one moves that much more.
_MOVE = 4096
#: Bytes of a TVMFFIObject; after it a tensor's DLTensor begins, with its address (c_api.h).
_HEADER = 24

Record = Callable[[Sequence[Any], Sequence[Any]], object]
"""(inputs, outputs) -> None: run the library on tvm_ffi tensors, on the stream in force."""


class Entry:
    """A recorded call.

    Attributes
    ----------
    replays: executable graphs by the addresses of inputs and outputs that they hold; none where
        the call cannot be recorded.
    movable: the addresses of the one that is updated for others.
    met: addresses for which it was.
    users: for each tensor, the kernels and slots that hold its address; None where only the
        addresses of the capture serve.
    reason: why there is no graph, or no other addresses.
    """

    def __init__(self, reason: str = "") -> None:
        self.graph = 0
        self.replays: dict[tuple[int, ...], int] = {}
        self.movable: tuple[int, ...] = ()
        self.met: dict[tuple[int, ...], None] = {}
        self.users: list[list[tuple[Node, list[Slot]]]] | None = None
        self.nodes = 1
        self.nbytes = 0
        self.reason = reason


def capture(
    cuda: Cuda,
    record: Record,
    addresses: tuple[int, ...],
    values: Sequence[Any],
    targets: Sequence[Any],
) -> Entry:
    """Record a call, and learn where its addresses stand from a second recording.

    Raises CaptureError or LibraryError where that is not possible.
    """
    entry = Entry()
    tensors = [ffi().from_dlpack(_plain(t)) for t in (*values, *targets)]
    count = len(values)
    stream = cuda.new_stream()
    try:
        graph = cuda.capture(stream, lambda: record(tensors[:count], tensors[count:]))
        entry.graph = graph.value or 0
        try:
            nodes = cuda.nodes(graph)
            slots = _learn(cuda, record, stream, nodes, tensors, count, addresses)
            entry.users = _by_tensor(nodes, slots, len(tensors))
        except (CaptureError, NotUnderstoodError) as e:
            nodes, entry.reason = [], f"other addresses cannot be used: {e}"
        entry.nodes = max(1, len(nodes))
        replay, entry.nbytes = cuda.instantiate(graph, stream, entry.nodes)
        entry.replays[addresses] = replay.value or 0
    except BaseException:
        cuda.destroy(ctypes.c_void_p(entry.graph), ctypes.c_void_p(0))
        raise
    finally:
        cuda.destroy_stream(stream)
    entry.movable = addresses
    return entry


def _learn(
    cuda: Cuda,
    record: Record,
    stream: Any,
    nodes: Sequence[Node],
    tensors: Sequence[Any],
    count: int,
    addresses: tuple[int, ...],
) -> list[Slot]:
    moved = [moved_by(t, _MOVE * (i + 1)) for i, t in enumerate(tensors)]
    probe = cuda.capture(stream, lambda: record(moved[:count], moved[count:]))
    try:
        second = [node.kernel for node in cuda.nodes(probe)]
    finally:
        cuda.destroy(probe, ctypes.c_void_p(0))
    places = [t.data_ptr() for t in moved]
    first = [node.kernel for node in nodes]
    return learn(first, second, addresses, places, cuda.with_address)


def moved_by(tensor: Any, distance: int) -> Any:
    """Return a tensor that claims to lie ``distance`` bytes further; nothing may touch its data."""
    view = ffi().get_global_func("runtime.TVMTensorCreateView")(
        tensor, tuple(tensor.shape), tensor.dtype, 0
    )
    ctypes.c_uint64.from_address(view.__chandle__() + _HEADER).value += distance
    return view


def _plain(tensor: Any) -> Any:
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _by_tensor(
    nodes: Sequence[Node], slots: Sequence[Slot], count: int
) -> list[list[tuple[Node, list[Slot]]]]:
    """Group slots by the tensor whose address they hold, then by kernel."""
    grouped: list[dict[int, list[Slot]]] = [{} for _ in range(count)]
    for slot in slots:
        grouped[slot.tensor].setdefault(slot.kernel, []).append(slot)
    return [[(nodes[k], of) for k, of in by_kernel.items()] for by_kernel in grouped]

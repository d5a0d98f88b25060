"""Replay: a call recorded as a CUDA graph, launched again with the addresses of the next call.

One graph serves one set of sizes. It is recorded when the sizes are seen for the second time, and
replayed from then on; where an address differs from the last call's, the kernels that hold it are
updated first, so that nothing is copied. Addresses that come back get an executable copy of the
graph for themselves, which needs no update. Graphs unused for longest go first when they pass the
limit of bytes. A call that cannot be recorded runs as it would have without, and ``fallbacks``
counts why.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.runtime.binding import Plan
from tvmcap.runtime.cuda_graph import CaptureError, Cuda, Node
from tvmcap.runtime.recording import Entry, Record, capture

LIMIT_BYTES = 64 << 20
#: Sizes remembered as seen once, and sizes with a graph or the reason why they have none.
_SEEN_KEPT = 4096
#: Executables of one graph, each for addresses of its own, that are made in its life at most.
_DUPLICATES = 16
#: Sets of addresses remembered as met once.
_MET_KEPT = 64


class Graphs:
    """The recorded calls of one context."""

    def __init__(self, cuda: Cuda, record: Record, limit_bytes: int = LIMIT_BYTES) -> None:
        self._cuda = cuda
        self._record = record
        self._limit = limit_bytes
        self._entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()  # by a plan's sizes
        self._seen: dict[tuple[int, ...], None] = {}
        self._last: Entry | None = None
        self._plan: Plan | None = None  # of the last replay, as the next two
        self._addresses: tuple[int, ...] = ()
        self._replay = 0
        self._launch = cuda.launch_raw
        self.nbytes = 0
        self.captures = self.replays = self.updates = self.duplicates = self.evictions = 0
        self.fallbacks: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def replay(
        self,
        plan: Plan,
        addresses: tuple[int, ...],
        values: Sequence[Any],
        targets: Sequence[Any],
        stream: int,
    ) -> bool:
        """Launch the graph of ``plan`` on these tensors; False where the caller has to run it.

        Raises LibraryError where the launch fails.
        """
        if plan is not self._plan or addresses != self._addresses:
            self._plan = None  # what is found may move or free the executable of the last one
            replay = self._find(plan.sizes, addresses, values, targets)
            if not replay:
                return False
            self._plan, self._addresses, self._replay = plan, addresses, replay
        status = self._launch(self._replay, stream)
        if status:
            self._cuda.check(status, "cudaGraphLaunch")
        self.replays += 1
        return True

    def _find(
        self,
        sizes: tuple[int, ...],
        addresses: tuple[int, ...],
        values: Sequence[Any],
        targets: Sequence[Any],
    ) -> int:
        """Return the executable graph of a call, which is recorded if need be; 0 for none."""
        entry = self._entries.get(sizes)
        if entry is None:
            entry = self._first_calls(sizes, addresses, values, targets)
            if entry is None:
                return 0
        replay = entry.replays.get(addresses) or self._other(entry, addresses)
        if not replay:
            self.fallbacks[entry.reason] += 1
        elif entry is not self._last:
            self._entries.move_to_end(sizes)
            self._last = entry
        return replay

    def _first_calls(
        self,
        sizes: tuple[int, ...],
        addresses: tuple[int, ...],
        values: Sequence[Any],
        targets: Sequence[Any],
    ) -> Entry | None:
        """Record a call at its second time: the first loads what the kernels need."""
        if sizes not in self._seen:
            if len(self._seen) >= _SEEN_KEPT:
                self._seen.clear()
            self._seen[sizes] = None
            return None
        del self._seen[sizes]
        try:
            entry = capture(self._cuda, self._record, addresses, values, targets)
            self.captures += 1
        except (CaptureError, LibraryError) as e:
            entry = Entry(str(e))
        self._entries[sizes] = entry
        self.nbytes += entry.nbytes
        while len(self._entries) > 1 and (
            self.nbytes > self._limit or len(self._entries) > _SEEN_KEPT
        ):
            self._evict(self._entries.popitem(last=False)[1])
        return entry

    def _other(self, entry: Entry, addresses: tuple[int, ...]) -> int:
        """Return an executable graph for addresses that none has yet; 0 where that is impossible.

        It is the movable one, but for addresses met before a new one where that can be had, which
        is movable from then on. One whose update fails is freed: what its kernels hold is not known
        any more.
        """
        if entry.users is None:
            return 0
        replay, old = 0, (-1,) * len(addresses)
        room = len(entry.replays) < _DUPLICATES and self.nbytes < self._limit
        if (addresses in entry.met and room) or entry.movable not in entry.replays:
            replay = self._duplicate(entry)
        if not replay and entry.movable not in entry.replays:
            return 0
        if not replay:
            old = entry.movable
            if len(entry.met) >= _MET_KEPT:
                entry.met.clear()
            entry.met[addresses] = None
            replay = entry.replays.pop(entry.movable)
            self.updates += 1
        try:
            self._update(entry, replay, old, addresses)
        except BaseException:
            self._cuda.destroy(ctypes.c_void_p(0), ctypes.c_void_p(replay))
            raise
        entry.replays[addresses], entry.movable = replay, addresses
        return replay

    def _duplicate(self, entry: Entry) -> int:
        """Make a further executable of a graph; 0, and why, where the device has no room for it."""
        cuda = self._cuda
        try:
            stream = cuda.new_stream()
            try:
                graph = ctypes.c_void_p(entry.graph)
                replay, nbytes = cuda.instantiate(graph, stream, entry.nodes)
            finally:
                cuda.destroy_stream(stream)
        except LibraryError as e:
            entry.reason = str(e)
            return 0
        entry.nbytes += nbytes
        self.nbytes += nbytes
        self.duplicates += 1
        return replay.value or 0

    def _update(
        self, entry: Entry, replay: int, old: Sequence[int], addresses: Sequence[int]
    ) -> None:
        """Put addresses into the kernels of an executable graph, where they are not the old."""
        changed: dict[Node, None] = {}
        write = self._cuda.write
        for users, was, new in zip(entry.users or (), old, addresses, strict=True):
            if was != new:
                for node, slots in users:
                    for slot in slots:
                        write(node, slot, new)
                    changed[node] = None
        handle = ctypes.c_void_p(replay)
        for node in changed:
            self._cuda.update(handle, node)

    def _evict(self, entry: Entry) -> None:
        self.nbytes -= entry.nbytes
        self.evictions += 1
        self._destroy(entry)

    def _destroy(self, entry: Entry) -> None:
        if entry is self._last:
            self._last = None
        for replay in entry.replays.values():
            self._cuda.destroy(ctypes.c_void_p(0), ctypes.c_void_p(replay))
        self._cuda.destroy(ctypes.c_void_p(entry.graph), ctypes.c_void_p(0))

    def __del__(self) -> None:
        """Free what a thread that ended leaves behind."""
        self.clear()

    def clear(self) -> None:
        """Free every graph."""
        self._plan = None
        for entry in self._entries.values():
            self._destroy(entry)
        self._entries.clear()
        self._seen.clear()
        self.nbytes = 0

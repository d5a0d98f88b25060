"""Threads: one context each, made when a thread first needs it, on code and weights of all."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.runtime.context import CpuContext, CudaContext, CudaMachine
from tvmcap.runtime.loader import Library


class Contexts:
    """Makes the contexts of a library, and knows those that live."""

    def __init__(self, library: Library, manifest: Manifest) -> None:
        self._library = library
        self._manifest = manifest
        cuda = manifest.target["kind"] == "cuda"
        self._machine = CudaMachine(library, manifest) if cuda else None
        self._all = _Living()
        self._users = _Living()
        self._graph_bytes: int | None = None
        self._refusal = ""
        if cuda:
            _on_gpu.add(self)

    def new(self, user: Threads) -> CpuContext | CudaContext:
        """Return a context for the calling thread; LibraryError once the library is closed."""
        self.check()
        self._users.add(user)
        context: CpuContext | CudaContext
        if self._machine is None:
            context = CpuContext(self._library, self._manifest)
        else:
            context = CudaContext(self._machine, self._manifest)
            if self._graph_bytes is not None:
                context.use_graphs(self._graph_bytes)
        self._all.add(context)
        if self._refusal:  # closed while it was made
            context.close()
        self.check()
        return context

    def use_graphs(self, limit_bytes: int) -> None:
        """Let every context record and replay calls; LibraryError where that is not possible."""
        self.check()
        if self._machine is None:
            raise LibraryError(
                "expected a library for 'cuda' to record as CUDA graphs, got one for "
                f"{self._manifest.target['kind']!r}"
            )
        for context in self._all:
            context.use_graphs(limit_bytes)
        self._graph_bytes = limit_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes that the contexts hold for intermediates."""
        return sum(context.arena.nbytes for context in self._all)

    def check(self) -> None:
        """Raise LibraryError where no call is possible any more."""
        if self._refusal:
            raise LibraryError(self._refusal)

    def refuse(self, why: str) -> None:
        """Let every later call raise LibraryError, in this thread before its arguments are seen."""
        self._refusal = self._refusal or why
        for user in self._users:
            user.leave()
        for context in self._all:
            context.run = self._refuse

    def _refuse(self, *_: Any) -> NoReturn:
        raise LibraryError(self._refusal)

    def close(self, why: str) -> None:
        """Free the memory of every context and refuse later calls."""
        self.refuse(why)  # a context that is made from now on closes itself
        for context in self._all:
            context.close()
        self._machine = None


class _Living:
    """Objects that live, which several threads may add to and list at once, as a WeakSet's not."""

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, thing: Any) -> None:
        self._by_id[id(thing)] = thing

    def __iter__(self) -> Iterator[Any]:
        found = [reference() for reference in self._by_id.valuerefs()]
        return iter([thing for thing in found if thing is not None])


class _Missing:
    """What is found where a thread has no context: a new one, or the reason, as LibraryError."""

    def __get__(self, threads: Threads, _: type) -> CpuContext | CudaContext:
        threads.here = threads.contexts.new(threads)
        return threads.here


class Threads(threading.local):
    """``here`` is the context of the calling thread, made when it is first looked at.

    LibraryError once calls are refused.
    """

    here: CpuContext | CudaContext = _Missing()  # type: ignore[assignment]  # hidden by a thread's

    def __init__(self, contexts: Contexts) -> None:  # runs in every thread that meets the object
        self.contexts = contexts

    def enter(self) -> None:
        """Make the context of the calling thread now."""
        self.here = self.contexts.new(self)

    def leave(self) -> None:
        """Have no ``here`` in the calling thread any more.

        The context is kept elsewhere: in a forked child nothing of CUDA can be freed.
        """
        own = vars(self)
        if "here" in own:
            own["last"] = own.pop("here")


_on_gpu: weakref.WeakSet[Contexts] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """CUDA does not survive a fork (CUDA C++ Programming Guide, "Initialization")."""
    for contexts in _on_gpu:
        contexts.refuse(
            "this library was loaded on a GPU before the process was forked, which CUDA does not "
            "survive: load it in the child, or start the child with the 'spawn' method"
        )
    _on_gpu.clear()  # nothing of theirs can be freed here


@atexit.register
def _free_at_exit() -> None:
    """Free device memory while the driver is there: what TVM frees later ends the process."""
    for contexts in list(_on_gpu):
        contexts.close("this library was closed: the interpreter ends")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)

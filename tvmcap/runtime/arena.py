"""Arena: the memory of a context's intermediates, made once and passed to every call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import evaluate, grows
from tvmcap.runtime.loader import Library, empty

_GROWTH = 2


def _names(entry: str) -> tuple[str, str]:
    """Name what ``library.entry`` adds to a library for one of its entries."""
    return f"{entry}_in_arena", f"{entry}_constants"


class Arena:
    """Storage for the intermediates of one call at a time, and the function that takes it.

    Where every dimension has an upper bound, and no storage shrinks as one grows, it is made at
    once for the largest; else it grows, at least doubling, with the largest call so far. A library
    without intermediates has none.

    Attributes
    ----------
    vm: the virtual machine of the same entry, which shows each kernel to those that watch.
    entry: the function to call, with ``tail`` as its last arguments.
    storages: uint8 tensors.
    growths: how often it was made larger after the first call.
    """

    def __init__(self, vm: Any, manifest: Manifest, library: Library) -> None:
        self.vm = vm
        self._device = library.device
        self._sizes = manifest.arena or ()
        self._name = manifest.entry
        host, constants = _names(self._name)
        try:
            if manifest.arena is None:  # made by hand
                self.entry, self._constants = vm[self._name], None
            else:
                self.entry, self._constants = library.function(host), tuple(vm[constants]())
        except AttributeError as e:
            raise LibraryError(
                f"the code of the library is not what its manifest says: {e}; build it again"
            ) from e
        self._host = self.entry
        self.growths = 0
        self._hold((), (0,) * len(self._sizes))
        most = {dim.name: dim.max for dim in manifest.signature.dims if dim.max is not None}
        known = len(most) == len(manifest.signature.dims)
        self.bounded = known and all(map(grows, self._sizes))
        if self._sizes and self.bounded:
            self._allocate(self.needs(most), most)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(self._capacity)

    def needs(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the bytes of each storage at sizes."""
        return tuple(evaluate(size, dims) for size in self._sizes)

    def fit(self, dims: Mapping[str, int]) -> bool:
        """Grow to what ``dims`` need; returns whether it had to.

        Raises LibraryError where the memory cannot be had.
        """
        if self.bounded or not self._sizes:
            return False
        needs = self.needs(dims)
        first = not self.storages  # also of a call that needs no bytes, with a size of 0
        enough = all(need <= have for need, have in zip(needs, self._capacity, strict=True))
        if enough and not first:
            return False
        grown = zip(needs, self._capacity, strict=True)
        self._allocate(tuple(max(need, _GROWTH * have) for need, have in grown), dims)
        self.growths += not first
        return True

    @contextlib.contextmanager
    def on_machine(self, around: Callable[[Any], Any]) -> Iterator[None]:
        """Let calls go to ``around`` the virtual machine's function, which allocates for itself."""
        last = self.entry
        self.entry = around(self.vm[self._name])
        self._hold(self.storages, self._capacity)
        try:
            yield
        finally:
            self.entry = last if self.vm is not None else None
            self._hold(self.storages, self._capacity)

    def release(self) -> None:
        """Free the storage and the code; the arena cannot be used after that."""
        self._constants = None
        self.vm = self.entry = self._host = None
        self._hold((), ())

    def _allocate(self, sizes: tuple[int, ...], dims: Mapping[str, int]) -> None:
        self._hold((), (0,) * len(sizes))  # before the larger ones are made: both may not fit
        try:
            storages = tuple(empty((max(1, size),), "uint8", self._device) for size in sizes)
        except LibraryError as e:
            raise LibraryError(
                f"no memory for intermediates: {sum(sizes)} bytes are needed for the sizes "
                f"{dict(dims)}; free memory, or build with a smaller Dim(max=...); original: {e}"
            ) from e
        self._hold(storages, sizes)

    def _hold(self, storages: tuple[Any, ...], capacity: tuple[int, ...]) -> None:
        """Keep storage, and pass it to calls of the function that takes it."""
        self.storages, self._capacity = storages, capacity
        self.tail: tuple[Any, ...] = ()
        if self._constants is not None and self.entry is self._host:
            self.tail = (*self._constants, *storages, self._device.index)

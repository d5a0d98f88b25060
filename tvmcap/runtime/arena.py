"""Arena: the memory of a context's intermediates, made once and passed to every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvmcap.base import cudart
from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import evaluate
from tvmcap.runtime.loader import ffi

#: What ``library.arena`` adds to a library.
_MAKE, _ENTRY = "make_arena", "main_in_arena"
_GROWTH = 2


def _names(entry: str) -> tuple[str, str]:
    """Name what makes the arena of an entry, and the entry that takes it."""
    return (_MAKE, _ENTRY) if entry == "main" else (f"make_{entry}_arena", f"{entry}_in_arena")


class Arena:
    """Storage for the intermediates of one call at a time.

    Where every size has an upper bound it is made at once for the largest; else it grows, at least
    doubling, with the largest call so far. A library without intermediates has none.

    Attributes
    ----------
    vm: the virtual machine that it belongs to.
    entry: the function of the library to call, with ``storages`` as its last arguments.
    growths: how often it was made larger after the first call.
    """

    def __init__(self, vm: Any, manifest: Manifest) -> None:
        self.vm = vm
        self._sizes = manifest.arena or ()
        make, entry = _names(manifest.entry)
        try:
            self._make: Any = vm[make] if self._sizes else None
            self.entry = vm[entry] if self._sizes else vm[manifest.entry]
        except AttributeError as e:
            raise LibraryError(
                f"the code of the library is not what its manifest says: {e}; build it again"
            ) from e
        self.storages: tuple[Any, ...] = ()
        self.growths = 0
        self._capacity: tuple[int, ...] = (0,) * len(self._sizes)
        most = {dim.name: dim.max for dim in manifest.signature.dims if dim.max is not None}
        self.bounded = len(most) == len(manifest.signature.dims)
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
        self.storages = ()  # before the larger ones are made: both may not fit
        grown = zip(needs, self._capacity, strict=True)
        self._allocate(tuple(max(need, _GROWTH * have) for need, have in grown), dims)
        self.growths += not first
        return True

    def release(self) -> None:
        """Free the storage and the code; the arena cannot be used after that."""
        self.storages, self._capacity = (), ()
        self.vm = self.entry = self._make = None

    def _allocate(self, sizes: tuple[int, ...], dims: Mapping[str, int]) -> None:
        try:
            self.storages = tuple(self._make(ffi().Shape(sizes)))
        except Exception as e:
            cudart.forget_error()
            self._capacity = (0,) * len(sizes)
            raise LibraryError(
                f"no memory for intermediates: {sum(sizes)} bytes are needed for the sizes "
                f"{dict(dims)}; free memory, or build with a smaller Dim(max=...); original: {e}"
            ) from e
        self._capacity = sizes

"""What a call does, seen from the virtual machine: kernels launched, memory alive at once."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvmcap.runtime.arena import Arena

#: Host functions that Relax makes to compute sizes (VMShapeLower, ComputePrimValue): no kernels.
_HOST_FUNCTION = re.compile(r"(shape_func|compute_symbolic_expr)(_?\d+)?$")


@dataclass(frozen=True)
class Trace:
    """One call: the kernels in order, and the largest sum of intermediates' bytes alive at once."""

    kernels: tuple[str, ...]
    intermediate_bytes: int


def trace_call(vm: Any, call: Callable[[], object]) -> Trace:
    """Watch ``call``, which runs ``vm``'s main once.

    A PrimFunc counts as one kernel. Memory that a kernel allocates inside itself is not seen.
    """
    import tvm_ffi

    kernels: list[str] = []
    live = _Storages()

    def observe(function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        live.drop_dead()
        if not before and symbol == "vm.builtin.alloc_storage":
            _, shape, _, dtype, *_ = args
            live.add(result, math.prod(shape) * tvm_ffi.dtype(str(dtype)).itemsize)
        if before and not symbol.startswith("vm.") and not _HOST_FUNCTION.match(symbol):
            kernels.append(symbol)
        return 0

    _run(vm, observe, call)
    return Trace(tuple(kernels), live.peak)


Watch = Callable[[str], object]
"""(name of a kernel) -> None."""


class Interrupted(Exception):
    """A callback of ``watched`` raised ``error`` in the middle of a call."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def watched(
    arena: Arena, lock: AbstractContextManager[Any], before: Watch, after: Watch
) -> Iterator[None]:
    """Call ``before`` and ``after`` with the name of each kernel of calls on ``arena``.

    Within another ``watched`` of the arena the inner one sees the calls, the outer those after it.
    Each call holds ``lock``, which the virtual machine's other users hold. A call ends in
    Interrupted where a callback raises.
    """
    raised: list[BaseException] = []

    def observe(function: Any, symbol: str, starts: bool, result: Any, *args: Any) -> int:
        if not symbol.startswith("vm.") and not _HOST_FUNCTION.match(symbol):
            try:
                (before if starts else after)(symbol)
            except BaseException as e:  # TVM would pass a copy on, of another type
                raised.append(e)
                raise
        return 0

    vm = arena.vm

    def around(main: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            try:
                with lock:
                    _run(vm, observe, lambda: main(*args))
            except Exception as e:
                if raised:
                    raise Interrupted(raised.pop()) from e
                raise

        return call

    with arena.on_machine(around):
        yield


def _run(vm: Any, observe: Callable[..., int], call: Callable[[], object]) -> None:
    """Show ``observe`` what ``vm`` runs within ``call``."""
    import tvm_ffi

    vm["set_instrument"](tvm_ffi.convert(observe))
    try:
        call()
    finally:
        vm["set_instrument"](None)


class _Storages:
    """Storage objects that someone else still holds, told by their reference counts."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, int]] = []
        self.peak = 0

    def add(self, storage: Any, size: int) -> None:
        self._held.append((storage, size))
        self.peak = max(self.peak, sum(size for _, size in self._held))

    def drop_dead(self) -> None:
        self._held = [(storage, size) for storage, size in self._held if _references(storage) > 1]


def _references(storage: Any) -> int:
    """Strong references: the low half of the first word of every TVMFFIObject (tvm/ffi/c_api.h)."""
    handle = storage.__chandle__()
    return ctypes.c_uint32.from_address(handle).value

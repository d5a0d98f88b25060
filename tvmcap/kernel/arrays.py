"""The arguments of candidates in the process that runs them, and the outputs they should give.

On a GPU with PyTorch they stay on the device: drawn, restored, copied and compared there, so that
a candidate costs its own run and no transfer. Elsewhere numpy holds them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from tvmcap.kernel import check

_CHUNK = 1 << 23
_GUARD, _UNTOUCHED = 4096, 0xA5
"""Bytes before and after each argument that no candidate may write to, and what they hold."""


class HarmError(Exception):
    """A candidate wrote where it should not."""


class HostArrays:
    """Arguments in numpy; each candidate gets fresh tensors."""

    def __init__(self, args: list[dict[str, Any]], seed: int, device: Any) -> None:
        self.args, self.device = args, device
        self.inputs = check.random_inputs(args, seed)
        self.nbytes = sum(int(x.nbytes) for x in self.inputs)
        self.expected: dict[int, Any] = {}
        self._memory: list[tuple[list[Any], list[Any]]] = []  # of each set
        self._written: frozenset[int] = frozenset()

    def sets(self, count: int, written: Sequence[int]) -> list[list[Any]]:
        """Return ``count`` copies of the arguments, all as they were drawn."""
        self._written, self._memory = frozenset(written), []
        if self.device != tvm.cpu(0):
            return [check.to_device(self.inputs, self.device) for _ in range(count)]
        sets = []
        for _ in range(count):
            pairs = [self._guarded(values) for values in self.inputs]
            sets.append([tensor for tensor, _ in pairs])
            self._memory.append((sets[-1], [memory for _, memory in pairs]))
        return sets

    def _guarded(self, values: Any) -> tuple[Any, Any]:
        """Return a tensor of TVM's own memory, and that memory with the guards around it."""
        size = int(values.nbytes)
        memory = np.from_dlpack(tvm.runtime.empty((size + 2 * _GUARD,), "uint8", self.device))
        memory[:] = _UNTOUCHED
        if not size:
            return tvm.runtime.tensor(values, self.device), memory
        inner = memory[_GUARD:-_GUARD]
        inner[:] = _bytes(values)
        return tvm.runtime.from_dlpack(inner)._create_view(values.shape, str(values.dtype)), memory

    def unharmed(self, tensors: Sequence[Any]) -> None:
        """Raise HarmError where more of one of the ``sets`` was written than may be."""
        for memory in (memory for known, memory in self._memory if known is tensors):
            for i, (whole, values) in enumerate(zip(memory, self.inputs, strict=True)):
                _require(i, (whole[:_GUARD] == _UNTOUCHED).all(), "before")
                _require(i, (whole[-_GUARD:] == _UNTOUCHED).all(), "after")
                inner = whole[_GUARD:-_GUARD]
                _require(i, i in self._written or np.array_equal(inner, _bytes(values)), "to")

    def expect(self, outputs: dict[int, Any]) -> None:
        """Set what the outputs should be, as numpy arrays by argument."""
        self.expected = outputs

    def mismatch(self, tensors: Sequence[Any]) -> str | None:
        """Say which output is wrong and how, or return None."""
        for i, expected in self.expected.items():
            got = check.to_numpy(tensors[i])
            wrong = check.mismatch(got, expected, check.precision(self.args[i]))
            if wrong is not None:
                return f"output {i}: {wrong}"
        return None


class DeviceArrays:
    """Arguments as tensors of PyTorch on a device; candidates share them.

    What a candidate writes is restored before the next one runs. ``device`` is a TVM device, whose
    name PyTorch knows as well.
    """

    def __init__(self, args: list[dict[str, Any]], seed: int, device: str) -> None:
        self.torch = importlib.import_module("torch")
        self.args, self.device = args, device
        make = self.torch.Generator(device=device).manual_seed(seed % (1 << 63))
        self.drawn = [self._draw(arg, make, device) for arg in args]
        self.nbytes = sum(int(t.nbytes) for t in self.drawn)
        self.expected: dict[int, tuple[Any, float]] = {}
        self._copies: list[list[Any]] = []
        self._views: list[list[Any]] = []  # the same memory as TVM's tensors
        self._memory: list[list[Any]] = []  # that memory and what is around it
        self._written: frozenset[int] = frozenset()

    def _draw(self, arg: dict[str, Any], make: Any, device: str) -> Any:
        torch, shape = self.torch, tuple(arg["shape"])
        dtype = getattr(torch, arg["dtype"])
        if dtype.is_floating_point:
            normal = torch.randn(shape, generator=make, device=device, dtype=torch.float32)
            return normal.to(dtype)
        low, high = 0, 2
        if arg["dtype"] in ("int8", "uint8"):
            info = torch.iinfo(dtype)
            low, high = int(info.min), int(info.max) + 1
        whole = torch.randint(low, high, shape, generator=make, device=device, dtype=torch.int32)
        return whole.to(dtype)

    def sets(self, count: int, written: Sequence[int]) -> list[list[Any]]:
        """Return ``count`` copies of the arguments, those of ``written`` as they were drawn."""
        from_dlpack = importlib.import_module("tvm_ffi").from_dlpack
        self._written = frozenset(written)
        while len(self._copies) < count:
            pairs = [self._guarded(t) for t in self.drawn]
            self._copies.append([tensor for tensor, _ in pairs])
            self._memory.append([memory for _, memory in pairs])
            self._views.append([from_dlpack(t) for t in self._copies[-1]])
        for copy in self._copies[:count]:
            for i in written:
                copy[i].copy_(self.drawn[i])
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return self._views[:count]

    def _guarded(self, drawn: Any) -> tuple[Any, Any]:
        """Return a copy of a tensor, and its memory with the guards around it."""
        torch, size = self.torch, drawn.numel() * drawn.element_size()
        whole = torch.full((size + 2 * _GUARD,), _UNTOUCHED, dtype=torch.uint8, device=drawn.device)
        copy = whole[_GUARD:-_GUARD].view(drawn.dtype).view(drawn.shape)
        return copy.copy_(drawn), whole

    def unharmed(self, tensors: Sequence[Any]) -> None:
        """Raise HarmError where more of one of the ``sets`` was written than may be."""
        (at,) = (i for i, v in enumerate(self._views) if v is tensors)
        where, flags = list[tuple[int, str]](), []
        for i, (whole, drawn) in enumerate(zip(self._memory[at], self.drawn, strict=True)):
            where += [(i, "before"), (i, "after")]
            flags += [(whole[:_GUARD] == _UNTOUCHED).all(), (whole[-_GUARD:] == _UNTOUCHED).all()]
            if i not in self._written:
                where.append((i, "to"))
                inner = drawn.reshape(-1).view(self.torch.uint8)
                flags.append((whole[_GUARD:-_GUARD] == inner).all())
        for (i, place), ok in zip(where, self.torch.stack(flags).tolist(), strict=True):
            _require(i, ok, place)

    def expect(self, outputs: dict[int, Any]) -> None:
        """Set what the outputs should be, as numpy arrays by argument."""
        for i, values in outputs.items():
            expected = self.torch.from_numpy(values).to(self.drawn[i].device)
            finite = expected[self.torch.isfinite(expected)].double()
            scale = float(finite.square().mean().sqrt()) if finite.numel() else 1.0
            self.expected[i] = (expected, scale or 1.0)

    def mismatch(self, tensors: Sequence[Any]) -> str | None:
        """Say which output of one of the ``sets`` is wrong and how, or return None."""
        (got,) = (c for c, v in zip(self._copies, self._views, strict=True) if v is tensors)
        for i, (expected, scale) in self.expected.items():
            wrong = self._compare(got[i], expected, scale, check.precision(self.args[i]))
            if wrong is not None:
                return f"output {i}: {wrong}"
        return None

    def _compare(self, got: Any, expected: Any, scale: float, dtype: str) -> str | None:
        """Compare as ``check.mismatch`` does, in pieces that bound the memory this takes."""
        pieces = zip(got.reshape(-1).split(_CHUNK), expected.reshape(-1).split(_CHUNK), strict=True)
        if not got.dtype.is_floating_point:
            wrong = sum(int((a != b).sum()) for a, b in pieces)
            return f"{wrong} of {got.numel()} integers differ" if wrong else None
        worst = 0.0
        for a, b in pieces:
            nans, infinities, error = self._compare_floats(a.to(b.dtype), b, scale)
            if not nans:
                return "NaNs are in other places"
            if not infinities:
                return "infinities are in other places"
            worst = max(worst, error)
        return check.beyond(worst, dtype)

    def _compare_floats(self, got: Any, expected: Any, scale: float) -> tuple[bool, bool, float]:
        torch = self.torch
        nans = (got.isnan() == expected.isnan()).all()
        infinite = got.isinf() | expected.isinf()
        infinities = (~infinite | (got == expected)).all()
        error = (got.double() - expected.double()).abs() / (expected.double().abs() + scale)
        worst = torch.where(expected.isfinite() & got.isfinite(), error, 0.0).max()
        found = torch.stack([nans.double(), infinities.double(), worst.double()]).tolist()
        return bool(found[0]), bool(found[1]), float(found[2])


def _bytes(values: Any) -> Any:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _require(argument: int, ok: Any, where: str) -> None:
    if not ok:
        raise HarmError(f"it wrote {where} the memory of argument {argument}, which it may not")


Arrays = HostArrays | DeviceArrays


def draw(args: list[dict[str, Any]], seed: int, name: str, device: Any) -> Arrays:
    """Draw the arguments where a candidate runs fastest; PyTorch must know device and dtypes."""
    if name == "cuda":
        with contextlib.suppress(ImportError):
            torch = importlib.import_module("torch")
            if torch.cuda.is_available() and all(hasattr(torch, a["dtype"]) for a in args):
                return DeviceArrays(args, seed, name)
    return HostArrays(args, seed, device)


class Kept:
    """The arguments of the workloads in use; the oldest go where they take too much memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.found: dict[str, tuple[Arrays, int]] = {}

    def get(self, key: str) -> Arrays | None:
        """Return what is kept under a key, now the youngest."""
        if key not in self.found:
            return None
        self.found[key] = self.found.pop(key)
        return self.found[key][0]

    def put(self, key: str, arrays: Arrays, nbytes: int) -> None:
        """Keep arguments that take ``nbytes``, with their copies."""
        self.found[key] = (arrays, nbytes)
        while len(self.found) > 1 and sum(n for _, n in self.found.values()) > self.limit:
            del self.found[next(iter(self.found))]

    def drop(self, key: str) -> None:
        """Forget what is kept under a key."""
        self.found.pop(key, None)


def copies(nbytes: int, wanted: int, most: int) -> int:
    """Return how many copies of arguments hold ``wanted`` bytes; small ones stay in the cache."""
    if nbytes <= wanted // 64:
        return 1
    return min(most, max(1, math.ceil(wanted / max(nbytes, 1))))

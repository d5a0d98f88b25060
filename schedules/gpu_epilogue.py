"""Epilogues inside TIRx kernels: access through flat views, each value computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.kernel import epilogue as ep
from tvmcap.schedules.gpu_math import balanced, legal, quick

_HALF = ("float16", "bfloat16")


def position(gemm: Any, row: Any, col: Any) -> list[Any]:
    """Index into an output: the flat row split into the leading dimensions, then the column."""
    row, lead = T.Cast("int64", row), []
    for extent in reversed(gemm.row_dims[1:]):
        extent = tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
        lead.append(tirx.floormod(row, extent))
        row = tirx.floordiv(row, extent)
    return [*([row] if gemm.row_dims else []), *reversed(lead), T.Cast("int64", col)]


class Views:
    """One-dimensional views of what the epilogue reads and writes, declared inside a kernel.

    LowerTIRx loses track of some parameters that are addressed by their own indices.
    """

    def __init__(self, gemm: Any) -> None:
        self.epilogue = gemm.fused.epilogue
        self.flat: dict[Any, Any] = {}
        self.words: dict[Any, Any] = {}
        narrow = (str(out.dtype) in _HALF for out in self.epilogue.outputs)
        self.is_quick = all(narrow)

    def declare(self) -> None:
        """Declare them; to be called where the kernel's body starts."""
        for buffer in dict.fromkeys([*self.epilogue.reads, *self.epilogue.outputs]):
            self.flat[buffer] = flatten(buffer)
        for buffer in filter(_has_words, self.epilogue.reads):
            self.words[buffer] = flatten(buffer, "uint32", 2)

    def load(self, buffer: Any, at: list[Any]) -> Any:
        """Read a parameter through its view; the kernel's own variables as they are."""
        if buffer not in self.flat:
            return tirx.BufferLoad(buffer, at)
        return tirx.BufferLoad(self.flat[buffer], [offset(buffer, at)])

    def values(self, accumulated: Any, at: list[Any]) -> list[Any]:
        """Return each output's value where the accumulator holds ``accumulated``.

        What is used more than once is computed before, in the frame that is open.
        """
        return self._values(accumulated, at, self.load)

    def pair(self, accumulated: Sequence[Any], at: list[Any]) -> list[tuple[Any, Any]]:
        """Return each output's values at two neighbouring columns, the first of which is even.

        What the two need of a 16-bit parameter is read at once.

        Parameters
        ----------
        accumulated: the accumulator's values at both.
        at: index of the first.
        """
        both = []
        known: list[tuple[Any, list[Any], Any]] = []
        for c in range(2):
            column = [*at[:-1], at[-1] + c if c else at[-1]]
            load = self._half_of_word(at, c, known)
            both.append(self._values(accumulated[c], column, load, balanced if c else None))
        return list(zip(*both, strict=True))

    def store(self, accumulated: Any, at: list[Any]) -> None:
        """Write every output."""
        for buffer, result in zip(self.epilogue.outputs, self.values(accumulated, at), strict=True):
            T.buffer_store(self.flat[buffer], result, [offset(buffer, at)])

    def _values(
        self,
        accumulated: Any,
        at: list[Any],
        load: Callable[..., Any],
        finish: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Keep shared values in cells of registers: TVM's simplifier would undo a Bind."""
        binds, values = self.epilogue.stores(accumulated, at, load)
        cells: dict[Any, Any] = {}

        def written(value: Any) -> Any:
            value = tvm_ffi.structural_map(value, (tirx.Var, lambda v: cells.get(v, v)))
            value = quick(legal(value)) if self.is_quick else legal(value)
            return value if finish is None else finish(value)

        for bind in binds:
            cell = T.alloc_local([1], str(bind.var.ty))
            T.buffer_store(cell, written(bind.value), [0])
            cells[bind.var] = tirx.BufferLoad(cell, [0])
        return [written(result) for _, result in values]

    def _half_of_word(
        self, at: list[Any], c: int, known: list[tuple[Any, list[Any], Any]]
    ) -> Callable[..., Any]:
        """Return how to read at column ``c`` of a pair; ``known`` holds the words read so far."""

        def load(buffer: Any, where: list[Any]) -> Any:
            first = [*where[:-1], at[-1]]
            column = at[-1] + c if c else at[-1]
            if buffer not in self.words or not ep.same(where[-1], column):
                return self.load(buffer, where)
            word = next(
                (w for b, i, w in known if b.same_as(buffer) and ep.same_all(i, first)), None
            )
            if word is None:
                index = tirx.floordiv(offset(buffer, first), 2)
                word = T.Bind(tirx.BufferLoad(self.words[buffer], [index]))
                known.append((buffer, first, word))
            return _half(word, str(buffer.dtype), c)

        return load


def _has_words(buffer: Any) -> bool:
    """Whether two columns of a 16-bit parameter lie in one word wherever the first is even."""
    if str(buffer.dtype) not in _HALF or not buffer.shape:
        return False
    last = buffer.shape[-1]
    return isinstance(last, tirx.IntImm) and int(last) % 2 == 0


def _half(word: Any, dtype: str, c: int) -> Any:
    if dtype == "bfloat16":  # the upper half of a float32
        bits = tirx.bitwise_and(word, T.uint32(0xFFFF0000)) if c else word << T.uint32(16)
        return tirx.Cast(dtype, tirx.reinterpret("float32", bits))
    return tirx.reinterpret(dtype, tirx.Cast("uint16", word >> T.uint32(16) if c else word))


def flatten(buffer: Any, dtype: str = "", ratio: int = 1) -> Any:
    """Declare a one-dimensional view of a contiguous buffer, of another dtype where given.

    ``ratio`` elements of the buffer make one of the view.
    """
    size: Any = 1
    for extent in buffer.shape:
        size = size * extent
    size = size if ratio == 1 else tirx.floordiv(size, ratio)
    return T.decl_buffer((size,), dtype or str(buffer.dtype), data=buffer.data)


def offset(buffer: Any, at: list[Any]) -> Any:
    """Index into the flat view of a contiguous buffer."""
    flat: Any = 0
    for extent, index in zip(buffer.shape, at, strict=True):
        flat = flat * extent + index
    return flat

"""Vectors of a GPU thread: read, computed and written in whole instructions of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmcap.kernel.slopes import shortened
from tvmcap.schedules.gpu_math import legal, quick
from tvmcap.schedules.hopper_epilogue import pack
from tvmcap.schedules.row_plan import itemsize

Expr = Any
Buffer = Any

VECTOR = 8
"""Neighbouring elements of a thread: 16 bytes of 16-bit values."""
BYTES = 16
"""What one instruction moves at most."""
FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of which there are vectors."""
_HALF = FLOATS[1:]
# what is written as a vector of a local array leaves in words of its own otherwise
_STORE = (
    "__forceinline__ __device__ void tvmcap_store16("
    "void* to, unsigned a, unsigned b, unsigned c, unsigned d)"
    '{ asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"'
    ' :: "l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }'
)


def move(to: Buffer, to_at: Expr, source: Buffer, at: Expr) -> None:
    """Copy a vector."""
    lanes = min(VECTOR, BYTES // itemsize(source))
    for part in range(0, VECTOR, lanes):
        with T.vectorized(lanes) as i:
            T.buffer_store(to, source[at + (part + i)], [to_at + (part + i)])


class Vector:
    """Registers for a vector of a buffer's elements, of 16 or 32 bits.

    ``pairs``: two 16-bit values are one word; TVM rewrites bfloat16 for targets before sm_80, where
    they cannot be.
    """

    def __init__(self, buffer: Buffer, pairs: bool) -> None:
        self.dtype, item = str(buffer.dtype), itemsize(buffer)
        self.values = T.alloc_buffer((VECTOR,), self.dtype, scope="local")
        self.words: Any = None
        if pairs or item == 4:
            count = (VECTOR * item // 4,)
            self.words = T.decl_buffer(count, "uint32", data=self.values.data, scope="local")

    def at(self, pair: Any, c: int) -> Expr:
        """Return element ``2 * pair + c``."""
        if self.words is None or self.dtype != "bfloat16":
            return self.values[pair * 2 + c]
        word = self.words[pair]  # the upper half of a float32 is its bfloat16
        bits = T.bitwise_and(word, T.uint32(0xFFFF0000)) if c else word << T.uint32(16)
        return T.Cast("bfloat16", T.reinterpret("float32", bits))


class Result(Vector):
    """A vector of an output: computed to registers, then written."""

    def __init__(self, buffer: Buffer, flat: Buffer, pairs: bool) -> None:
        super().__init__(buffer, pairs)
        self.flat = flat

    def compute(self, value: Callable[[Any, int], Expr]) -> None:
        """Compute ``value(pair, c)`` for every element ``2 * pair + c``."""
        packs = self.words is not None and self.dtype in _HALF
        with T.unroll(VECTOR // 2) as i:
            if packs:
                T.buffer_store(self.words, pack(self.dtype, value(i, 0), value(i, 1)), [i])
                return
            for c in range(2):
                T.buffer_store(self.values, value(i, c), [i * 2 + c])

    def write(self, start: Expr) -> None:
        """Write them from element ``start`` of the output on."""
        if self.words is None:
            move(self.flat, start, self.values, 0)
            return
        lanes = BYTES // itemsize(self.flat)
        for part in range(VECTOR // lanes):
            words = [self.words[part * 4 + i] for i in range(4)]
            to = self.flat.ptr_to([start + part * lanes])
            T.evaluate(T.cuda.func_call("tvmcap_store16", to, *words, source_code=_STORE))


def written(value: Expr, target: Buffer) -> Expr:
    """Write an expression in what TIRx lowers; in quick forms where it is stored in 16 bits."""
    value = legal(value)
    return quick(shortened(value)) if str(target.dtype) in _HALF else value

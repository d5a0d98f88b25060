"""Vectors of a GPU thread: read, computed and written in whole instructions of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmcap.schedules.gpu_math import legal, quick
from tvmcap.schedules.hopper_epilogue import pack
from tvmcap.schedules.row_plan import itemsize

Expr = Any
Buffer = Any

VECTOR = 8
"""Neighbouring elements of a thread: 16 bytes of 16-bit values."""
BYTES = 16
"""What one instruction moves at most."""
_HALF = ("float16", "bfloat16")
# what is written as a vector of a local array leaves in words of its own otherwise
_STORE = (
    "__forceinline__ __device__ void tvmcap_store16("
    "void* to, unsigned a, unsigned b, unsigned c, unsigned d)"
    '{ asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"'
    ' :: "l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }'
)


def registers(buffer: Buffer) -> Buffer:
    """Return registers for a vector of a buffer's elements."""
    return T.alloc_buffer((VECTOR,), str(buffer.dtype), scope="local")


def move(to: Buffer, to_at: Expr, source: Buffer, at: Expr) -> None:
    """Copy a vector."""
    lanes = min(VECTOR, BYTES // itemsize(source))
    for part in range(0, VECTOR, lanes):
        with T.vectorized(lanes) as i:
            T.buffer_store(to, source[at + (part + i)], [to_at + (part + i)])


class Result:
    """A vector of an output: computed to registers, then written.

    ``packs``: two 16-bit values are rounded to one word; TVM rewrites bfloat16 for targets before
    sm_80, where they cannot be.
    """

    def __init__(self, buffer: Buffer, flat: Buffer, packs: bool) -> None:
        self.values, self.flat, self.dtype = registers(buffer), flat, str(buffer.dtype)
        self.words: Any = None
        if packs and self.dtype in _HALF:
            words = (VECTOR // 2,)
            self.words = T.decl_buffer(words, "uint32", data=self.values.data, scope="local")

    def compute(self, value: Callable[[Any], Expr]) -> None:
        """Compute ``value(i)`` for every element."""
        if self.words is None:
            with T.unroll(VECTOR) as i:
                T.buffer_store(self.values, value(i), [i])
            return
        with T.unroll(VECTOR // 2) as i:
            word = pack(self.dtype, value(i * 2), value(i * 2 + 1))
            T.buffer_store(self.words, word, [i])

    def write(self, start: Expr) -> None:
        """Write them from element ``start`` of the output on."""
        if self.words is None:
            move(self.flat, start, self.values, 0)
            return
        words = [self.words[i] for i in range(VECTOR // 2)]
        to = self.flat.ptr_to([start])
        T.evaluate(T.cuda.func_call("tvmcap_store16", to, *words, source_code=_STORE))


def written(value: Expr, target: Buffer) -> Expr:
    """Write an expression in what TIRx lowers; in quick forms where it is stored in 16 bits."""
    value = legal(value)
    return quick(value) if str(target.dtype) in _HALF else value

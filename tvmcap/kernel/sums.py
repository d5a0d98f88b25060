"""What a kernel of sums over the rows of a matrix computes, read off its PrimFunc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi

from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.vectors import FLOATS, VECTOR
from tvmcap.schedules.hopper_plan import SM_COUNT
from tvmcap.schedules.row_plan import WARP, itemsize

Expr = Any
Buffer = Any

_THREADS = (1024, 512, 256)
_AHEAD, _LEAST_AHEAD = 3, 2  # measured on an H200: more gains nothing, less takes longer


@dataclass(frozen=True)
class Sums:
    """What a PrimFunc adds up over rows, and what it computes before and after.

    Attributes
    ----------
    params: the parameters of the PrimFunc.
    rows, columns: extents of the matrix; rows may be symbolic.
    row, column: variables that expressions are written in.
    matrices: outputs [rows, columns] with their values; later ones may read earlier ones.
    total: the buffer of the sums, and what is added up.
    end: the output [columns] with its value, which reads the total.
    """

    params: tuple[Any, ...]
    rows: Expr
    columns: int
    row: Expr
    column: Expr
    matrices: tuple[tuple[Buffer, Expr], ...]
    total: tuple[Buffer, Expr]
    end: tuple[Buffer, Expr]

    @property
    def width(self) -> int:
        """Columns of a block."""
        return next(w for w in (64, 32) if self.columns % w == 0)

    def read(self) -> list[Buffer]:
        """Return the parameters that are read in whole vectors, at the point that is computed."""
        found: dict[Any, None] = {}
        written = [buffer for buffer, _ in self.matrices]

        def see(load: Any) -> None:
            buffer, point = load.source, [self.row, self.column]
            if len(load.indices) == 2 and ep.same_all(load.indices, point):
                if buffer not in written and str(buffer.dtype) in FLOATS:
                    found[buffer] = None

        for _, value in (*self.matrices, self.total):
            tvm_ffi.structural_walk(value, (tvm.ir.TensorLoad, see))
        return list(found)


@dataclass(frozen=True)
class Layout:
    """How a kernel of sums is laid out on a card.

    Attributes
    ----------
    cluster: blocks that part the rows between them.
    threads: of a block, one of which has a multiprocessor to itself.
    ahead: rows that a thread has under way beside the one that it computes; 0: it reads them as it
        needs them.
    """

    cluster: int
    threads: int
    ahead: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // WARP


def layout(s: Sums, capability: int, shared_bytes: int) -> Layout:
    """Choose the layout for a compute capability, 90 for sm_90, and a block's shared memory.

    As few and large blocks as fill the card: clusters of two take less time than clusters of eight.
    Shared memory bounds what is under way.
    """
    blocks = s.columns // s.width
    fits = (c for c in (2, 4, 8) if capability >= 90 and c * blocks <= SM_COUNT)
    cluster, row = max((1, *fits)), sum(itemsize(b) * VECTOR for b in s.read())
    for threads in _THREADS if capability >= 80 and row else ():
        # where the sums of warps and of a cluster's blocks meet, and its barrier
        reserved = (threads // WARP + cluster - 1) * s.width * 4 + 16
        ahead = min(_AHEAD, (shared_bytes - reserved) // (threads * row) - 1)
        if ahead >= (_LEAST_AHEAD if threads > _THREADS[-1] else 1):
            return Layout(cluster, threads, ahead)
    return Layout(cluster, _THREADS[-1], 0)

"""What a kernel of sums over the rows of a matrix computes, read off its PrimFunc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi

from tvmcap.kernel import epilogue as ep
from tvmcap.schedules.hopper_plan import SM_COUNT

Expr = Any
Buffer = Any


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
                if buffer not in written and _is_floating(buffer):
                    found[buffer] = None

        for _, value in (*self.matrices, self.total):
            tvm_ffi.structural_walk(value, (tvm.ir.TensorLoad, see))
        return list(found)


def _is_floating(buffer: Buffer) -> bool:
    return str(buffer.dtype) in ("float32", "float16", "bfloat16")


def cluster_of(s: Sums, clusters: bool) -> int:
    """Blocks that part the rows between them: as many as fill the card with all columns."""
    blocks = s.columns // s.width
    return max(c for c in (1, 2, 4, 8) if c == 1 or (clusters and c * blocks <= 4 * SM_COUNT))

"""Which blocks add up the rows of a matrix."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx


def summed_matrix(block: Any) -> list[Any] | None:
    """Return the shape [rows, columns] of the matrix whose rows a block adds up in float32.

    None for a block that does something else.
    """
    spatial = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.DataPar]
    reduced = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    store = block.body
    if len(spatial) != 1 or len(reduced) != 1 or not isinstance(store, tirx.BufferStore):
        return None
    if not isinstance(store.value, tirx.Add) or str(store.buffer.dtype) != "float32":
        return None
    loads: list[Any] = []
    tvm_ffi.structural_walk(store.value, (tvm.ir.TensorLoad, loads.append))
    read = [load for load in loads if not load.source.same_as(store.buffer)]
    point = [reduced[0].var, spatial[0].var]
    if len(read) != 1 or len(read[0].indices) != 2:
        return None
    if not all(map(tvm_ffi.structural_equal, read[0].indices, point)):
        return None
    return [reduced[0].dom.extent, spatial[0].dom.extent]


def sums_rows(func: tirx.PrimFunc) -> bool:
    """Whether the one reduction of a PrimFunc adds up the rows of a matrix."""
    found: list[Any] = []

    def see(block: Any) -> None:
        if any(v.iter_type == tirx.IterVar.CommReduce for v in block.iter_vars):
            found.append(summed_matrix(block))

    tvm_ffi.structural_walk(func.body, (tvm.s_tir.SBlock, see))
    return len(found) == 1 and found[0] is not None

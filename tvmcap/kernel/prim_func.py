"""What a PrimFunc says of itself: its arguments, what it writes and sums, its structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

_REDUCTION = 2


def is_tensor(param: Any) -> bool:
    """Whether a parameter of a PrimFunc is a tensor and not a number."""
    return isinstance(param.ty, tirx.BufferType)


def size_vars(func: Any) -> list[Any]:
    """List the symbolic extents of a PrimFunc's arguments in order of appearance."""
    found: list[Any] = []

    def see(var: Any) -> None:
        if not any(var.same_as(v) for v in found):
            found.append(var)

    for param in func.params:
        if is_tensor(param):
            for extent in param.shape:
                tvm_ffi.structural_walk(extent, (tirx.Var, see))
        else:
            see(param)
    return found


def written(func: Any) -> list[int]:
    """Return which tensor arguments, by index among those, the function writes."""
    stored: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, lambda s: stored.append(s.buffer)))
    tensors = [p for p in func.params if is_tensor(p)]
    return [i for i, p in enumerate(tensors) if any(p.same_as(b) for b in stored)]


def has_reduction(func: Any) -> bool:
    """Whether some block of the function reduces."""
    found = False

    def see(block: Any) -> None:
        nonlocal found
        found = found or any(int(v.iter_type) == _REDUCTION for v in block.iter_vars)

    tvm_ffi.structural_walk(func.body, (tvm.s_tir.SBlock, see))
    return found


def structure(func: Any) -> str:
    """Return the structural hash of a PrimFunc, whatever its attributes and names."""
    plain = tirx.PrimFunc(func.params, func.body, func.ret_type).with_attr("s_tir", True)
    return f"{tvm_ffi.structural_hash(plain) & (2**64 - 1):016x}"


def substitute(root: Any, values: Sequence[tuple[Any, Any]]) -> Any:
    """Return an expression or function with variables replaced: ``values`` has (old, new)."""

    def replace(var: Any) -> Any:
        return next((value for old, value in values if var.same_as(old)), var)

    return tvm_ffi.structural_map(root, (tirx.Var, replace))

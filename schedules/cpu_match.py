"""Which PrimFuncs are a product for the CPU GEMM, and one that reads a packed weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.sym import Analyzer

from tvmcap.kernel import epilogue as ep
from tvmcap.schedules.cpu_build import product
from tvmcap.schedules.cpu_target import pack_width

_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Gemm:
    """``C[batch, row, n] = epilogue(sum_k A[batch, row, k] * B)``.

    Attributes
    ----------
    a, b: parameters that hold the operands.
    layout: of B: "packed" ``[ceil(N / NR), K, NR]``, "kn" ``[batch, K, N]`` or "nk" ``[batch, N,
        K]``.
    batch: extents of the leading dimensions that A and B share.
    row_dims: extents of A's further dimensions but the last; flattened they are the rows.
    n, k: extents of the columns and of the reduction.
    fused: the PrimFunc taken apart.
    digest: hash of the whole computation.
    """

    a: Any
    b: Any
    layout: str
    batch: tuple[Any, ...]
    row_dims: tuple[Any, ...]
    n: Any
    k: Any
    fused: ep.Fused
    digest: str

    @property
    def rows(self) -> Any:
        """Rows of one product: an int, or an expression of symbolic dimensions."""
        return _plain(product(self.row_dims))

    def key(self) -> dict[str, Any]:
        """Return plain JSON that identifies the workload but for symbolic sizes."""
        return {
            "op": "gemm",
            "layout": self.layout,
            "dtypes": [
                str(self.a.dtype),
                str(self.b.dtype),
                str(self.fused.epilogue.outputs[0].dtype),
            ],
            "batch": [_size(e) for e in self.batch],
            "rows": _size(self.rows),
            "n": _size(self.n),
            "k": _size(self.k),
            "digest": self.digest,
        }

    def flops(self, sizes: Mapping[str, int]) -> float:
        """Return two operations for each multiply-add."""
        return 2.0 * float(evaluate(product([*self.batch, *self.row_dims, self.n, self.k]), sizes))

    def bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes of every tensor read or written once."""
        tensors = [self.a, self.b, *self.fused.epilogue.reads, *self.fused.epilogue.outputs]
        return float(sum(evaluate(product(t.shape), sizes) * _itemsize(t.dtype) for t in tensors))


def match(func: tirx.PrimFunc, target: Any) -> Gemm | None:
    """Return the matrix product that ``func`` is on llvm, or None."""
    if target.kind.name != "llvm":
        return None
    return read(func, lambda dtype: pack_width(dtype, target))


def read(func: tirx.PrimFunc, width: Callable[[str], int] | None = None) -> Gemm | None:
    """Return the matrix product that ``func`` is, or None; operands must be parameters.

    ``width`` gives the columns of a packed panel by dtype, where the target packs weights at all.
    """
    fused = ep.read(func)
    factors = fused and _factors(fused.block)
    if not fused or not factors:
        return None
    spatial = [v for v in fused.block.iter_vars if v.iter_type == tirx.IterVar.DataPar]
    (reduction,) = (v for v in fused.block.iter_vars if v.iter_type == tirx.IterVar.CommReduce)
    names = [v.var for v in spatial]
    for a, b in (factors, factors[::-1]):
        panel = None if width is None else width(str(b.source.dtype))
        layout = _layout(a, b, names, reduction.var, panel)
        if layout is None or not all(any(x.source.same_as(p) for p in func.params) for x in (a, b)):
            continue
        kind, depth = layout
        extents = [_plain(v.dom.extent) for v in spatial]
        batch, rows = tuple(extents[:depth]), tuple(extents[depth:-1])
        k = _plain(reduction.dom.extent)
        return Gemm(a.source, b.source, kind, batch, rows, extents[-1], k, fused, ep.digest(func))
    return None


def packed_matmul(
    x: te.Tensor, packed: te.Tensor, n: int, out_dtype: str | None = None
) -> te.Tensor:
    """Return the TE of ``x @ w`` for a weight packed by ``pack``; emit with ``op_pattern=4``.

    Parameters
    ----------
    x: shape (..., K).
    packed: shape (ceil(n / NR), K, NR), of x's dtype.
    n: columns of the weight before packing.
    out_dtype: dtype of the result; x's where None. The sum is kept in it here, in float32 in the
        kernel.
    """
    out = out_dtype or str(x.dtype)
    width = packed.shape[2]
    k = te.reduce_axis((0, packed.shape[1]), name="k")

    def at(*index: Any) -> Any:
        *lead, col = index
        left, right = x(*lead, k), packed(tirx.floordiv(col, width), k, tirx.floormod(col, width))
        if out != str(x.dtype):
            left, right = left.astype(out), right.astype(out)
        return te.sum(left * right, axis=k)

    return te.compute((*x.shape[:-1], n), at, name="packed_matmul")


def pack(weight: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Pack a (K, N) weight as ``[ceil(N / width), K, width]``, padded with zeros."""
    k, n = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -n % width)))
    return np.ascontiguousarray(padded.reshape(k, -1, width).transpose(1, 0, 2))


def evaluate(extent: Any, sizes: Mapping[str, int]) -> int:
    """Return the value of an extent at the sizes of the symbolic dimensions, by name."""
    if isinstance(extent, int):
        return int(extent)
    value = tvm_ffi.structural_map(
        extent, (tirx.Var, lambda v: tirx.IntImm("int64", sizes[v.name]) if v.name in sizes else v)
    )
    result: int = int(Analyzer().simplify(value))
    return result


def _factors(block: Any) -> tuple[Any, Any] | None:
    """Return the two loads of ``C = C + X * Y``, casts taken off, or None for another reduction."""
    store, init = block.body, block.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(init, tirx.BufferStore):
        return None
    if sum(v.iter_type == tirx.IterVar.CommReduce for v in block.iter_vars) != 1 or not _is_zero(
        init.value
    ):
        return None
    value = store.value
    if not isinstance(value, tirx.Add):
        return None
    for old, term in ((value.a, value.b), (value.b, value.a)):
        if (
            isinstance(old, tvm.ir.TensorLoad)
            and old.source.same_as(store.buffer)
            and isinstance(term, tirx.Mul)
        ):
            x, y = _uncast(term.a), _uncast(term.b)
            if all(
                isinstance(f, tvm.ir.TensorLoad) and str(f.source.dtype) in _FLOATS for f in (x, y)
            ):
                return x, y
    return None


def _layout(
    a: Any, b: Any, spatial: Sequence[Any], k: Any, width: int | None
) -> tuple[str, int] | None:
    """Return B's layout and number of batch dimensions; None where this is no product."""
    *lead, n = spatial
    if not _equal(a.indices, [*lead, k]):
        return None
    if width is not None:
        panel = tirx.IntImm("int64", width)
        packed = [tirx.floordiv(n, panel), k, tirx.floormod(n, panel)]
        if _equal(b.indices, packed) and int(b.source.shape[2]) == width:
            return "packed", 0
    for depth in range(len(lead) + 1):
        if _equal(b.indices, [*lead[:depth], k, n]):
            return "kn", depth
        if _equal(b.indices, [*lead[:depth], n, k]):
            return "nk", depth
    return None


def _equal(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(ep.same(x, y) for x, y in zip(left, right, strict=True))


def _uncast(expr: Any) -> Any:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _is_zero(expr: Any) -> bool:
    expr = _uncast(expr)
    return isinstance(expr, tirx.FloatImm) and expr.value == 0.0


def _plain(extent: Any) -> Any:
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def _size(extent: Any) -> int | str:
    return extent if isinstance(extent, int) else "*"


def _itemsize(dtype: Any) -> int:
    return int(tvm_ffi.dtype(str(dtype)).itemsize)

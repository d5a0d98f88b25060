"""Which PrimFuncs are a matrix product, and one that reads a packed weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import te, tirx
from tvm.sym import Analyzer

from tvmcap.kernel import epilogue as ep
from tvmcap.schedules.cpu_build import product
from tvmcap.schedules.gemm_axes import GROUP, Axes, factors_of

ALLOW_TF32 = "tvmcap.allow_tf32"
"""Attribute of a PrimFunc whose float32 products may be computed in tf32."""


@dataclass(frozen=True)
class Gemm:
    """``C[batch, row, n] = epilogue(sum_k A[batch, row, k] * B[batch, k, n])``.

    Every extent is an int, or an expression of symbolic dimensions. Extents of 1 may stand among
    the batch and the rows.

    Attributes
    ----------
    a, b: parameters that hold the operands, contiguous.
    a_layout: of A: "mk" ``[batch, rows, K]`` or "km" ``[batch, K, rows]``.
    layout: of B: "packed" ``[ceil(N / NR), K, NR]``, "grouped" ``[ceil(N / NR), ceil(K / 4), NR,
        4]``, "kn" ``[batch, K, N]`` or "nk" ``[batch, N, K]``.
    batch: extents of the leading dimensions of C that number separate products; without any, A and
        B have none either.
    a_batched, b_batched: whether the operand has those dimensions, all of them; else it is one
        matrix that every product of the batch shares.
    row_dims: extents of C's further dimensions but the last; flattened they are the rows. Of a "km"
        operand at most one of them is not 1.
    n, k: extents of the columns and of the reduction.
    tf32: the operands are float32 and may be multiplied with the 10 mantissa bits of tf32.
    fused: the PrimFunc taken apart.
    digest: hash of the whole computation.
    """

    a: Any
    b: Any
    a_layout: str
    layout: str
    batch: tuple[Any, ...]
    a_batched: bool
    b_batched: bool
    row_dims: tuple[Any, ...]
    n: Any
    k: Any
    tf32: bool
    fused: ep.Fused
    digest: str

    @property
    def rows(self) -> Any:
        """Rows of one product: an int, or an expression of symbolic dimensions."""
        return _plain(product(self.row_dims))

    @property
    def sums(self) -> str:
        """Dtype in which the products are added: "int32" for bytes by int8, else "float32"."""
        return "int32" if str(self.fused.epilogue.anchor.dtype) == "int32" else "float32"

    @property
    def a_pitch(self) -> Any:
        """Elements from one row of A's matrix in memory to the next."""
        return self.k if self.a_layout == "mk" else self.rows

    @property
    def b_pitch(self) -> Any:
        """Elements from one row of B's matrix in memory to the next; B must not be packed."""
        return self.n if self.layout == "kn" else self.k

    def key(self) -> dict[str, Any]:
        """Return plain JSON that identifies the workload but for symbolic sizes."""
        return {
            "op": "gemm",
            "layout": [self.a_layout, self.layout],
            "batched": [self.a_batched, self.b_batched],
            "tf32": self.tf32,
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


def read(func: tirx.PrimFunc, width: Callable[[str], int] | None = None) -> Gemm | None:
    """Return the matrix product that ``func`` is, or None; operands must be parameters.

    ``width`` gives the columns of a packed panel by dtype, where the target packs weights at all.
    """
    fused = ep.read(func)
    factors = fused and factors_of(fused.block)
    if not fused or not factors:
        return None
    spatial = [v for v in fused.block.iter_vars if v.iter_type == tirx.IterVar.DataPar]
    (reduction,) = (v for v in fused.block.iter_vars if v.iter_type == tirx.IterVar.CommReduce)
    if not spatial:
        return None
    extents = tuple(_plain(v.dom.extent) for v in spatial)
    axes = Axes([v.var for v in spatial], reduction.var, extents)
    for a, b in (factors, factors[::-1]):
        panel = None if width is None else width(str(b.source.dtype))
        left, right = axes.left(a), axes.right(b, panel)
        if (
            not left
            or not right
            or not all(any(x.source.same_as(p) for p in func.params) for x in (a, b))
        ):
            continue
        split = axes.split(left, right)
        if split is None:
            continue
        depth, batched = split
        floats = {str(a.source.dtype), str(b.source.dtype), str(fused.epilogue.anchor.dtype)}
        return Gemm(
            a.source,
            b.source,
            left[0],
            right[0],
            extents[:depth],
            *batched,
            extents[depth:-1],
            extents[-1],
            _plain(reduction.dom.extent),
            bool((func.attrs or {}).get(ALLOW_TF32, False)) and floats == {"float32"},
            fused,
            ep.digest(func),
        )
    return None


def packed_matmul(
    x: te.Tensor, packed: te.Tensor, n: int, out_dtype: str | None = None, left: str = "mk"
) -> te.Tensor:
    """Return the TE of ``x @ w`` for a weight packed by ``pack``; emit with ``op_pattern=4``.

    Parameters
    ----------
    x: shape (..., K).
    packed: shape (ceil(n / NR), K, NR), of x's dtype.
    n: columns of the weight before packing.
    out_dtype: dtype of the result; x's where None. The sum is kept in it here, in float32 in the
        kernel.
    left: "mk", or "km" for an x of shape (..., K, M).
    """
    out = out_dtype or str(x.dtype)
    width = packed.shape[2]
    k = te.reduce_axis((0, packed.shape[1]), name="k")

    def at(*index: Any) -> Any:
        *lead, col = index
        a = x(*lead, k) if left == "mk" else x(*lead[:-1], k, lead[-1])
        b = packed(tirx.floordiv(col, width), k, tirx.floormod(col, width))
        a, b = (v if str(v.ty) == out else v.astype(out) for v in (a, b))
        return te.sum(a * b, axis=k)

    lead = x.shape[:-1] if left == "mk" else (*x.shape[:-2], x.shape[-1])
    return te.compute((*lead, n), at, name="packed_matmul")


def pack(weight: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Pack a (K, N) weight as ``[ceil(N / width), K, width]``, padded with zeros."""
    k, n = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -n % width)))
    return np.ascontiguousarray(padded.reshape(k, -1, width).transpose(1, 0, 2))


def grouped_matmul(x: te.Tensor, grouped: te.Tensor, n: int, left: str = "mk") -> te.Tensor:
    """Return the TE of the int32 product of bytes ``x`` and an int8 weight packed by ``group``.

    Parameters are those of ``packed_matmul``.
    """
    depth = x.shape[-1] if left == "mk" else x.shape[-2]
    width = grouped.shape[2]
    k = te.reduce_axis((0, depth), name="k")

    def at(*index: Any) -> Any:
        *lead, col = index
        a = x(*lead, k) if left == "mk" else x(*lead[:-1], k, lead[-1])
        b = grouped(
            tirx.floordiv(col, width),
            tirx.floordiv(k, GROUP),
            tirx.floormod(col, width),
            tirx.floormod(k, GROUP),
        )
        return te.sum(a.astype("int32") * b.astype("int32"), axis=k)

    lead = x.shape[:-1] if left == "mk" else (*x.shape[:-2], x.shape[-1])
    return te.compute((*lead, n), at, name="grouped_matmul")


def group(weight: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Pack an int8 (K, N) weight as ``[ceil(N / width), ceil(K / 4), width, 4]``.

    Four steps of K lie together; zeros past K and N.
    """
    k, n = weight.shape
    padded = np.pad(weight, ((0, -k % GROUP), (0, -n % width)))
    parts = padded.reshape(-1, GROUP, padded.shape[1] // width, width)
    return np.ascontiguousarray(parts.transpose(2, 0, 3, 1))


def evaluate(extent: Any, sizes: Mapping[str, int]) -> int:
    """Return the value of an extent at the sizes of the symbolic dimensions, by name."""
    if isinstance(extent, int):
        return int(extent)
    value = tvm_ffi.structural_map(
        extent, (tirx.Var, lambda v: tirx.IntImm("int64", sizes[v.name]) if v.name in sizes else v)
    )
    result: int = int(Analyzer().simplify(value))
    return result


def is_multiple(extent: Any, of: int) -> bool:
    """Whether an extent is a multiple of ``of`` at every size of the symbolic dimensions."""
    if isinstance(extent, int):
        return extent % of == 0
    return bool(Analyzer().can_prove(tirx.floormod(extent, tirx.IntImm("int64", of)) == 0))


def _plain(extent: Any) -> Any:
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def _size(extent: Any) -> int | str:
    return extent if isinstance(extent, int) else "*"


def _itemsize(dtype: Any) -> int:
    return int(tvm_ffi.dtype(str(dtype)).itemsize)

"""Kernels and bytes of one call at given sizes, from the table of kernels that a library carries.

The table is plain JSON (``view.kernels.table`` makes it), so a loaded library can be scored at
every size. Every figure is counted and none is measured: a tensor argument of a kernel is read or
written once by it, at its full extent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.base.score import KernelScore
from tvmcap.base.signature import Signature, evaluate

Table = Mapping[str, Any]
"""``{"kernels": [row...], "arenas": {symbolic factor: bytes a unit} or None}``. A row has ``name``,
``launches``, ``reads`` and ``writes`` (lists of ``[dtype, shape, role, id]``, role one of "frozen",
"weight", "activation"), and ``when``: ``[[size, bound, whether size <= bound]...]`` that must
hold."""


def kernel_table(compiled: Any) -> Table | None:
    """Return the table of kernels that the library carries, or make it from the module."""
    stored: Table | None = getattr(compiled.manifest, "kernels", None)
    if stored or compiled.module is None:
        return stored or None
    from tvmcap.view.kernels import table

    return table(compiled.module, compiled.signature)


@dataclass
class Moved:
    """Bytes that one call moves, weights apart from activations.

    Attributes
    ----------
    kernels: one row a call of a kernel, or an eager operator that runs one, in order.
    weight_reads, activations, outputs: bytes of weights read, activations moved, and outputs.
    """

    kernels: list[KernelScore] = field(default_factory=list)
    weight_reads: int = 0
    activations: int = 0
    outputs: int = 0

    @property
    def hbm_bytes(self) -> int:
        """Everything the kernels read and write."""
        return self.weight_reads + self.activations

    @property
    def ratio(self) -> float:
        """Bytes of activations moved over the bytes of the outputs."""
        return self.activations / self.outputs if self.outputs else 0.0


@dataclass
class Traffic(Moved):
    """What one call of a library moves, launches and holds.

    Attributes
    ----------
    launches: device kernels that the calls launch (a PrimFunc may hold several).
    weight_bytes: bytes of the distinct frozen weights.
    peak_planned: bytes of intermediates and outputs, or None where there is no plan yet.
    """

    launches: int = 0
    weight_bytes: int = 0
    peak_planned: int | None = None


def count(
    table: Table,
    signature: Signature,
    sizes: Mapping[str, int],
    scheduled_by: Mapping[str, str] | None = None,
) -> Traffic:
    """Count the kernels and bytes of one call at ``sizes``.

    ``scheduled_by``: what scheduled each task, by its name; variants of a kernel are of one task.
    Raises LibraryError where a size is not given.
    """
    traffic, frozen = Traffic(), {}
    for row in table["kernels"]:
        if any((evaluate(size, sizes) <= bound) != holds for size, bound, holds in row["when"]):
            continue
        read = written = 0
        for dtype, shape, role, number in row["reads"]:
            size = nbytes(dtype, shape, sizes)
            read += size
            if role == "activation":
                traffic.activations += size
            else:
                traffic.weight_reads += size
            if role == "frozen":
                frozen[number] = size
        written = sum(nbytes(dtype, shape, sizes) for dtype, shape, _, _ in row["writes"])
        traffic.activations += written
        traffic.launches += row["launches"]
        by = _server(row["name"], scheduled_by or {})
        traffic.kernels.append(KernelScore(row["name"], read, written, by))
    traffic.weight_bytes = sum(frozen.values())
    traffic.outputs = sum(nbytes(o.dtype, o.shape, sizes) for o in signature.outputs)
    traffic.peak_planned = _peak(table.get("arenas"), sizes, traffic.outputs)
    return traffic


def _server(kernel: str, scheduled_by: Mapping[str, str]) -> str:
    """Name what scheduled a kernel; a variant (``NAME_upto64``) is of the task NAME."""
    return scheduled_by.get(kernel) or scheduled_by.get(re.sub(r"_upto\d+$", "", kernel), "")


def _peak(arenas: Mapping[str, int] | None, sizes: Mapping[str, int], outputs: int) -> int | None:
    if arenas is None:
        return None
    try:
        return outputs + sum(int(n) * evaluate(factor or 1, sizes) for factor, n in arenas.items())
    except LibraryError:
        return None


def nbytes(dtype: str, shape: Sequence[int | str], sizes: Mapping[str, int]) -> int:
    """Bytes of one tensor at ``sizes``."""
    return prod(evaluate(s, sizes) for s in shape) * itemsize(dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element: ``"bfloat16"`` has 2, ``"bool"`` 1, ``"float8_e4m3fn"`` 1."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(1, int(bits[0]) // 8)


def served_by(coverage: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name what scheduled each kernel, from a manifest's coverage."""
    return {str(task["task"]): str(task.get("served_by", task.get("by", ""))) for task in coverage}


def weight_like(signature: Signature) -> list[bool]:
    """Tell for each input whether it is a weight: constant while the activations' sizes vary.

    Without symbolic sizes, an input is an activation if its leading extent is that of an output.
    """
    leading = {o.shape[0] for o in signature.outputs if o.shape}
    free = [any(isinstance(s, str) for s in spec.shape) for spec in signature.inputs]
    if any(free):
        return [not f for f in free]
    return [not spec.shape or spec.shape[0] not in leading for spec in signature.inputs]

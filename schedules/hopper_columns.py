"""A Hopper GEMM's problem and many settings of its knobs as arrays: what ranking computes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from tvmcap.schedules.hopper_plan import OPERANDS

GROUPS = ("rows", "columns", "tiles")
"""How the two consumer warp groups of a CTA may divide the work."""
TYPICAL_ROWS = 1024
"""What counts for a symbolic extent, and 16 for one of the batch."""
_TYPICAL_BATCH = 16


@dataclass(frozen=True)
class Sizes:
    """What estimate and features need to know of a product; a record of it tells as much.

    Attributes
    ----------
    rows, n, k, batch: extents, typical ones where symbolic.
    dtype, out: of the operands, and of the first result.
    a_layout, layout: of the operands, as ``Gemm`` has them.
    """

    rows: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    out: str = "bfloat16"
    a_layout: str = "mk"
    layout: str = "nk"

    @property
    def item(self) -> int:
        """Bytes of an element of the operands."""
        return OPERANDS[self.dtype][1]


def sizes_of(gemm: Any, rows: int | None = None) -> Sizes:
    """Return the sizes of a problem, at a number of rows where it is given."""
    if isinstance(gemm, Sizes):
        return gemm
    out = str(gemm.fused.epilogue.outputs[0].dtype)
    extents = (gemm.rows if rows is None else rows, gemm.n, gemm.k)
    high, n, k = (e if isinstance(e, int) else TYPICAL_ROWS for e in extents)
    layouts = (gemm.a_layout, gemm.layout)
    return Sizes(high, n, k, _product(gemm.batch), str(gemm.a.dtype), out, *layouts)


def sizes_from_record(workload: Mapping[str, Any], sizes: Mapping[str, int]) -> Sizes | None:
    """Return the sizes that a record was measured at; None where it leaves one open."""
    rows, n, k = sizes.get("rows"), workload["n"], workload["k"]
    if not all(isinstance(extent, int) for extent in (rows, n, k, *workload["batch"])):
        return None
    dtype, _, out = map(str, workload["dtypes"])
    a_layout, layout = map(str, workload["layout"])
    batch = _product(workload["batch"])
    return Sizes(int(sizes["rows"]), int(n), int(k), batch, dtype, out, a_layout, layout)


def _product(batch: Sequence[Any]) -> int:
    total = 1
    for extent in batch:
        total *= extent if isinstance(extent, int) else _TYPICAL_BATCH
    return total


@dataclass(frozen=True)
class Columns:
    """One array a knob, an element a setting; ``groups`` has its words."""

    bm: Any
    bn: Any
    bk: Any
    stages: Any
    groups: Any
    cluster_m: Any
    cluster_n: Any
    split: Any
    group: Any
    persistent: Any
    late: Any
    tma_store: Any
    dependent: Any
    warm: Any
    swapped: Any

    @staticmethod
    def of(points: Sequence[Any]) -> Columns:
        """Return the columns of settings."""
        read = attrgetter(*KNOBS)
        rows = [read(point) for point in points]
        table = zip(*rows, strict=True) if rows else [()] * len(KNOBS)
        kinds = {"groups": np.str_} | dict.fromkeys(_FLAGS, np.bool_)
        arrays = (
            np.array(c, dtype=kinds.get(k, np.int64)) for k, c in zip(KNOBS, table, strict=True)
        )
        return Columns(*arrays)

    def take(self, chosen: Any) -> Columns:
        """Return the settings that a mask or indices choose."""
        return Columns(*(getattr(self, name)[chosen] for name in KNOBS))


KNOBS = tuple(f.name for f in fields(Columns))
_FLAGS = ("persistent", "late", "tma_store", "dependent", "warm", "swapped")

"""What follows from a Hopper GEMM's problem and its knobs: tiles, bytes, clusters, raster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SM_COUNT = 132
"""Streaming multiprocessors of an H100 SXM or H200 (NVIDIA H100 white paper)."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a thread block may have on sm_90 (CUDA C++ Programming Guide)."""
OPERANDS = {
    "float16": ("f16", 2),
    "bfloat16": ("bf16", 2),
    "float32": ("tf32", 4),
    "int8": ("s8", 1),
    "float8_e4m3fn": ("e4m3", 1),
}
"""By dtype of the operands: wgmma's name for it, and bytes an element."""
#: By CTAs of a cluster: clusters that fit at once where GPCs have 16 or 18 multiprocessors.
CLUSTERS = {1: SM_COUNT, 2: SM_COUNT // 2, 4: 32, 8: 16}
SWIZZLE_BYTES = 128


@dataclass(frozen=True)
class Plan:
    """Derived numbers of one setting; extents are ints or int32 expressions.

    Two consumer warp groups share a tile, half its rows or columns each, or take turns with a tile
    of their own. CTAs of a cluster are numbered (split, n, m), m fastest.
    """

    m: Any
    n: Any
    k: Any
    batch: Any
    a_batched: bool
    b_batched: bool
    dtype: str
    knobs: Any
    outputs: tuple[str, ...]

    @property
    def single(self) -> bool:
        """Whether there is one product, not a batch."""
        return isinstance(self.batch, int) and self.batch == 1

    @property
    def item(self) -> int:
        """Bytes of an element of the operands."""
        return OPERANDS[self.dtype][1]

    @property
    def sums(self) -> str:
        """Dtype in which products are added."""
        return "int32" if self.dtype == "int8" else "float32"

    @property
    def held(self) -> str:
        """Dtype of the registers that hold the sums: wgmma's words of 32 bits, where no floats."""
        return "uint32" if self.sums == "int32" else "float32"

    @property
    def atom(self) -> int:
        """Elements of a 128-byte swizzle row."""
        return SWIZZLE_BYTES // self.item

    @property
    def k_inst(self) -> int:
        """K of one wgmma: 32 bytes of each operand."""
        return 32 // self.item

    @property
    def group_rows(self) -> int:
        """Rows of a consumer warp group's part of a tile."""
        rows: int = self.knobs.bm // 2 if self.knobs.groups == "rows" else self.knobs.bm
        return rows

    @property
    def group_columns(self) -> int:
        """Columns of a consumer warp group's part of a tile."""
        columns: int = self.knobs.bn // 2 if self.knobs.groups == "columns" else self.knobs.bn
        return columns

    @property
    def sharing(self) -> int:
        """Consumer warp groups that share a tile."""
        return 1 if self.knobs.groups == "tiles" else 2

    @property
    def tall(self) -> int:
        """Instructions of 64 rows that cover ``group_rows``."""
        return self.group_rows // 64

    @property
    def accumulators(self) -> int:
        """Float32 registers a thread keeps of its part of a tile."""
        return int(self.tall * self.group_columns // 2)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        size: int = self.knobs.cluster_m * self.knobs.cluster_n * self.knobs.split
        return size

    @property
    def k_steps(self) -> Any:
        """Stages that K fills."""
        return _ceil(self.k, self.knobs.bk)

    @property
    def m_tiles(self) -> Any:
        """Rows of tiles, in tiles of a whole cluster."""
        return _ceil(self.m, self.knobs.bm * self.knobs.cluster_m)

    @property
    def n_tiles(self) -> Any:
        """Columns of tiles, in tiles of a whole cluster."""
        return _ceil(self.n, self.knobs.bn * self.knobs.cluster_n)

    @property
    def clusters(self) -> int:
        """Clusters of the persistent grid."""
        return CLUSTERS[self.cluster]

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring."""
        return int((self.knobs.bm + self.knobs.bn) * self.knobs.bk * self.item)

    @property
    def columns(self) -> int:
        """Columns of a 16-bit result that are staged, and stored, at a time; 0: none can be."""
        for columns in (64, 32, 16):
            if self.group_columns % columns == 0 and self.group_rows * columns <= 8192:
                return columns
        return 0

    @property
    def buffers(self) -> int:
        """Staging buffers a warp group has, for each output."""
        return 2 if self.group_rows == 64 and self.group_columns > self.columns else 1

    @property
    def staged_bytes(self) -> int:
        """Bytes in which results wait for their TMA store, for both warp groups."""
        if not self.knobs.tma_store:
            return 0
        return int(2 * self.buffers * self.group_rows * self.columns * 2 * len(self.outputs))

    @property
    def partial_bytes(self) -> int:
        """Bytes for the other ranks' float32 sums of this rank's columns."""
        tile, split = self.sharing * self.group_rows * self.group_columns * 4, self.knobs.split
        return int(tile * (split - 1) // split)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, barriers and alignment included."""
        ring: int = self.knobs.stages * self.stage_bytes
        return ring + self.staged_bytes + self.partial_bytes + 2048


def plan(gemm: Any, knobs: Any, int32: Any = lambda extent: extent) -> Plan:
    """Return the plan of a setting; ``int32`` narrows symbolic extents."""
    m, n, k = (int32(extent) for extent in (gemm.rows, gemm.n, gemm.k))
    batch: Any = 1
    for extent in gemm.batch:
        batch = batch * int32(extent)
    outputs = tuple(str(o.dtype) for o in gemm.fused.epilogue.outputs)
    flags = (gemm.a_batched, gemm.b_batched)
    return Plan(m, n, k, batch, *flags, str(gemm.a.dtype), knobs, outputs)


def _ceil(extent: Any, step: int) -> Any:
    return (extent + step - 1) // step

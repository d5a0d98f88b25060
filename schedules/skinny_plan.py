"""What follows from a skinny GEMM's problem and its knobs: tiles, bytes, shared memory."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvmcap.schedules import hopper_ops

LINE = 64
"""Elements of 16 bits in a row of the 128-byte swizzle."""
_PAD = 4
"""Float32 elements between rows of partial sums: a warp's fragment then meets no bank twice."""


def skinny_bytes(gemm: Any, knobs: Any) -> int:
    """Bytes of shared memory of a setting: the ring, the partial sums, the barriers."""
    ring: int = knobs.stages * (knobs.bm + knobs.bn) * knobs.bk * 2
    sums: int = knobs.bn * (knobs.bm + _PAD) * 4
    barriers: int = knobs.stages * 16 + 16
    return ring + sums + barriers


class Plan:
    """Derived numbers of one setting; extents are ints or int32 expressions.

    A tile is ``bm`` columns of the output by ``bn`` rows of x. The ``split`` blocks of a cluster
    share it: each sums a slice of the k steps, then finishes ``own`` of its rows.
    """

    def __init__(self, gemm: Any, knobs: Any) -> None:
        self.m, self.n, self.k = (
            hopper_ops.int32(extent) for extent in (gemm.rows, gemm.n, gemm.k)
        )
        self.bm: int = knobs.bm
        self.bn: int = knobs.bn
        self.bk: int = knobs.bk
        self.stages: int = knobs.stages
        self.split: int = knobs.split
        self.dtype, self.k_major = str(gemm.a.dtype), gemm.layout == "nk"
        self.groups = self.bm // 64  # warp groups that multiply
        self.threads = 128 * self.groups
        self.accumulators = self.bn // 2  # float32 sums of a thread
        self.own: int = self.bn // self.split
        self.pitch = self.bm + _PAD
        self.k_steps = (self.k + self.bk - 1) // self.bk
        self.m_tiles = (self.m + self.bn - 1) // self.bn
        self.tiles = self.m_tiles * ((self.n + self.bm - 1) // self.bm)
        self.stage_bytes = (self.bm + self.bn) * self.bk * 2

    @property
    def w_box(self) -> tuple[int, int]:
        """Box of one load of w: 64 k of all columns, or 64 columns of all k of a stage."""
        return (LINE, self.bm if self.k_major else self.bk)

    @property
    def w_loads(self) -> int:
        """Boxes of w in a stage."""
        return self.bk // LINE if self.k_major else self.groups

    @property
    def w_group(self) -> int:
        """Elements of a stage between the operands of two warp groups."""
        return 64 * LINE if self.k_major else self.bk * LINE

    def w_at(self, step: Any, col: Any, i: int) -> tuple[Any, Any]:
        """Return TMA coordinates of the i-th box of a k step."""
        k, line = step * self.bk, i * LINE
        return (k + line, col) if self.k_major else (col + line, k)

    def shift(self, rows: int, k_major: bool, kk: int) -> Any:
        """Return 16-byte units from an operand of a stage to the same 16 * kk further on."""
        units = kk // 4 * rows * 8 + kk % 4 * 2 if k_major else kk * 16 * 8
        return T.Cast("uint64", units)


class Shared:
    """Shared memory of a block."""

    def __init__(self, p: Plan) -> None:
        pool = T.SMEMPool()
        self.w = pool.alloc((p.stages * p.bm * p.bk,), p.dtype, align=1024)
        self.x = pool.alloc((p.stages * p.bn * p.bk,), p.dtype, align=1024)
        self.sums = pool.alloc((p.bn * p.pitch,), "float32", align=16)  # own rows of each rank
        self.full = pool.alloc((p.stages,), "uint64", align=8)
        self.empty = pool.alloc((p.stages,), "uint64", align=8)
        self.summed = pool.alloc((1,), "uint64", align=8)
        pool.commit()

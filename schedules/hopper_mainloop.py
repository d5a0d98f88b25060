"""The main loop of the Hopper GEMM: shared memory, TMA loads, wgmma, release of stages."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules import hopper_ops
from tvmcap.schedules.hopper_plan import Plan


class Shared:
    """Shared memory of a CTA: the ring, staged results, partial sums, barriers."""

    def __init__(self, p: Plan) -> None:
        knobs, pool = p.knobs, T.SMEMPool()
        self.a = pool.alloc((knobs.stages * knobs.bm * knobs.bk,), p.dtype, align=1024)
        self.b = pool.alloc((knobs.stages * knobs.bn * knobs.bk,), p.dtype, align=1024)
        self.staged = pool.alloc((max(p.staged_bytes // 4, 1),), "uint32", align=1024)
        self.partial = pool.alloc((max(p.partial_bytes // 4, 4),), "float32", align=16)
        self.full = pool.alloc((knobs.stages,), "uint64", align=8)
        self.empty = pool.alloc((knobs.stages,), "uint64", align=8)
        self.summed = pool.alloc((1,), "uint64", align=8)
        pool.commit()


def operand_map(p: Plan, which: int, buffer: Any, k_major: bool) -> Any:
    """Describe A (0) or B (1), in either majority, of which a CTA loads a part.

    The CTAs that share a tile load it together, each its share.
    """
    rows, tile = ((p.m, p.knobs.bm), (p.n, p.knobs.bn))[which]
    shared = (p.knobs.cluster_n, p.knobs.cluster_m)[which]
    batched = (p.batch,) if _batched(p, which) else ()
    ones = (1,) * len(batched)
    extents, box = (p.k, rows, *batched), (p.atom, tile // shared, *ones)
    if not k_major:
        extents, box = (rows, p.k, *batched), (p.atom, p.knobs.bk // shared, *ones)
    return hopper_ops.new_map(buffer, extents, box, p.item)


def _batched(p: Plan, which: int) -> bool:
    return not p.single and (p.a_batched, p.b_batched)[which]


def fetcher(p: Plan, layouts: tuple[bool, bool], maps: list[Any]) -> tuple[Any, Any]:
    """Return what loads a stage with k step ``kt`` of the tile at ``at``, and what warms the L2.

    ``layouts`` says of A and of B whether it is K-major; ``maps`` are filled in before use.
    """
    knobs = p.knobs

    def boxes(which: int, kt: Any, at: Any, rank: Any) -> list[tuple[Any, Any]]:
        """Offset in the stage's tile and coordinates of each box that this CTA loads."""
        tile = (knobs.bm, knobs.bn)[which]
        shared = (knobs.cluster_n, knobs.cluster_m)[which]
        ranks = (rank // knobs.cluster_m % knobs.cluster_n, rank % knobs.cluster_m)
        share = ranks[which] if shared > 1 else 0
        extra = (at[2],) if _batched(p, which) else ()
        found = []
        for i in range(knobs.bk // p.atom if layouts[which] else tile // p.atom):
            if layouts[which]:
                part = tile // shared
                where = (kt * knobs.bk + i * p.atom, at[which] + share * part, *extra)
                found.append(((i * tile + share * part) * p.atom, where))
            else:
                part = knobs.bk // shared
                where = (at[which] + i * p.atom, kt * knobs.bk + share * part, *extra)
                found.append(((i * knobs.bk + share * part) * p.atom, where))
        return found

    def mask(which: int, rank: Any) -> Any:
        """Bits of the CTAs that get this CTA's share; None where it is alone."""
        m, n = rank % knobs.cluster_m, rank // knobs.cluster_m % knobs.cluster_n
        if (knobs.cluster_n, knobs.cluster_m)[which] == 1:
            return None
        if which == 0:  # all CTAs of this row of the cluster
            ones = sum(1 << (i * knobs.cluster_m) for i in range(knobs.cluster_n))
            return T.shift_left(T.int32(ones), rank - n * knobs.cluster_m)
        return T.shift_left(T.int32((1 << knobs.cluster_m) - 1), rank - m)

    def fetch(sm: Any, stage: Any, kt: Any, at: Any, rank: Any) -> None:
        for which in range(2):
            buffer, tile = (sm.a, sm.b)[which], (knobs.bm, knobs.bn)[which]
            for offset, where in boxes(which, kt, at, rank):
                place = buffer.ptr_to([stage * tile * knobs.bk + offset])
                barrier = sm.full.ptr_to([stage])
                T.evaluate(hopper_ops.load(place, maps[which], where, barrier, mask(which, rank)))

    def warm(kt: Any, at: Any, rank: Any) -> None:
        for which in range(2):
            for _, where in boxes(which, kt, at, rank):
                T.evaluate(hopper_ops.warm(maps[which], where))

    return fetch, warm


def releaser(p: Plan) -> Any:
    """Return what tells every CTA that writes into a stage that this warp group has read it."""
    cm, cn = p.knobs.cluster_m, p.knobs.cluster_n
    senders = cm + cn - 1

    @T.inline
    def release(sm: Any, stage: Any, lane: Any, rank: Any) -> None:
        if lane < senders:
            column = T.meta_var(rank - rank % cm)  # CTAs with the same tile of B
            row = T.meta_var(rank - rank // cm % cn * cm)  # with the same tile of A
            passed = T.meta_var(T.Select(lane - cm < rank // cm % cn, T.int32(0), T.int32(1)))
            peer = T.meta_var(T.Select(lane < cm, column + lane, row + (lane - cm + passed) * cm))
            hopper_ops.arrive(sm.empty.ptr_to([stage]), peer)

    @T.inline
    def release_own(sm: Any, stage: Any, lane: Any, rank: Any) -> None:
        if lane == 0:
            T.ptx.mbarrier.arrive.shared.b64(sm.empty.ptr_to([stage]))

    return release if senders > 1 else release_own


def multiplier(p: Plan, layouts: tuple[bool, bool], release: Any) -> Any:
    """Return the loop of one warp group over the k steps of a tile; the last may be in flight."""
    knobs = p.knobs
    mma = hopper_ops.wgmma(p.dtype, p.group_columns)
    per_tile, count = p.group_columns // 2, p.tall
    in_atom = p.atom // p.k_inst
    # signs of A and B, for floats; majorities, where the instruction has them
    flags: tuple[int, ...] = () if p.dtype == "int8" else (1, 1)
    flags += tuple(int(not k_major) for k_major in layouts) if p.item == 2 else ()
    late, empty = int(knobs.late), not isinstance(p.k, int)

    def start(which: int, stage: Any, row: Any, kk: int) -> Any:
        """Offset of the instruction's operand, in elements: row ``row`` of the tile, k ``kk``."""
        tile = (knobs.bm, knobs.bn)[which]
        base = stage * tile * knobs.bk
        if layouts[which]:
            inner = kk // in_atom * tile * p.atom + kk % in_atom * p.k_inst
            return base + inner + row * p.atom
        return base + row * knobs.bk + kk * p.k_inst * p.atom

    def lead(which: int) -> int:
        """Return the 16-byte units between chunks of 64 rows; unused where K-major."""
        return 1 if layouts[which] else knobs.bk * 8

    def describe(descriptor: Any, tile: Any, leading: int) -> Any:
        where = T.address_of(descriptor)  # rows of 8 follow each other after 64 16-byte units
        return T.cuda.wgmma.encode_matrix_descriptor(where, tile, leading, 64, 3)

    @T.inline
    def multiply(sm: Any, ring: Any, steps: Any, wg: Any, lane: Any, rank: Any, acc: Any) -> None:
        row = T.meta_var(wg * p.group_rows if knobs.groups == "rows" else 0)
        column = T.meta_var(wg * p.group_columns if knobs.groups == "columns" else 0)
        desc_a: T.uint64
        desc_b: T.uint64
        if empty:  # the first instruction overwrites the sums, where there is one
            for i in T.unroll(p.accumulators):
                acc[i] = tirx.const(0, p.held)
        for kt in T.serial(steps):
            hopper_ops.wait(sm.full.ptr_to([ring[0]]), ring[1])
            T.ptx.wgmma.fence.sync.aligned()
            for kk in T.unroll(knobs.bk // p.k_inst):
                for m in T.unroll(count):
                    ab = T.meta_var((desc_a, desc_b))  # noqa: F821 (declared by annotation)
                    describe(ab[0], sm.a.ptr_to([start(0, ring[0], row + m * 64, kk)]), lead(0))
                    describe(ab[1], sm.b.ptr_to([start(1, ring[0], column, kk)]), lead(1))
                    mma(acc, m * per_tile, ab[0], ab[1], (kt + kk > 0), flags)
            T.ptx.wgmma.commit_group.sync.aligned()
            T.ptx.wgmma.wait_group.sync.aligned(late)
            if late == 0:
                release(sm, ring[0], lane, rank)
            else:
                if kt > 0:
                    release(sm, (ring[0] + knobs.stages - 1) % knobs.stages, lane, rank)
            ring[0] = ring[0] + 1
            if ring[0] == knobs.stages:
                ring[0] = 0
                ring[1] = T.bitwise_xor(ring[1], 1)

    return multiply

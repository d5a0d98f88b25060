"""How a finished tile of the Hopper GEMM leaves: TMA, registers, or summed over a cluster."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules import hopper_ops
from tvmcap.schedules.gemm_match import is_multiple
from tvmcap.schedules.gpu_epilogue import Views, offset, position
from tvmcap.schedules.hopper_plan import Plan


def output_maps(gemm: Any, p: Plan) -> list[Any]:
    """Describe the stores of a warp group's staged columns, an output each."""
    batched = () if p.single else (p.batch,)
    box = (p.columns, p.group_rows, *(1,) * len(batched))
    outputs = gemm.fused.epilogue.outputs
    return [hopper_ops.new_map(buffer, (p.n, p.m, *batched), box, 2) for buffer in outputs]


def writer(gemm: Any, p: Plan, views: Views, maps: list[Any]) -> Any:
    """Return what applies the epilogue to a tile's sums and writes the outputs.

    ``finish(sm, acc, at, wg, lane, rank)``; a thread holds of each 8 columns two neighbours in two
    rows, 8 apart (PTX ISA 9.0, figure of the wgmma accumulator fragment).
    """
    if p.knobs.split > 1:
        return _summed(gemm, p, views)
    return _staged(gemm, p, views, maps) if p.knobs.tma_store else _direct(gemm, p, views)


def _values(gemm: Any, p: Plan, views: Views, sums: Any, row: Any, col: Any, batch: Any) -> Any:
    """Return each output's values at two neighbouring columns; past the edge, the edge's."""
    ragged = not isinstance(p.n, int) or p.n % (p.knobs.bn * p.knobs.cluster_n)
    row = T.min(row, p.m - 1)
    if is_multiple(gemm.n, 2):
        column = T.min(col, p.n - 2) if ragged else col
        return views.pair(sums, place(gemm, row, column, batch))
    columns = [T.min(col + c, p.n - 1) for c in range(2)]
    both = [views.values(sums[c], place(gemm, row, columns[c], batch)) for c in range(2)]
    return list(zip(*both, strict=True))


def _rows(lane: Any) -> Any:
    """Return the first row and column that a thread holds in its warp group's part."""
    return lane // 32 * 16 + lane % 32 // 4, lane % 4 * 2


def _sums(p: Plan, acc: Any, m: int, i: int, r: int) -> tuple[Any, Any]:
    at = m * (p.group_columns // 2) + i * 4 + r * 2
    if p.held == p.sums:
        return acc[at], acc[at + 1]
    return tirx.reinterpret(p.sums, acc[at]), tirx.reinterpret(p.sums, acc[at + 1])


def _staged(gemm: Any, p: Plan, views: Views, maps: list[Any]) -> Any:
    """Through swizzled shared memory and a TMA store, ``columns`` at a time.

    The stores overlap what comes next; with two buffers, a part also the store of the one before.
    """
    rows = p.group_rows
    columns, part_words = p.columns, rows * p.columns // 2
    dtypes, buffers = p.outputs, p.buffers

    def base(o: int, part: int, wg: Any) -> Any:
        return ((o * buffers + part % buffers) * 2 + wg) * part_words

    def put(sm: Any, acc: Any, at: Any, wg: Any, lane: Any, part: int) -> None:
        row, col = _rows(lane)
        for m in range(p.tall):
            for i in range(columns // 8):
                for r in range(2):
                    line = row + m * 64 + r * 8
                    column = _first_column(p, at, wg) + col + part * columns + i * 8
                    place = (_first_row(p, at, wg) + line, column, at[2])
                    sums = _sums(p, acc, m, part * (columns // 8) + i, r)
                    for o, pair in enumerate(_values(gemm, p, views, sums, *place)):
                        # 16-byte units, swizzled by the row within 1024, 512 or 256 bytes
                        swizzle = lane % 32 // 4 // (64 // columns)
                        word = base(o, part, wg) + line * (columns // 2) + lane % 4
                        word = word + T.bitwise_xor(i, swizzle) * 4
                        T.buffer_store(sm.staged, pack(dtypes[o], *pair), [word])

    def copy_out(sm: Any, at: Any, wg: Any, part: int) -> None:
        extra = () if p.single else (at[2],)
        for o in range(len(dtypes)):
            where = (_first_column(p, at, wg) + part * columns, _first_row(p, at, wg), *extra)
            T.evaluate(hopper_ops.store(maps[o], where, sm.staged.ptr_to([base(o, part, wg)])))

    @T.inline
    def finish(sm: Any, acc: Any, at: Any, wg: Any, lane: Any, rank: Any) -> None:
        for part in T.unroll(p.group_columns // columns):
            if lane == 0:
                T.ptx["cp.async.bulk.wait_group.read"](buffers - 1)
            T.ptx.bar.sync(T.Cast("uint32", wg + 1), T.uint32(128))
            put(sm, acc, at, wg, lane, part)
            T.ptx.fence.proxy.async_.shared__cta()
            T.ptx.bar.sync(T.Cast("uint32", wg + 1), T.uint32(128))
            if lane == 0:
                copy_out(sm, at, wg, part)
                T.ptx.cp.async_.bulk.commit_group()

    return finish


def _direct(gemm: Any, p: Plan, views: Views) -> Any:
    """Straight from registers."""

    def finish(sm: Any, acc: Any, at: Any, wg: Any, lane: Any, rank: Any) -> None:
        for m in range(p.tall):
            for i in range(p.group_columns // 8):
                for r in range(2):
                    _write(gemm, p, views, _sums(p, acc, m, i, r), at, wg, lane, (m, i, r))

    return finish


def _write(
    gemm: Any, p: Plan, views: Views, sums: Any, at: Any, wg: Any, lane: Any, part: Any
) -> None:
    """Write two neighbours of every output, unless past the edge."""
    row, col = _rows(lane)
    m, i, r = part
    row = _first_row(p, at, wg) + row + m * 64 + r * 8
    col = _first_column(p, at, wg) + col + i * 8
    values = _values(gemm, p, views, sums, row, col, at[2])
    outputs = list(zip(gemm.fused.epilogue.outputs, values, strict=True))
    if is_multiple(gemm.n, 2):
        with T.If(tirx.all(row < p.m, col < p.n)), T.Then():
            for buffer, pair in outputs:
                _store_pair(views, buffer, pair, place(gemm, row, col, at[2]))
        return
    for c in range(2):
        with T.If(tirx.all(row < p.m, col + c < p.n)), T.Then():
            for buffer, pair in outputs:
                flat = offset(buffer, place(gemm, row, col + c, at[2]))
                T.buffer_store(views.flat[buffer], pair[c], [flat])


def _summed(gemm: Any, p: Plan, views: Views) -> Any:
    """Sum over the CTAs of a cluster, each the columns of its rank; then from registers.

    A rank's partial sums go to the owner of their columns through distributed shared memory.
    """
    split, groups = p.knobs.split, p.group_columns // 8 // p.knobs.split
    threads = 128 * p.sharing
    quads, tiles = p.tall * groups, p.knobs.cluster_m * p.knobs.cluster_n

    def slot(sender: Any, quad: int, thread: Any) -> Any:
        return ((sender * quads + quad) * threads + thread) * 4

    def send_slice(sm: Any, acc: Any, owner: int, rank: Any, thread: Any) -> None:
        k_rank = rank // tiles
        sender = k_rank - T.Select(k_rank > owner, T.int32(1), T.int32(0))
        peer = owner * tiles + rank % tiles
        for m in range(p.tall):
            for i in range(groups):
                at = m * (p.group_columns // 2) + (owner * groups + i) * 4
                values = [acc[at + j] for j in range(4)]
                where = sm.partial.ptr_to([slot(sender, m * groups + i, thread)])
                T.evaluate(hopper_ops.send(where, sm.summed.ptr_to([0]), peer, values))

    def own_slice(
        sm: Any, acc: Any, at: Any, wg: Any, lane: Any, owner: int, thread: Any, total: Any
    ) -> None:
        for m in range(p.tall):
            for i in range(groups):
                first = m * (p.group_columns // 2) + (owner * groups + i) * 4
                for j in range(4):
                    value = acc[first + j]
                    for sender in range(split - 1):
                        value = value + sm.partial[slot(sender, m * groups + i, thread) + j]
                    T.buffer_store(total, value, [j])
                for r in range(2):
                    part = (m, owner * groups + i, r)
                    pair = (total[r * 2], total[r * 2 + 1])
                    _write(gemm, p, views, pair, at, wg, lane, part)

    @T.inline
    def finish(sm: Any, acc: Any, at: Any, wg: Any, lane: Any, rank: Any) -> None:
        k_rank = T.meta_var(rank // tiles)
        thread = T.meta_var(wg * 128 + lane if p.sharing == 2 else lane)
        total = T.alloc_local([4], "float32")
        for owner in T.unroll(split):
            if k_rank != owner:
                send_slice(sm, acc, owner, rank, thread)
        hopper_ops.wait(sm.summed.ptr_to([0]), 0)
        for owner in T.unroll(split):
            if k_rank == owner:
                own_slice(sm, acc, at, wg, lane, owner, thread, total)

    return finish


def _store_pair(views: Views, buffer: Any, pair: Any, at: list[Any]) -> None:
    dtype = str(buffer.dtype)
    both = T.alloc_local([2], dtype)
    for c in range(2):
        T.buffer_store(both, pair[c], [c])
    with T.vectorized(2) as c:
        T.buffer_store(views.flat[buffer], both[c], [offset(buffer, at) + c])


def place(gemm: Any, row: Any, col: Any, batch: Any) -> list[Any]:
    """Index into an output: batch and row split into their dimensions, then the column."""
    lead, batch = [], T.Cast("int64", batch)
    for extent in reversed(gemm.batch):
        extent = tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
        lead.append(tirx.floormod(batch, extent))
        batch = tirx.floordiv(batch, extent)
    return [*reversed(lead), *position(gemm, row, col)]


def _first_row(p: Plan, at: Any, wg: Any) -> Any:
    return at[0] + wg * p.group_rows if p.knobs.groups == "rows" else at[0]


def _first_column(p: Plan, at: Any, wg: Any) -> Any:
    return at[1] + wg * p.group_columns if p.knobs.groups == "columns" else at[1]


def pack(dtype: str, low: Any, high: Any) -> Any:
    """Return two values of a 16-bit output in one register, rounded once."""
    wide = [_unrounded(v) for v in (low, high)]
    if all(v is not None for v in wide):
        return hopper_ops.pack(dtype, *wide)
    words = [T.Cast("uint32", T.reinterpret("uint16", v)) for v in (low, high)]
    return T.bitwise_or(words[0], T.shift_left(words[1], T.uint32(16)))


def _unrounded(value: Any) -> Any:
    """Return the float32 value that ``value`` rounds, or None."""
    inner = value.value if isinstance(value, tirx.Cast) else None
    return inner if inner is not None and str(inner.ty) == "float32" else None

"""Loop nests of the CPU GEMM: a register tile of accumulators, panels of B, tasks over threads.

The scheme is that of Goto and van de Geijn (2008) and BLIS: B lies in panels of NR columns, a tile
of MR rows by NR columns stays in registers over the whole of K (or a block of it), and the finished
tile goes through the epilogue.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.stmt import ForKind

from tvmcap.schedules import cpu_build as b
from tvmcap.schedules.cpu_bytes import ByteTiles
from tvmcap.schedules.cpu_pack import copy_columns, copy_rows
from tvmcap.schedules.cpu_target import (
    dot_product,
    pack_width,
    threads,
    vector_lanes,
    vector_registers,
)
from tvmcap.schedules.cpu_tile import Knobs, Panel, Tiles, zero
from tvmcap.schedules.gemm_axes import GROUP
from tvmcap.schedules.gemm_match import Gemm

#: Multiply-adds below which a product runs on the calling thread: waking the others costs more.
SERIAL_BELOW = 1 << 17


def lower(func: tirx.PrimFunc, problem: Gemm, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Return the scheduled PrimFunc: same parameters, aligned to 16 bytes only."""
    params, renamed = b.aligned(func.params)
    body = _Nest(problem, knobs, target, renamed).body()
    return b.scheduled(func, params, body)


class _Nest:
    """Builds the body; the attributes are what every level of the nest reads."""

    def __init__(self, problem: Gemm, knobs: Knobs, target: Any, renamed: dict[Any, Any]) -> None:
        self.p, self.knobs, self.renamed = problem, knobs, renamed
        self.vl, self.regs = vector_lanes(target), vector_registers(target)
        self.nr, self.threads = pack_width(str(problem.b.dtype), target), threads(target)
        self.dot = dot_product(target)
        self.views: dict[Any, Any] = {}
        self.m, self.n, self.k = (_expr(e) for e in (problem.rows, problem.n, problem.k))
        self.panels, self.batch = b.ceildiv(self.n, self.nr), b.product(problem.batch)
        self.blocks_k = (
            1 if not knobs.kc or _at_most(self.k, knobs.kc) else b.ceildiv(self.k, knobs.kc)
        )
        self.kc = self.k if self.blocks_k == 1 else b.const(knobs.kc)
        self.tiles: Tiles

    # --- tasks

    def body(self) -> Any:
        """Return the whole computation: views of the parameters, then tasks in parallel."""
        fused = self.p.fused.epilogue
        declared = []
        whole = [r for r in fused.reads if self._is_whole(r)]
        for buffer in {x: None for x in (self.p.a, self.p.b, *whole, *fused.outputs)}:
            self.views[buffer], stmt = b.flat(self.renamed[buffer])
            declared.append(stmt)
        dot = self.dot if str(self.p.a.dtype) == "uint8" else None
        kind = partial(ByteTiles, dot=dot) if self.p.layout == "grouped" else Tiles
        self.tiles = kind(
            self.knobs,
            self.vl,
            self.regs,
            self.nr,
            self.views[self.p.a],
            (self.k, b.const(1)) if self.p.a_layout == "mk" else (b.const(1), self.m),
            self.k,
            self.kc,
            self.blocks_k == 1,
        )
        limit = b.const(self.knobs.mc)
        blocks = b.ceildiv(self.m, self._rows_wanted(limit))

        def split(blocks: Any) -> Any:
            share = tirx.max(b.ceildiv(self.m, tirx.max(blocks, b.const(1))), b.const(1))
            rows = b.ceildiv(share, self.knobs.mr) * self.knobs.mr
            return b.bound(
                "mc",
                rows,
                lambda mc: b.bound("blocks", b.ceildiv(self.m, mc), lambda n: self.tasks(mc, n)),
            )

        return b.seq(*declared, b.bound("wanted", blocks, split))

    def _rows_wanted(self, limit: Any) -> Any:
        """Rows a task such that there are several tasks a thread."""
        columns = self.panels * self.batch
        share = tirx.max(
            b.ceildiv(b.const(4 * self.threads), tirx.max(columns, b.const(1))), b.const(1)
        )
        if isinstance(share, tirx.IntImm) and share.value == 1:
            return limit
        return tirx.max(tirx.min(limit, b.ceildiv(self.m, share)), b.const(1))

    def tasks(self, mc: Any, blocks: Any) -> Any:
        """Return the loop over tasks, in parallel where there is enough to do."""
        count = self.batch * self.panels * blocks

        def task(t: Any) -> Any:
            inner = blocks if self.knobs.order == "n" else self.panels
            outer, last = tirx.truncdiv(t, inner), tirx.truncmod(t, inner)
            groups = self.panels if self.knobs.order == "n" else blocks
            batch, mid = tirx.truncdiv(outer, groups), tirx.truncmod(outer, groups)
            panel, block = (mid, last) if self.knobs.order == "n" else (last, mid)
            return b.bound(
                "batch",
                batch,
                lambda g: b.bound("panel", panel, lambda p: self.task(g, p, block * mc, mc)),
            )

        work = self.m * self.n * self.k * self.batch
        if not _at_most(self.n * self.k, SERIAL_BELOW // 2):
            return b.loop("t", count, task, ForKind.PARALLEL)
        return b.parallel("t", count, task, work, SERIAL_BELOW)

    def task(self, batch: Any, panel: Any, start: Any, mc: Any) -> Any:
        """Return one block of rows times one panel, and its epilogue."""
        most = (self.knobs.mc + self.knobs.mr) * self.nr
        tile, allocated = b.scratch(most, self.p.sums, "tile")

        def rows(row: Any, left: Any) -> Any:
            clear = None
            if self.blocks_k != 1:
                clear = b.loop(
                    "z", left * (self.nr // self.vl), lambda z: self._zero(tile, z * self.vl)
                )
            multiply = b.loop(
                "kb",
                self.blocks_k,
                lambda kb: self.source(batch, panel, row, left, kb * self.kc, tile),
            )
            return b.seq(allocated, clear, multiply, self.epilogue(batch, panel, row, left, tile))

        return b.bound(
            "row",
            start,
            lambda row: b.bound("left", tirx.min(self.m - row, mc), lambda left: rows(row, left)),
        )

    # --- where B comes from

    def source(self, batch: Any, panel: Any, row: Any, left: Any, k0: Any, tile: Any) -> Any:
        """Return one block of K: B's panel as it lies, or copied by the thread first."""
        steps = self.kc if self.blocks_k == 1 else tirx.min(self.kc, self.k - k0)
        view = self.views[self.p.b]

        def multiply(source: Panel, most: int) -> Any:
            a0 = self._matrix(batch, self.p.a_batched) * self.m * self.k
            a0 = a0 + (row * self.k + k0 if self.p.a_layout == "mk" else k0 * self.m + row)
            return b.bound(
                "kl", steps, lambda kl: self.tiles.rows(source, a0, left, kl, tile, most)
            )

        if self.p.layout == "packed":
            lies = Panel(view, (panel * self.k + k0) * self.nr, b.const(self.nr))
            return multiply(lies, self.knobs.mr)
        if self.p.layout == "grouped":
            groups = b.ceildiv(self.k, GROUP)
            return multiply(Panel(view, panel * groups * self.nr, b.const(self.nr)), self.knobs.mr)
        packed, allocated = b.scratch(self.kc * self.nr, "float32", "panel")
        column = panel * self.nr
        copied = b.seq(
            allocated,
            self._copy(batch, column, k0, steps, packed),
            multiply(Panel(packed, b.const(0), b.const(self.nr)), self.knobs.mr),
        )
        if self.p.layout == "nk" or not self.knobs.direct:
            return copied
        lies = Panel(
            view, (self._matrix(batch, self.p.b_batched) * self.k + k0) * self.n + column, self.n
        )
        direct = multiply(lies, min(self.knobs.direct, self.knobs.mr))
        fits = tirx.all(left <= b.const(self.knobs.direct), column + self.nr <= self.n)
        return tirx.IfThenElse(fits, direct, copied)

    def _copy(self, batch: Any, column: Any, k0: Any, steps: Any, packed: Any) -> Any:
        view, n, k = self.views[self.p.b], self.n, self.k
        matrix = self._matrix(batch, self.p.b_batched)

        def start(i: Any) -> Any:
            if self.p.layout == "kn":
                return (matrix * k + k0 + i) * n + column
            return (matrix * n + column + i) * k + k0

        copy = copy_rows if self.p.layout == "kn" else copy_columns
        return copy(view, start, steps, n - column, packed, self.vl, self.nr)

    # --- the epilogue

    def epilogue(self, batch: Any, panel: Any, row: Any, left: Any, tile: Any) -> Any:
        """Return the stores of the finished rows, in vectors; columns past N are not stored."""
        column, vl = panel * self.nr, self.vl

        def line(i: Any) -> Any:
            line_of = b.bound("line", batch * self.m + row + i, lambda at: fill(i, at))
            return line_of

        def fill(i: Any, at: Any) -> Any:
            def vector(v: Any) -> Any:
                return b.loop(
                    "l",
                    vl,
                    lambda lane: self.store(
                        at, column + v * vl + lane, tile, i * self.nr + v * vl + lane
                    ),
                    ForKind.VECTORIZED,
                )

            def single(j: Any) -> Any:
                return self.store(at, column + j, tile, i * self.nr + j)

            if isinstance(self.n, tirx.IntImm) and self.n.value % self.nr == 0:
                return b.loop("v", self.nr // vl, vector)
            width = tirx.min(self.n - column, b.const(self.nr))
            whole = tirx.truncdiv(width, vl)
            if isinstance(self.n, tirx.IntImm) and self.n.value % vl == 0:
                return b.loop("v", whole, vector)
            return b.seq(
                b.loop("v", whole, vector),
                b.loop("j", width - whole * vl, lambda j: single(whole * vl + j)),
            )

        return b.loop("i", left, line)

    def store(self, line: Any, col: Any, tile: Any, at: Any) -> Any:
        """Return the stores of one element of every output."""
        fused = self.p.fused.epilogue
        value = tirx.BufferLoad(tile, [at])
        if str(fused.anchor.dtype) != self.p.sums:
            value = tirx.Cast(fused.anchor.dtype, value)
        index = [*_unflatten(line, [*self.p.batch, *self.p.row_dims]), col]
        spot = line * self.n + col

        def load(buffer: Any, where: list[Any]) -> Any:
            if buffer in self.views and all(
                x is y or x.same_as(y) for x, y in zip(where, index, strict=True)
            ):
                return tirx.BufferLoad(self.views[buffer], [spot])
            return tirx.BufferLoad(self.renamed[buffer], where)

        binds, values = fused.stores(value, index, load)
        return b.seq(*binds, *(tirx.BufferStore(self.views[out], x, [spot]) for out, x in values))

    # --- small things

    def _matrix(self, batch: Any, batched: bool) -> Any:
        """Return which matrix of an operand one product of the batch reads."""
        return batch if batched else b.const(0)

    def _is_whole(self, buffer: Any) -> bool:
        shape = self.p.fused.epilogue.anchor.shape
        return len(buffer.shape) == len(shape) and all(
            str(x) == str(y) for x, y in zip(buffer.shape, shape, strict=True)
        )

    def _zero(self, buffer: Any, at: Any) -> Any:
        return tirx.BufferStore(buffer, tirx.Broadcast(zero(), self.vl), [b.lanes(at, self.vl)])


def _expr(extent: Any) -> Any:
    return b.const(extent) if isinstance(extent, int) else extent


def _at_most(extent: Any, limit: int) -> bool:
    return isinstance(extent, tirx.IntImm) and extent.value <= limit


def _unflatten(line: Any, extents: list[Any]) -> list[Any]:
    """Return the index of row ``line`` in each of the leading dimensions."""
    index: list[Any] = []
    for extent in reversed(extents[1:]):
        index.append(tirx.truncmod(line, _expr(extent)))
        line = tirx.truncdiv(line, _expr(extent))
    return [*([line] if extents else []), *reversed(index)]

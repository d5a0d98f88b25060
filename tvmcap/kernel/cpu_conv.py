"""Two-dimensional convolutions on a CPU: a register tile of output channels by pixels.

The input is first copied with its padding written out. A stride s leaves the copy in s * s phases,
each of which a kernel position reads with stride one, so that a vector of neighbouring output
pixels is a vector of neighbouring elements. Pixels are counted along the rows of the copy: the few
past a row's end are computed too, and not stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.sym import Analyzer
from tvm.tirx.stmt import ForKind

from tvmcap.kernel.conv_match import Conv, extents
from tvmcap.kernel.cpu_nests import Finish, Machine, overlapped, width_for
from tvmcap.schedules import cpu_build as b
from tvmcap.schedules.cpu_pack import as_float, shuffle

Expr = Any
Parallel = Callable[[list[Expr], Expr, Callable[[list[Expr]], Any]], Any]
"""(extents, work, body of an index into the extents) -> the loops."""

_ZERO = tirx.FloatImm("float32", 0.0)

#: Products summed in registers before they are added to memory: rounding errors grow with the sum.
DEPTH = 128
#: Finished sums that a task keeps at a time.
TILE = 8192


class Nest:
    """Builds the loops of one convolution."""

    def __init__(self, conv: Conv, machine: Machine, renamed: dict[Any, Any]) -> None:
        self.c, self.machine, self.lanes = conv, machine, machine.lanes
        self.batch, filters, self.height, self.width = conv.block.extents
        depth, *kernel = conv.block.reduced_extents
        self.filters, self.depth = int(filters), int(depth)
        self.kernel = [int(k) for k in kernel]
        reach = [
            (k - 1) * d // s
            for k, d, s in zip(self.kernel, conv.dilation, conv.stride, strict=True)
        ]
        self.rows, self.line = self.height + reach[0], self.width + reach[1]
        self.plane = self.rows * self.line
        self.channels = int(conv.source.shape[1])
        self.across, self.down, self.chunk = self._shape()
        self.inputs, self.declared = b.flat(renamed[conv.source])
        self.weights, self.declared_too = b.flat(renamed[conv.weight])

    def _shape(self) -> tuple[int, int, int]:
        """Return the tile (vectors of pixels, output channels) and the rows of pixels of a task."""
        per_group = self.filters // self.c.groups
        line, height = (
            int(x) if isinstance(x, tirx.IntImm) else 64 for x in (self.line, self.height)
        )

        def cost(point: tuple[int, int, int]) -> float:
            across, down, rows = point
            step = max(across * down / 2, (across + down) / 2, 4.0)
            tiles = -(-rows * line // (across * self.lanes)) * -(-per_group // down)
            return step * tiles * -(-height // rows) + 0.01 * rows

        points = [
            (across, down, min(rows, height))
            for across, down in itertools.product((1, 2, 3, 4, 6, 8), range(1, 13))
            if (across * down + across + 1) <= self.machine.registers and down <= per_group
            and (self.c.groups == 1 or per_group % down == 0)
            for most in (max(1, TILE // (down * line)),)
            for rows in range(max(1, min(most // 2, height)), min(most, height) + 1)
        ]  # fmt: skip
        return min(points, key=cost)

    def body(self, store: Finish, parallel: Parallel) -> Any:
        """Return the copy of the input, then the tiles; ``store`` finishes each element."""
        phases = self.c.stride[0] * self.c.stride[1]
        slack = (self.across + 1) * self.lanes + self.kernel[1] * self.c.dilation[1]
        size = self.batch * (self.channels * phases) * self.plane
        padded = tirx.decl_buffer((size + slack,), "float32", "padded")
        copy = parallel(
            [self.batch, b.const(self.channels)], size, lambda at: self._pad(padded, *at)
        )
        weights, widened = self._float_weights(parallel)
        groups = -(-self.filters // self.down)
        chunks = b.ceildiv(self.height, self.chunk)
        work = b.product(extents(self.c.block))

        def task(at: list[Expr]) -> Any:
            first = tirx.min(at[1] * self.down, b.const(self.filters - self.down))
            return b.bound(
                "f",
                first,
                lambda f: self._task(padded, weights, at[0], f, at[2] * self.chunk, store),
            )

        tiles = parallel([self.batch, b.const(groups), chunks], work, task)
        return b.seq(
            self.declared, self.declared_too, tirx.AllocBuffer(padded), copy, widened, tiles
        )

    def _float_weights(self, parallel: Parallel) -> tuple[Any, Any]:
        if str(self.weights.dtype) == "float32":
            return self.weights, None
        each = self.depth * self.kernel[0] * self.kernel[1]
        wide = tirx.decl_buffer((self.filters * each,), "float32", "wide")

        def convert(at: list[Expr]) -> Any:
            return b.loop(
                "k",
                each,
                lambda k: tirx.BufferStore(
                    wide, as_float(self.weights, at[0] * each + k), [at[0] * each + k]
                ),
            )

        stmt = parallel([b.const(self.filters)], b.const(self.filters * each), convert)
        return wide, b.seq(tirx.AllocBuffer(wide), stmt)

    def _pad(self, padded: Any, n: Expr, c: Expr) -> Any:
        """Return the copy of one channel of one image, phase after phase, row after row."""
        (sy, sx), (top, left) = self.c.stride, self.c.before
        high, wide = self.c.source.shape[2:]
        image = n * self.channels + c

        def row(phase: tuple[int, int], i: Expr) -> Any:
            y = i * sy + (phase[0] - top)
            to = (image * (sy * sx) + phase[0] * sx + phase[1]) * self.plane + i * self.line
            start = max(0, -(-(left - phase[1]) // sx))
            end = tirx.max(
                tirx.min(self.line, b.ceildiv(wide + (left - phase[1]), sx)), b.const(start)
            )
            source = (image * high + y) * wide + (phase[1] - left)

            def clear(begin: Expr | int, count: Expr | int) -> Any:
                return b.loop(
                    "j", count, lambda j: tirx.BufferStore(padded, _ZERO, [to + begin + j])
                )

            inside = b.seq(
                clear(0, start),
                self._line(
                    padded, to + start, source + start * sx, Analyzer().simplify(end - start)
                ),
                clear(end, self.line - end),
            )
            return tirx.IfThenElse(tirx.all(y >= 0, y < high), inside, clear(0, self.line))

        every = itertools.product(range(sy), range(sx))
        return b.seq(*(b.loop("i", self.rows, partial(row, phase)) for phase in every))

    def _line(self, padded: Any, to: Expr, source: Expr, count: Expr) -> Any:
        step, width = self.c.stride[1], self.lanes
        while isinstance(count, tirx.IntImm) and width > max(count.value, 1):
            width //= 2

        def element(j: Expr) -> Any:
            return tirx.BufferStore(padded, as_float(self.inputs, source + j * step), [to + j])

        def some(at: Expr) -> Expr:
            return as_float(self.inputs, b.lanes(source + at, width), f"x{width}")

        def turn(j: Expr, wide: bool) -> Any:
            if not wide or width == 1:
                return element(j)
            value = some(j)
            if step == 2:  # every other element of two vectors that share one
                even = [i if i < width else i + 1 for i in range(0, 2 * width, 2)]
                value = shuffle([some(j * 2), some(j * 2 + (width - 1))], even)
            return tirx.BufferStore(padded, value, [b.lanes(to + j, width)])

        return overlapped(count, width, turn) if step <= 2 else b.loop("j", count, element)

    def _task(self, padded: Any, weights: Any, n: Expr, f: Expr, top: Expr, store: Finish) -> Any:
        """Return some rows of ``down`` output channels."""
        pixels = self.chunk * self.line + self.across * self.lanes
        sums, allocated = b.scratch(pixels * self.down, "float32", "sums")
        phases = self.c.stride[0] * self.c.stride[1]
        image = (n * self.channels + self.c.channel(f)) * (phases * self.plane) + top * self.line
        block = min(self.depth, max(1, DEPTH // (self.kernel[0] * self.kernel[1])))
        blocks = -(-self.depth // block)
        rows = tirx.min(b.const(self.chunk), self.height - top)
        wide = self.across * self.lanes

        def tile(p: Expr, base: Expr, i: Expr) -> Any:
            count = (
                b.const(block)
                if self.depth % block == 0
                else tirx.min(b.const(block), self.depth - i * block)
            )
            return self._tile(
                padded, weights, base + p, f, i * block, count, sums, p, pixels, blocks == 1
            )

        def tiles(base: Expr, rows: Expr) -> Any:
            return b.loop(
                "p",
                b.ceildiv(rows * self.line, wide),
                lambda p: b.loop("cb", blocks, lambda i: tile(p * wide, base, i)),
            )

        clear = None
        if blocks > 1:
            clear = b.loop("z", pixels * self.down, lambda z: tirx.BufferStore(sums, _ZERO, [z]))

        def finish(rows: Expr) -> Any:
            return self._finish(n, f, top, rows, sums, pixels, store)

        return b.seq(
            allocated,
            clear,
            b.bound(
                "image",
                image,
                lambda base: b.bound("rows", rows, lambda r: b.seq(tiles(base, r), finish(r))),
            ),
        )

    def _tile(
        self, padded: Any, weights: Any, base: Expr, f: Expr, first: Expr, count: Expr,
        sums: Any, p: Expr, pixels: Expr, whole: bool,
    ) -> Any:  # fmt: skip
        """Return the branch-free kernel: ``down`` channels by ``across`` vectors of pixels."""
        (sy, sx), (dy, dx), lanes = self.c.stride, self.c.dilation, self.lanes
        high, wide = self.kernel
        acc = b.Registers(self.down * self.across, lanes, "acc")
        spots = [
            (r, v, r * self.across + v, b.lanes(p + r * pixels + v * lanes, lanes))
            for r in range(self.down)
            for v in range(self.across)
        ]

        def step(c: Expr, i: Expr, j: int) -> list[Any]:
            phase = tirx.truncmod(i * dy, sy) * sx + (j * dx) % sx
            at = base + ((first + c) * (sy * sx) + phase) * self.plane
            at = at + tirx.truncdiv(i * dy, b.const(sy)) * self.line + j * dx // sx
            tap = ((first + c) * high + i) * wide + j
            each = self.depth * high * wide
            x = [
                tirx.BufferLoad(padded, [b.lanes(at + v * lanes, lanes)])
                for v in range(self.across)
            ]
            w = [
                tirx.Broadcast(tirx.BufferLoad(weights, [(f + r) * each + tap]), lanes)
                for r in range(self.down)
            ]
            return [acc.store(s, acc.load(s) + x[v] * w[r]) for r, v, s, _ in spots]

        def total(s: int, at: Expr) -> Expr:
            sum_ = acc.load(s)
            return sum_ if whole else tirx.BufferLoad(sums, [at]) + sum_

        def taps(c: Expr) -> Any:
            return b.loop(
                "i", high, lambda i: b.seq(*(s for j in range(wide) for s in step(c, i, j)))
            )

        return b.seq(
            acc.allocated,
            *(acc.store(s, tirx.Broadcast(_ZERO, lanes)) for _, _, s, _ in spots),
            b.loop("c", count, taps),
            *(tirx.BufferStore(sums, total(s, at), [at]) for _, _, s, at in spots),
        )

    def _finish(
        self, n: Expr, f: Expr, top: Expr, rows: Expr, sums: Any, pixels: Expr, store: Finish
    ) -> Any:
        """Return the stores of the pixels that are in the image."""
        axes = self.c.block.axes
        width = width_for(self.width, self.c.block, self.machine)

        def line(r: Expr, y: Expr) -> Any:
            def element(x: Expr) -> Any:
                at = dict(zip(axes, (n, f + r, top + y, x), strict=True))
                return store(at, tirx.BufferLoad(sums, [r * pixels + y * self.line + x]))

            def turn(start: Expr, wide: bool) -> Any:
                if not wide or width == 1:
                    return element(start)
                return b.loop("l", width, lambda lane: element(start + lane), ForKind.VECTORIZED)

            return overlapped(self.width, width, turn)

        return b.loop("r", self.down, lambda r: b.loop("y", rows, lambda y: line(r, y)))

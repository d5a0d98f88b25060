"""Two-dimensional convolutions on a CPU: a register tile of output channels by pixels.

The input is first copied with its padding written out. A stride s leaves the copy in s * s phases,
each of which a kernel position reads with stride one, so that a vector of neighbouring output
pixels is a vector of neighbouring elements. Pixels are counted along the rows of the copy: the few
past a row's end are computed too, and not stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.sym import Analyzer
from tvm.tirx.stmt import ForKind

from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.cpu_blocks import GUARD, Block, loads, substitute
from tvmcap.kernel.cpu_nests import Finish, Machine, overlapped, width_for
from tvmcap.schedules import cpu_build as b
from tvmcap.schedules.cpu_pack import as_float, shuffle

Expr = Any
Parallel = Callable[[list[Expr], Expr, Callable[[list[Expr]], Any]], Any]
"""(extents, work, body of an index into the extents) -> the loops."""

#: Products summed in registers before they are added to memory: rounding errors grow with the sum.
DEPTH = 128
#: Finished sums that a task keeps at a time.
TILE = 8192
_WIDEST_KERNEL = 11


@dataclass(frozen=True)
class Conv:
    """``out[n, f, y, x] = sum(in[n, channel(f) + c, y * s + i * d, x * s + j * d] * w[f, c, i, j])``.

    Attributes
    ----------
    block: the reduction.
    source, weight: parameters; ``source`` is the tensor before padding.
    padding: the block that pads, if one does.
    channel: first input channel of an output channel.
    groups: of channels.
    stride, dilation, before: of height and width; ``before`` is the padding above and left.
    """

    block: Block
    source: Any
    weight: Any
    padding: Block | None
    channel: Callable[[Expr], Expr]
    groups: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]


def match(block: Block, blocks: Sequence[Block], params: Sequence[Any]) -> Conv | None:
    """Return the convolution that a reduction is, or None; operands must be parameters."""
    factors = _factors(block)
    if factors is None:
        return None
    data, weight = factors
    n, f, *pixel = block.axes
    c, *kernel = block.reduced
    analyzer = Analyzer()
    for axis, extent in zip((*block.axes, *block.reduced), _extents(block), strict=True):
        analyzer.bind(axis, tvm.ir.Range(b.const(0), extent))
    steps = [_steps(i, *at, analyzer) for i, *at in zip(data.indices[2:], pixel, kernel, strict=True)]
    first = substitute(data.indices[1], {c: b.const(0)})
    if None in steps or not ep.same(data.indices[0], n):
        return None
    if not analyzer.can_prove_equal(data.indices[1], first + c):
        return None
    found = _unpadded(data.source, block, blocks)
    if found is None or not all(any(x.same_as(p) for p in params) for x in (found[0], weight.source)):
        return None
    source, padding, before = found
    (sy, dy), (sx, dx) = (s for s in steps if s is not None)
    groups = int(source.shape[1]) // int(weight.source.shape[1])

    def channel(at: Expr) -> Expr:
        return substitute(first, {f: at})

    return Conv(
        block, source, weight.source, padding, channel, groups, (sy, sx), (dy, dx), before
    )


def _extents(block: Block) -> tuple[Expr, ...]:
    return (*block.extents, *block.reduced_extents)


def _factors(block: Block) -> tuple[Any, Any] | None:
    """Return the loads of the input and of the weight, if the block is their product's sum."""
    if block.combine is not tirx.Add or (len(block.axes), len(block.reduced)) != (4, 3):
        return None
    if not isinstance(block.value, tirx.Mul) or str(block.buffer.dtype) != "float32":
        return None
    if not isinstance(block.init, tirx.FloatImm) or block.init.value != 0.0:
        return None
    fixed = (block.extents[1], *block.reduced_extents)
    if not all(isinstance(e, tirx.IntImm) for e in fixed) or fixed[-1].value > _WIDEST_KERNEL:
        return None
    a, w = (x.value if isinstance(x, tirx.Cast) else x for x in (block.value.a, block.value.b))
    if not isinstance(a, TensorLoad) or not isinstance(w, TensorLoad) or len(a.indices) != 4:
        return None
    if not ep.same_all(w.indices, [block.axes[1], *block.reduced]):
        return None
    return (a, w) if isinstance(a.source.shape[1], tirx.IntImm) else None


def _steps(index: Expr, at: Expr, inner: Expr, analyzer: Any) -> tuple[int, int] | None:
    """Return (s, d) of ``index == at * s + inner * d``."""

    def value(x: int, y: int) -> Any:
        return analyzer.simplify(substitute(index, {at: b.const(x), inner: b.const(y)}))

    zero, s, d = value(0, 0), value(1, 0), value(0, 1)
    if not all(isinstance(x, tirx.IntImm) for x in (zero, s, d)) or zero.value or s.value < 1:
        return None
    if not analyzer.can_prove_equal(index, at * s.value + inner * d.value):
        return None
    return s.value, d.value


def _unpadded(
    source: Any, conv: Block, blocks: Sequence[Block]
) -> tuple[Any, Block | None, tuple[int, int]] | None:
    """Return the tensor before its padding, the block that pads it, and what it adds in front."""
    padding = next((x for x in blocks if x.buffer.same_as(source)), None)
    if padding is None:
        return source, None, (0, 0)
    readers = [x for x in blocks if any(ld.source.same_as(source) for ld in loads(x.value))]
    value = padding.value
    if len(readers) != 1 or readers[0] is not conv or getattr(getattr(value, "op", 0), "name", "") != GUARD:
        return None
    _, load, other = value.args
    if not isinstance(load, TensorLoad) or not isinstance(other, tirx.FloatImm) or other.value:
        return None
    shifts = [Analyzer().simplify(a - i) for a, i in zip(padding.axes, load.indices, strict=True)]
    if not all(isinstance(s, tirx.IntImm) for s in shifts) or any(s.value for s in shifts[:2]):
        return None
    return load.source, padding, (shifts[2].value, shifts[3].value)


class Nest:
    """Builds the loops of one convolution."""

    def __init__(self, conv: Conv, machine: Machine, renamed: dict[Any, Any]) -> None:
        self.c, self.machine, self.lanes = conv, machine, machine.lanes
        self.batch, filters, self.height, self.width = conv.block.extents
        depth, *kernel = conv.block.reduced_extents
        self.filters, self.depth = int(filters), int(depth)
        self.kernel = [int(k) for k in kernel]
        reach = [(k - 1) * d // s for k, d, s in zip(self.kernel, conv.dilation, conv.stride, strict=True)]
        self.rows, self.line = self.height + reach[0], self.width + reach[1]
        self.plane = self.rows * self.line
        self.channels = int(conv.source.shape[1])
        self.across, self.down, self.chunk = self._shape()
        self.inputs, self.declared = b.flat(renamed[conv.source])
        self.weights, self.declared_too = b.flat(renamed[conv.weight])

    def _shape(self) -> tuple[int, int, int]:
        """Return the tile (vectors of pixels, output channels) and the rows of pixels of a task."""
        per_group = self.filters // self.c.groups
        line, height = (int(x) if isinstance(x, tirx.IntImm) else 64 for x in (self.line, self.height))

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
        copy = parallel([self.batch, b.const(self.channels)], size, lambda at: self._pad(padded, *at))
        weights, widened = self._float_weights(parallel)
        groups = -(-self.filters // self.down)
        chunks = b.ceildiv(self.height, self.chunk)
        work = b.product(_extents(self.c.block))

        def task(at: list[Expr]) -> Any:
            first = tirx.min(at[1] * self.down, b.const(self.filters - self.down))
            return b.bound(
                "f", first, lambda f: self._task(padded, weights, at[0], f, at[2] * self.chunk, store)
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
            end = tirx.max(tirx.min(self.line, b.ceildiv(wide + (left - phase[1]), sx)), b.const(start))
            source = (image * high + y) * wide + (phase[1] - left)

            def clear(begin: Expr | int, count: Expr | int) -> Any:
                return b.loop(
                    "j", count, lambda j: tirx.BufferStore(padded, _ZERO, [to + begin + j])
                )

            inside = b.seq(
                clear(0, start),
                self._line(padded, to + start, source + start * sx, Analyzer().simplify(end - start)),
                clear(end, self.line - end),
            )
            return tirx.IfThenElse(tirx.all(y >= 0, y < high), inside, clear(0, self.line))

        every = itertools.product(range(sy), range(sx))
        return b.seq(*(b.loop("i", self.rows, lambda i, p=phase: row(p, i)) for phase in every))

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

    def _task(
        self, padded: Any, weights: Any, n: Expr, f: Expr, top: Expr, store: Finish
    ) -> Any:
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
            count = b.const(block) if self.depth % block == 0 else tirx.min(b.const(block), self.depth - i * block)
            return self._tile(padded, weights, base + p, f, i * block, count, sums, p, pixels, blocks == 1)

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
        acc, allocated = b.scratch(self.down * self.across, f"float32x{lanes}", "acc", "local")
        spots = [
            (r, v, b.const(r * self.across + v), b.lanes(p + r * pixels + v * lanes, lanes))
            for r in range(self.down)
            for v in range(self.across)
        ]

        def step(c: Expr, i: Expr, j: int) -> list[Any]:
            phase = tirx.truncmod(i * dy, sy) * sx + (j * dx) % sx
            at = base + ((first + c) * (sy * sx) + phase) * self.plane
            at = at + tirx.truncdiv(i * dy, b.const(sy)) * self.line + j * dx // sx
            tap = ((first + c) * high + i) * wide + j
            each = self.depth * high * wide
            x = [tirx.BufferLoad(padded, [b.lanes(at + v * lanes, lanes)]) for v in range(self.across)]
            w = [
                tirx.Broadcast(tirx.BufferLoad(weights, [(f + r) * each + tap]), lanes)
                for r in range(self.down)
            ]
            return [
                tirx.BufferStore(acc, tirx.BufferLoad(acc, [s]) + x[v] * w[r], [s])
                for r, v, s, _ in spots
            ]

        def total(s: Expr, at: Expr) -> Expr:
            sum_ = tirx.BufferLoad(acc, [s])
            return sum_ if whole else tirx.BufferLoad(sums, [at]) + sum_

        def taps(c: Expr) -> Any:
            return b.loop("i", high, lambda i: b.seq(*(s for j in range(wide) for s in step(c, i, j))))

        return b.seq(
            allocated,
            *(tirx.BufferStore(acc, tirx.Broadcast(_ZERO, lanes), [s]) for _, _, s, _ in spots),
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
                return b.loop("l", width, lambda l: element(start + l), ForKind.VECTORIZED)

            return overlapped(self.width, width, turn)

        return b.loop("r", self.down, lambda r: b.loop("y", rows, lambda y: line(r, y)))


_ZERO = tirx.FloatImm("float32", 0.0)

"""The register tile of the CPU GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvmcap.schedules import cpu_build as b
from tvmcap.schedules.cpu_pack import as_float

Expr = Any


@dataclass(frozen=True)
class Knobs:
    """Choices of the CPU GEMM.

    Attributes
    ----------
    mr: rows of a full register tile.
    nv: vectors of a full register tile's row; a panel holds a multiple of it.
    mc: most rows of one task.
    kc: steps of K summed in registers before they are added to memory; 0 for all of K. Rounding
        errors grow with the length of a sum, so long ones are cut whatever the speed.
    unroll: steps of K a turn of the innermost loop.
    order: "n" for panels outermost, "m" for blocks of rows outermost.
    direct: at most so many rows read a row-major B in place; more pack its panels first.
    """

    mr: int
    nv: int
    mc: int
    kc: int
    unroll: int
    order: str
    direct: int


@dataclass(frozen=True)
class Panel:
    """Where a panel of B lies: element (k, j) is ``buffer[base + k * stride + j]``."""

    buffer: Any
    base: Expr
    stride: Expr


@dataclass(frozen=True)
class Tiles:
    """Multiplies rows of A by a panel.

    Attributes
    ----------
    knobs: the setting.
    lanes, registers: of the target.
    width: columns of a panel.
    a: flat view of A.
    strides: distances in it between neighbouring rows and between neighbouring steps of K.
    k: steps of K in all.
    kc: steps of one block of K.
    whole: one block is all of K; else the sums of each block are added to the tile's memory.
    """

    knobs: Knobs
    lanes: int
    registers: int
    width: int
    a: Any
    strides: tuple[Expr, Expr]
    k: Expr
    kc: Expr
    whole: bool

    def rows(self, panel: Panel, a0: Expr, left: Expr, kl: Expr, memory: Any, most: int) -> Any:
        """Return the loop over full tiles of ``most`` rows, and tiles of 4, 2 and 1 for the rest.

        A's element (0, 0) is ``a[a0]``; the sums go to ``memory[i * width + j]``.
        """

        def part(i: Expr, r: int) -> Any:
            return self._columns(panel, a0 + i * self.strides[0], r, kl, memory, i * self.width)

        full = b.loop("i", tirx.truncdiv(left, most), lambda i: part(i * most, most))
        rest, bit = [], 1
        while bit < most:
            # The rows of the larger tiles come first: the bits of the remainder above this one.
            remain = tirx.truncmod(left, most)
            done = left - tirx.truncmod(remain, 2 * bit)
            here = tirx.truncmod(tirx.truncdiv(remain, bit), 2)
            rest.append(tirx.IfThenElse(tirx.EQ(here, b.const(1)), part(done, bit), None))
            bit *= 2
        return b.seq(full, *reversed(rest))

    def _columns(self, panel: Panel, a0: Expr, r: int, kl: Expr, memory: Any, at: Expr) -> Any:
        """Return ``r`` rows by the panel, as few register tiles wide as the registers allow."""
        vectors = self.width // self.lanes
        fits = r < self.knobs.mr and (r + 1) * vectors + 1 <= self.registers
        count = vectors if fits else self.knobs.nv

        def tile(h: Expr) -> Any:
            shift = h * (count * self.lanes)
            shifted = Panel(panel.buffer, panel.base + shift, panel.stride)
            return self._tile(shifted, a0, r, count, kl, memory, at + shift)

        return b.loop("h", vectors // count, tile)

    def _tile(
        self, panel: Panel, a0: Expr, r: int, count: int, kl: Expr, memory: Any, at: Expr
    ) -> Any:
        """Return the branch-free kernel: ``r`` rows by ``count`` vectors over ``kl`` steps of K."""
        lanes = self.lanes
        acc = b.Registers(r * count, lanes, "acc")
        spots = [(i, v, i * count + v) for i in range(r) for v in range(count)]
        places = {(i, v): b.lanes(at + (i * self.width + v * lanes), lanes) for i, v, _ in spots}

        def total(i: int, v: int, s: int) -> Expr:
            sum_ = acc.load(s)
            return sum_ if self.whole else tirx.BufferLoad(memory, [places[i, v]]) + sum_

        def step(k: Expr) -> list[Any]:
            base = panel.base + k * panel.stride
            start = a0 + k * self.strides[1]
            left = [
                tirx.Broadcast(as_float(self.a, start + i * self.strides[0]), lanes)
                for i in range(r)
            ]
            right = [
                as_float(panel.buffer, b.lanes(base + v * lanes, lanes), f"x{lanes}")
                for v in range(count)
            ]
            return [acc.store(s, acc.load(s) + left[i] * right[v]) for i, v, s in spots]

        unroll = self.knobs.unroll if _divides(self.knobs.unroll, self.k, self.kc) else 1
        return b.seq(
            acc.allocated,
            *(acc.store(s, tirx.Broadcast(zero(), lanes)) for _, _, s in spots),
            b.loop(
                "k",
                tirx.truncdiv(kl, b.const(unroll)),
                lambda k: b.seq(*(s for u in range(unroll) for s in step(k * unroll + u))),
            ),
            *(tirx.BufferStore(memory, total(i, v, s), [places[i, v]]) for i, v, s in spots),
        )


def zero() -> Expr:
    """Return a float32 zero."""
    return tirx.FloatImm("float32", 0.0)


def _divides(unroll: int, *extents: Any) -> bool:
    return all(isinstance(e, tirx.IntImm) and e.value % unroll == 0 for e in extents)

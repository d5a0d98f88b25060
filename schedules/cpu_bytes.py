"""The register tile of the CPU GEMM for bytes by int8, summed in int32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvmcap.schedules import cpu_build as b
from tvmcap.schedules.cpu_tile import Panel, Tiles
from tvmcap.schedules.gemm_axes import GROUP

Expr = Any


@dataclass(frozen=True)
class ByteTiles(Tiles):
    """Multiplies rows of bytes by a panel whose elements are groups of four steps of K.

    Bases and strides of a ``Panel`` count groups. The sums wrap around at 32 bits, so that they are
    exact wherever the result fits.

    Attributes
    ----------
    dot: the intrinsic that adds four products of unsigned by signed bytes to a lane; None where the
        target has none or A is signed, and single steps are multiplied in int32.
    """

    dot: str | None = None

    def _tile(
        self, panel: Panel, a0: Expr, r: int, count: int, kl: Expr, memory: Any, at: Expr
    ) -> Any:
        """Return the branch-free kernel: ``r`` rows by ``count`` vectors over all of K."""
        lanes = self.lanes
        acc = b.Registers(r * count, lanes, "acc", "int32")
        spots = [(i, v, i * count + v) for i in range(r) for v in range(count)]
        whole, rest = divmod(int(self.k), GROUP)

        def step(k: Expr, steps: int = GROUP) -> list[Any]:
            base = panel.base + k * panel.stride
            starts = [a0 + k * GROUP * self.strides[1] + i * self.strides[0] for i in range(r)]
            if self.dot is None:
                return self._single(panel.buffer, base, starts, steps, acc, spots)
            left = [self._four(start, steps) for start in starts]
            right = [self._group(panel.buffer, base + v * lanes) for v in range(count)]
            return [acc.store(s, self._dot(acc.load(s), left[i], right[v])) for i, v, s in spots]

        unroll = self.knobs.unroll if whole % self.knobs.unroll == 0 else 1
        nothing = tirx.Broadcast(tirx.IntImm("int32", 0), lanes)
        places = {(i, v): b.lanes(at + (i * self.width + v * lanes), lanes) for i, v, _ in spots}
        return b.seq(
            acc.allocated,
            *(acc.store(s, nothing) for _, _, s in spots),
            b.loop(
                "k",
                whole // unroll,
                lambda k: b.seq(*(s for u in range(unroll) for s in step(k * unroll + u))),
            )
            if whole
            else None,
            *(step(b.const(whole), rest) if rest else []),
            *(tirx.BufferStore(memory, acc.load(s), [places[i, v]]) for i, v, s in spots),
        )

    def _dot(self, sums: Expr, left: Expr, right: Expr) -> Expr:
        return tirx.call_llvm_pure_intrin(f"int32x{self.lanes}", self.dot, sums, left, right)

    def _group(self, buffer: Any, at: Expr) -> Expr:
        """Return four steps of K of as many columns as there are lanes."""
        return tirx.BufferLoad(buffer, [b.lanes(at * GROUP, self.lanes * GROUP)])

    def _four(self, start: Expr, steps: int) -> Expr:
        """Return four steps of one row of A in every lane, zeros from ``steps`` on."""
        near = isinstance(self.strides[1], tirx.IntImm) and self.strides[1].value == 1
        if steps == GROUP and near:
            word = tirx.reinterpret("int32", tirx.BufferLoad(self.a, [b.lanes(start, GROUP)]))
        else:
            word = tirx.IntImm("int32", 0)
            for i in range(steps):
                byte = tirx.BufferLoad(self.a, [start + i * self.strides[1]])
                byte = tirx.Cast("int32", byte)
                word = word | tirx.shift_left(byte, tirx.IntImm("int32", 8 * i))
        return tirx.reinterpret(f"int8x{self.lanes * GROUP}", tirx.Broadcast(word, self.lanes))

    def _single(
        self,
        buffer: Any,
        base: Expr,
        starts: list[Expr],
        steps: int,
        acc: b.Registers,
        spots: list[tuple[int, int, int]],
    ) -> list[Any]:
        """Return the multiply-adds of a group, one step of K after the other, in int32."""
        lanes, wide = self.lanes, f"int32x{self.lanes}"
        stmts = []
        for step in range(steps):
            left = [tirx.BufferLoad(self.a, [start + step * self.strides[1]]) for start in starts]
            for i, v, s in spots:
                first = (base + v * lanes) * GROUP + step
                column = tirx.BufferLoad(buffer, [tirx.Ramp(first, b.const(GROUP), lanes)])
                row = tirx.Broadcast(tirx.Cast("int32", left[i]), lanes)
                stmts.append(acc.store(s, acc.load(s) + row * tirx.Cast(wide, column)))
        return stmts

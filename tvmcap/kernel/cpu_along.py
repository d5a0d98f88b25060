"""The reduction of one element on a CPU with vectors along the last reduced axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.stmt import ForKind

from tvmcap.kernel import cpu_sums
from tvmcap.kernel.cpu_blocks import Block, substitute
from tvmcap.schedules import cpu_build as b

Expr = Any
At = dict[Any, Expr]


def along(block: Block, at: At, width: int, store: Callable[[At, Expr], Any]) -> Any:
    """Return the reduction of the element at ``at`` by vectors of ``width``, and its store."""
    return _Along(block, at, width).body(store)


class _Along:
    def __init__(self, block: Block, at: At, width: int) -> None:
        self.block, self.at, self.width = block, at, width
        *self.outer, (self.last, self.extent) = zip(
            block.reduced, block.reduced_extents, strict=True
        )
        known = isinstance(self.extent, tirx.IntImm)
        self.steps = cpu_sums.steps_for(block)
        self.copies = 4 if not known or self.extent.value >= 4 * width else 1
        self.total = width * self.copies
        self.acc = tirx.decl_buffer((self.total,), block.buffer.dtype, "acc")

    def body(self, store: Callable[[At, Expr], Any]) -> Any:
        steps, chain = cpu_sums.steps_of(self.outer), self._chain()
        short = steps is not None and chain is not None and steps * chain <= 2 * self.steps
        plain = short or not cpu_sums.is_float_sum(self.block)
        done, finish = self._plain() if plain else self._sum(chain)
        # Lanes other than the first start from the combiner's neutral element, which is what TVM's
        # reducers use as init.
        init = substitute(self.block.init, self.at)
        return b.seq(
            tirx.AllocBuffer(self.acc),
            self._lanes(self.total, lambda lane: tirx.BufferStore(self.acc, init, [lane])),
            finish,
            store(self.at, tirx.BufferLoad(done, [b.const(0)])),
        )

    def _chain(self) -> int | None:
        """Return how many elements of a line one lane combines at most; None where symbolic."""
        if not isinstance(self.extent, tirx.IntImm):
            return None
        many, rest = divmod(self.extent.value, self.total)
        return int(many + rest // self.width + rest % self.width)

    def _plain(self) -> tuple[Any, Any]:
        loops = cpu_sums.nest(self.outer, self.at, self._line)
        return self.acc, b.seq(loops, *map(self._fold, _halves(self.total)))

    def _sum(self, chain: int | None) -> tuple[Any, Any]:
        totals = cpu_sums.Totals(self.acc, 1, self.width)
        copies = [self.width * c for c in range(1, self.copies)]
        flush = b.seq(*map(self._empty, copies), totals.flush())
        if chain is not None and self.outer and chain <= self.steps:
            size = self.steps // chain
            loops = cpu_sums.nest_in_blocks(self.outer, size, self._line, flush, self.at)
        else:
            loops = cpu_sums.nest(self.outer, self.at, lambda inner: self._line(inner, flush))
        folds = map(totals.fold, _halves(self.width))
        return totals.total, b.seq(totals.start(), loops, *folds)

    def _line(self, inner: At, flush: Any = None) -> Any:
        """Return one line, with a ``flush`` after each block and at the end."""
        many = tirx.truncdiv(self.extent, b.const(self.total))
        some = tirx.truncdiv(self.extent - many * self.total, b.const(self.width))
        done = many * self.total + some * self.width

        def turn(u: Expr) -> Any:
            return b.seq(
                *(
                    self._vector(u * self.total + first, first, inner)
                    for first in range(0, self.total, self.width)
                )
            )

        return b.seq(
            b.loop("u", many, turn)
            if flush is None
            else cpu_sums.blocks(many, self.steps // 4, turn, flush),
            b.loop("v", some, lambda v: self._vector(many * self.total + v * self.width, 0, inner)),
            b.loop(
                "j", self.extent - done, lambda j: self._combine(b.const(0), done + j, inner)
            ),
            flush,
        )  # fmt: skip

    def _vector(self, start: Expr, first: int, inner: At) -> Any:
        return self._lanes(
            self.width, lambda lane: self._combine(lane + first, start + lane, inner)
        )

    def _combine(self, slot: Expr, where: Expr, inner: At) -> Any:
        value = substitute(self.block.value, {**inner, self.last: where})
        return self._into(slot, value)

    def _into(self, slot: Expr, value: Expr) -> Any:
        old = tirx.BufferLoad(self.acc, [slot])
        return tirx.BufferStore(self.acc, self.block.combine(old, value), [slot])

    def _fold(self, half: int) -> Any:
        return self._lanes(
            half, lambda lane: self._into(lane, tirx.BufferLoad(self.acc, [lane + half]))
        )

    def _empty(self, first: int) -> Any:
        """Return what adds further accumulators to the first ones and empties them."""
        zero = tirx.const(0.0, str(self.acc.dtype))
        return b.seq(
            self._lanes(
                self.width,
                lambda lane: self._into(lane, tirx.BufferLoad(self.acc, [lane + first])),
            ),
            self._lanes(self.width, lambda lane: tirx.BufferStore(self.acc, zero, [lane + first])),
        )

    def _lanes(self, count: int, body: Callable[[Expr], Any]) -> Any:
        return b.loop("l", count, body, ForKind.VECTORIZED if count > 1 else ForKind.SERIAL)


def _halves(total: int) -> list[int]:
    found = []
    while total > 1:
        total //= 2
        found.append(total)
    return found

"""The blocks of a scheduled function, each with the loops around it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from tvmcap.kernel.loop_body import Access, accesses, variables

_PARALLEL, _VECTOR = 1, 2
_REDUCTION = 2
_STEP = "pragma_auto_unroll_max_step"


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop, read once, for every look at TVM's own costs more than what is worked out from it.

    Attributes
    ----------
    name: of its variable.
    extent: its iterations; 1 where they are no number.
    kind: TVM's ForKind.
    step: the steps that TVM may unroll to, as annotated; 0 without.
    """

    name: str
    extent: int
    kind: int
    step: int

    @staticmethod
    def of(node: Any) -> Loop:
        """Return what stands for a loop of TVM."""
        extent = int(node.extent) if isinstance(node.extent, tirx.IntImm) else 1
        step = int(node.annotations.get(_STEP, 0))
        return Loop(str(node.loop_var.name), extent, int(node.kind), step)


class Block:
    """A block with the loops around it, outermost first.

    Attributes
    ----------
    realize: of TVM.
    runs: how often it runs.
    sums: whether it has an iterator that sums.
    """

    def __init__(self, realize: Any, loops: Sequence[Loop]) -> None:
        self.realize, self.loops = realize, list(loops)
        self.runs = total(loops)
        kinds = [int(v.iter_type) for v in realize.block.iter_vars]
        self._reducing = [kind == _REDUCTION for kind in kinds]
        self.sums = any(self._reducing)

    @functools.cached_property
    def vector(self) -> Loop | None:
        """The loop that is a vector, or None."""
        return next((loop for loop in self.loops if loop.kind == _VECTOR), None)

    @property
    def width(self) -> int:
        """Lanes of the vector."""
        return 1 if self.vector is None else self.vector.extent

    @functools.cached_property
    def parallel(self) -> int:
        """Iterations that may run at the same time."""
        return total(loop for loop in self.loops if loop.kind == _PARALLEL)

    @functools.cached_property
    def inside(self) -> dict[str, frozenset[str]]:
        """The loops that each iterator depends on, by name."""
        pairs = zip(self.realize.block.iter_vars, self.realize.iter_values, strict=True)
        return {v.var.name: variables(value) for v, value in pairs}

    @functools.cached_property
    def summed(self) -> frozenset[str]:
        """The loops that sum."""
        pairs = zip(self.inside.values(), self._reducing, strict=True)
        return frozenset[str]().union(*(used for used, reduces in pairs if reduces))

    @functools.cached_property
    def accesses(self) -> list[Access]:
        """What the block reads and writes."""
        return accesses(self.realize.block)

    @functools.cached_property
    def rest(self) -> Loop | None:
        """The innermost loop that TVM does not unroll, or None."""
        body = unrolled(self.loops)
        left = (x for x in reversed(self.loops) if not any(x is loop for loop in body))
        return next((loop for loop in left if loop.extent > 1), None)

    def moving(self, loop: Loop | None) -> frozenset[str]:
        """Return the iterators that move with a loop."""
        name = "" if loop is None else loop.name
        return frozenset(iterator for iterator, used in self.inside.items() if name in used)

    def sizes(self, loops: Iterable[Loop]) -> dict[str, int]:
        """Return the extents of the iterators within some of the loops."""
        extents = {loop.name: loop.extent for loop in loops}
        return {
            iterator: math.prod(extents[name] for name in used if name in extents)
            for iterator, used in self.inside.items()
        }

    def each(self, lanes: int) -> float:
        """Return the registers of ``lanes`` elements for each lane of the vector."""
        return -(-self.width // lanes) / self.width

    def rounds(self, cores: int) -> float:
        """Return the share of the iterations that the busiest of the cores has."""
        return -(-self.parallel // cores) / self.parallel

    def steps(self, lanes: int, cores: int) -> float:
        """Return how many instructions run one after another."""
        return self.runs * self.each(lanes) * self.rounds(cores)


def blocks(body: Any) -> list[Block]:
    """Return the blocks that have no blocks inside, in order."""
    found: list[Block] = []
    _see(body, [], found)
    return found


def _see(node: Any, loops: list[Loop], found: list[Block]) -> None:
    if isinstance(node, tirx.For):
        _see(node.body, [*loops, Loop.of(node)], found)
    elif isinstance(node, tirx.SeqStmt):
        for part in node.seq:
            _see(part, loops, found)
    elif isinstance(node, tvm.s_tir.SBlockRealize):
        if len(node.block.iter_vars):
            found.append(Block(node, loops))
        else:  # the root, or a block of blocks
            _see(node.block.body, loops, found)


def total(loops: Iterable[Loop]) -> int:
    """Return the iterations of loops in each other."""
    return math.prod([loop.extent for loop in loops])


def unroll_step(loops: Iterable[Loop]) -> int:
    """Return the steps that TVM may unroll to, as annotated on a loop."""
    return max((loop.step for loop in loops), default=0)


def unrolled(loops: Sequence[Loop]) -> list[Loop]:
    """Return the loops of the body after TVM's unrolling, its vector too, from the inside out."""
    step, body, found = unroll_step(loops), 1, []
    for loop in reversed(loops):
        if loop.kind != _VECTOR:
            if loop.kind == _PARALLEL or body * loop.extent > step:
                break
            body *= loop.extent
        found.append(loop)
    return found

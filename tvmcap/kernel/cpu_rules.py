"""The rule for PrimFuncs on llvm that no template and no record covers.

Row-wise functions (softmax, LayerNorm, means) run every block of a row before the next row, with
intermediates of one row. Other functions run block after block, each in parallel. Either way loops
are vectorized with exact tails, so symbolic sizes need nothing special.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from tvm import relax, tirx

from tvmcap.kernel import conv_match, cpu_conv, cpu_scans
from tvmcap.kernel import cpu_blocks as cb
from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.cpu_blocks import Block
from tvmcap.kernel.cpu_nests import (
    Finish,
    Machine,
    along_reduced,
    crossed,
    crossed_axis,
    reduction,
    register_axis,
    spatial,
)
from tvmcap.kernel.cpu_rows import row_depth
from tvmcap.kernel.cpu_tasks import Place, flatten, parallel, work_of
from tvmcap.schedules import cpu_build as b
from tvmcap.schedules.cpu_target import threads, vector_lanes, vector_registers

log = logging.getLogger("tvmcap")
Expr = Any

#: Attribute of a kernel that is only a reshape, which a program can do without.
RESHAPE = "tvmcap.reshape"
#: Elements that one task of an elementwise loop covers.
CHUNK = 4096


def schedule(func: tirx.PrimFunc, target: Any) -> tirx.PrimFunc | None:
    """Return ``func`` with parallel, vectorized loops, its parameters aligned to 16 bytes.

    A function of an unknown form comes back with its loops as they were.
    """
    if target.kind.name != "llvm":
        return None
    params, renamed = b.aligned(func.params)
    blocks = cb.parse(func)
    if blocks is None:
        log.debug(
            "no loop-nest rule fits a PrimFunc of %d parameters; its loops stay serial",
            len(func.params),
        )
        body = cpu_scans.carried(cb.substitute(func.body, renamed))
        whole = tirx.PrimFunc(params, body, func.ret_type, func.attrs)
        return whole.with_attr("tirx.is_scheduled", True)
    machine = Machine(vector_lanes(target), vector_registers(target), threads(target))
    if relax.analysis.has_reshape_pattern(func):
        tensors = filter(tirx.is_buffer_var, func.params)
        body = _Rule([], func.params, renamed, machine).copy(*tensors)
        return b.scheduled(func, params, body).with_attr(RESHAPE, True)
    return b.scheduled(
        func, params, _Rule(cb.inline(blocks, func.params), func.params, renamed, machine).body()
    )


class _Rule:
    """Builds the body of one function."""

    def __init__(
        self, blocks: list[Block], params: Any, renamed: dict[Any, Any], machine: Machine
    ) -> None:
        self.blocks, self.params = blocks, params
        self.renamed, self.machine = renamed, machine
        self.inner = [x for x in blocks if not any(x.buffer.same_as(p) for p in params)]

    def body(self) -> Any:
        """Return the body, by the first form that fits."""
        depth = row_depth(self.blocks)
        if len(self.blocks) == 1 and self.blocks[0].combine is None:
            return self._elementwise(self.blocks[0])
        return self._rows(depth) if depth else self._separate()

    # --- row-wise functions

    def _rows(self, depth: int) -> Any:
        """Return one parallel loop over rows around all blocks."""
        shapes = {x.buffer: x.extents[depth:] for x in self.inner}

        def row(at: list[Expr]) -> Any:
            local = {x: b.scratch(b.product(shape), x.dtype, x.name) for x, shape in shapes.items()}

            def place(buffer: Any, index: list[Any]) -> tuple[Any, list[Any]]:
                if buffer in local:
                    return local[buffer][0], [flatten(index[depth:], shapes[buffer])]
                return self.renamed[buffer], index

            return b.seq(
                *(allocated for _, allocated in local.values()),
                *(
                    self._block(x, dict(zip(x.axes[:depth], at, strict=True)), place)
                    for x in self.blocks
                ),
            )

        extents = self.blocks[-1].extents[:depth]
        work = sum((work_of(x) for x in self.blocks), b.const(0))
        return parallel(list(extents), work, row)

    # --- block after block

    def _separate(self) -> Any:
        convs = {
            x: c
            for x in self.blocks
            if (c := conv_match.match(x, self.blocks, self.params)) is not None
        }
        padding = [c.padding for c in convs.values() if c.padding is not None]
        whole = {
            x.buffer: tirx.decl_buffer(x.extents, x.buffer.dtype, x.buffer.name)
            for x in self.inner
            if not any(x is p for p in padding)
        }
        used: dict[Any, Any] = {}  # what finishing in registers leaves out is never allocated

        def place(buffer: Any, index: list[Any]) -> tuple[Any, list[Any]]:
            if buffer not in whole:
                return self.renamed[buffer], index
            return used.setdefault(buffer, whole[buffer]), index

        stmts: list[Any] = []
        skip: Block | None = None
        for block, follower in zip(self.blocks, [*self.blocks[1:], None], strict=True):
            if block is skip or any(block is p for p in padding):
                continue
            skip = follower if follower is not None and self._finishes(block, follower) else None
            if block in convs:
                nest = cpu_conv.Nest(convs[block], self.machine, self.renamed)
                stmts.append(nest.body(self._store(block, skip, place), parallel))
            else:
                stmts.append(self._alone(block, skip, place))
        return b.seq(*map(tirx.AllocBuffer, used.values()), *stmts)

    def _finishes(self, block: Block, follower: Block) -> bool:
        """Whether ``follower`` is all that becomes of a reduction, element by element."""
        readers = [
            x
            for x in self.blocks
            if any(ld.source.same_as(block.buffer) for ld in cb.loads(x.value))
        ]
        if block.combine is None or follower.combine is not None or block not in self.inner:
            return False
        own = [ld for ld in cb.loads(follower.value) if ld.source.same_as(block.buffer)]
        return (
            len(readers) == 1
            and readers[0] is follower
            and ep.same_all(block.extents, follower.extents)
            and all(ep.same_all(ld.indices, follower.axes) for ld in own)
        )

    def _alone(self, block: Block, finish: Block | None, place: Place) -> Any:
        """Return one block in parallel over all axes but that of vectors and register rows."""
        across = crossed_axis(block) if block.combine is None else None
        if across is not None:
            return self._crossed(block, across, place)
        axes = list(zip(block.axes, block.extents, strict=True))
        if block.combine is None or not along_reduced(block, list(block.axes)):
            axes = axes[:-1]
        tiled = block.combine is not None and len(axes) < len(block.axes)
        shared = register_axis(block, axes, block.axes[-1], self.machine) if tiled else None
        if shared is None:

            def task(at: list[Expr]) -> Any:
                return self._block(
                    block, {a: v for (a, _), v in zip(axes, at, strict=True)}, place, finish
                )

            return parallel([e for _, e in axes], work_of(block), task)
        axis, size, count = shared
        axes = [x for x in axes if x[0] is not axis]

        def group(at: list[Expr]) -> Any:
            start = tirx.min(at[-1] * count, size - count)
            rows = [{axis: start + r} for r in range(count)]
            return self._block(
                block, {a: v for (a, _), v in zip(axes, at, strict=False)}, place, finish, rows
            )

        return parallel([*(e for _, e in axes), b.ceildiv(size, count)], work_of(block), group)

    def _crossed(self, block: Block, across: tuple[Any, Expr], place: Place) -> Any:
        """Return a transpose in parallel, a strip of lines of memory at a time."""
        axis, size = across
        strip = self.machine.lanes
        axes = [x for x in zip(block.axes, block.extents, strict=True) if x[0] is not axis][:-1]
        moved = self._moved(block, place)
        store = self._store(block, None, place)

        def task(at: list[Expr]) -> Any:
            fixed = {a: v for (a, _), v in zip(axes, at, strict=False)}
            count = tirx.min(b.const(strip), size - at[-1] * strip)
            return crossed(moved, fixed, (axis, at[-1] * strip, count), store, self.machine)

        return parallel([*(e for _, e in axes), b.ceildiv(size, strip)], work_of(block), task)

    # --- shared

    def _block(
        self,
        block: Block,
        fixed: dict[Any, Expr],
        place: Place,
        finish: Block | None = None,
        rows: list[dict[Any, Expr]] | None = None,
    ) -> Any:
        """Return one block's loops with buffers moved, and ``finish`` done on each element."""
        store, moved = self._store(block, finish, place), self._moved(block, place)
        if block.combine is None:
            return spatial(moved, fixed, store, self.machine)
        return reduction(moved, fixed, store, self.machine, rows)

    def _moved(self, block: Block, place: Place) -> Block:
        def load(node: Any) -> Any:
            return tirx.BufferLoad(*place(node.source, list(node.indices)))

        return replace(block, value=cb.replace_loads(block.value, load))

    def _store(self, block: Block, finish: Block | None, place: Place) -> Finish:
        """Return what stores an element of ``block``, or what ``finish`` makes of it."""

        def load(node: Any) -> Any:
            return tirx.BufferLoad(*place(node.source, list(node.indices)))

        def store(at: dict[Any, Expr], value: Expr) -> Any:
            index = [at[a] for a in block.axes]
            if finish is None:
                target, where = place(block.buffer, index)
                return tirx.BufferStore(target, value, where)
            target, where = place(finish.buffer, index)
            var, bound, done = ep.named("done", str(block.buffer.dtype), value)
            rest = cb.replace_loads(
                finish.value, lambda ld: done if ld.source.same_as(block.buffer) else load(ld)
            )
            at_point = cb.substitute(rest, dict(zip(finish.axes, index, strict=True)))
            return tirx.BufferStore(target, tirx.Let(var, bound, at_point), where)

        return store

    def _elementwise(self, block: Block) -> Any:
        """Return a single elementwise block, over flat memory where all tensors share a shape."""
        reads = cb.loads(block.value)
        alike = all(
            ep.same_all(ld.indices, block.axes) and ep.same_all(ld.source.shape, block.extents)
            for ld in reads
        )
        index = tirx.Var("i", "int64")
        views = {
            x: b.flat(self.renamed[x])
            for x in {block.buffer: None, **{ld.source: None for ld in reads}}
        }
        value = cb.replace_loads(
            block.value, lambda ld: tirx.BufferLoad(views[ld.source][0], [index])
        )
        if not alike or any(cb.uses(value, axis) for axis in block.axes):
            return self._alone(block, None, lambda buffer, where: (self.renamed[buffer], where))
        loop = self._flat(views[block.buffer][0], index, value, work_of(block))
        return b.seq(*(declared for _, declared in views.values()), loop)

    def copy(self, source: Any, out: Any) -> Any:
        """Return the copy of one tensor's memory into another's."""
        (read, one), (written, two) = (b.flat(self.renamed[x]) for x in (source, out))
        index = tirx.Var("i", "int64")
        value = tirx.BufferLoad(read, [index])
        return b.seq(one, two, self._flat(written, index, value, b.product(out.shape)))

    def _flat(self, out: Any, index: Any, value: Expr, work: Expr) -> Any:
        """Return ``out[index] = value`` over flat memory, in chunks."""
        total = out.shape[0]

        def chunk(at: list[Expr]) -> Any:
            start = at[0] * CHUNK
            moved = cb.substitute(value, {index: start + index})
            return b.bound(
                "length",
                tirx.min(b.const(CHUNK), total - start),
                lambda n: spatial(
                    Block(out, (index,), (n,), (), (), moved),
                    {},
                    lambda where, x: tirx.BufferStore(out, x, [start + where[index]]),
                    self.machine,
                ),
            )

        return parallel([b.ceildiv(total, CHUNK)], work, chunk)

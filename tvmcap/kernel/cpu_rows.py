"""Which PrimFuncs run row by row on llvm: softmax, LayerNorm, means, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from tvmcap.kernel import cpu_blocks as cb
from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.cpu_blocks import Block
from tvmcap.kernel.cpu_nests import along_reduced


def is_rowwise(func: tirx.PrimFunc) -> bool:
    """Whether all blocks of a PrimFunc can run one row after the other."""
    blocks = cb.parse(func)
    return blocks is not None and row_depth(cb.inline(blocks, func.params)) > 0


def row_depth(blocks: Sequence[Block]) -> int:
    """Return how many leading dimensions are rows; 0 where the blocks are not row-wise."""
    out = blocks[-1]
    depth = min(len(x.axes) for x in blocks)
    depth = min(depth, max(len(x.axes) for x in blocks) - 1) or depth
    while depth and not all(_shares(x, out, depth, blocks) for x in blocks):
        depth -= 1
    rowwise = any(x.combine is not None and along_reduced(x, list(x.axes[depth:])) for x in blocks)
    return depth if rowwise and depth >= max(max(len(x.axes) for x in blocks) - 1, 1) else 0


def _shares(block: Block, out: Block, depth: int, blocks: Sequence[Block]) -> bool:
    def own(load: Any) -> bool:
        inner = any(load.source.same_as(x.buffer) for x in blocks)
        return not inner or ep.same_all(list(load.indices)[:depth], block.axes[:depth])

    return ep.same_all(block.extents[:depth], out.extents[:depth]) and all(
        map(own, cb.loads(block.value))
    )

"""Which reductions are two-dimensional convolutions, in NCHW with or without groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.sym import Analyzer

from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.cpu_blocks import GUARD, Block, loads, substitute
from tvmcap.schedules import cpu_build as b

Expr = Any

_WIDEST_KERNEL = 11


@dataclass(frozen=True)
class Conv:
    """``out[n, f, y, x] = sum(in[n, channel(f) + c, y*s + i*d, x*s + j*d] * w[f, c, i, j])``.

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
    for axis, extent in zip((*block.axes, *block.reduced), extents(block), strict=True):
        analyzer.bind(axis, tvm.ir.Range(b.const(0), extent))
    steps = [
        _steps(index, at, inner, analyzer)
        for index, at, inner in zip(data.indices[2:], pixel, kernel, strict=True)
    ]
    first = substitute(data.indices[1], {c: b.const(0)})
    if None in steps or not ep.same(data.indices[0], n):
        return None
    if not analyzer.can_prove_equal(data.indices[1], first + c):
        return None
    found = _unpadded(data.source, block, blocks)
    if found is None or not all(
        any(x.same_as(p) for p in params) for x in (found[0], weight.source)
    ):
        return None
    source, padding, before = found
    (sy, dy), (sx, dx) = (s for s in steps if s is not None)
    groups = int(source.shape[1]) // int(weight.source.shape[1])

    def channel(at: Expr) -> Expr:
        return substitute(first, {f: at})

    return Conv(block, source, weight.source, padding, channel, groups, (sy, sx), (dy, dx), before)


def extents(block: Block) -> tuple[Expr, ...]:
    """Return the extents of a block's axes, the reduced ones last."""
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
    if (
        len(readers) != 1
        or readers[0] is not conv
        or getattr(getattr(value, "op", 0), "name", "") != GUARD
    ):
        return None
    _, load, other = value.args
    if not isinstance(load, TensorLoad) or not isinstance(other, tirx.FloatImm) or other.value:
        return None
    shifts = [Analyzer().simplify(a - i) for a, i in zip(padding.axes, load.indices, strict=True)]
    if not all(isinstance(s, tirx.IntImm) for s in shifts) or any(s.value for s in shifts[:2]):
        return None
    return load.source, padding, (shifts[2].value, shifts[3].value)

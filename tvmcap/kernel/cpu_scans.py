"""Running sums on a CPU: the sum so far is carried in float64, as PyTorch does, not read back."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer

from tvmcap.kernel import epilogue as ep
from tvmcap.kernel.cpu_blocks import loads, substitute
from tvmcap.schedules import cpu_build as b

_WIDE = "float64"


def carried(body: Any) -> Any:
    """Return a statement with every float32 running sum in it carried in float64.

    Such a sum is ``y[0] = x`` and a loop of ``y[i] = y[i - 1] + x[i]``; others stay as they are.
    """
    return tvm_ffi.structural_map(body, (tirx.SeqStmt, _sequence))


def _sequence(seq: Any) -> Any:
    if len(seq.seq) != 2 or not _is_scan(*seq.seq):
        return seq
    first, loop = seq.seq
    step = loop.body
    cell = tirx.decl_buffer((1,), _WIDE, "carry")

    def set_to(value: Any) -> Any:
        return tirx.BufferStore(cell, value, [b.const(0)])

    def out(store: Any) -> Any:
        value = tirx.Cast(str(store.buffer.dtype), tirx.BufferLoad(cell, [b.const(0)]))
        return tirx.BufferStore(store.buffer, value, store.indices)

    more = tirx.BufferLoad(cell, [b.const(0)]) + tirx.Cast(_WIDE, step.value.b)
    again = b.seq(set_to(more), out(step))
    return b.seq(
        tirx.AllocBuffer(cell),
        set_to(tirx.Cast(_WIDE, first.value)),
        out(first),
        tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, again),
    )


def _is_scan(first: Any, loop: Any) -> bool:
    if not isinstance(first, tirx.BufferStore) or not isinstance(loop, tirx.For):
        return False
    step = loop.body
    if not isinstance(step, tirx.BufferStore) or not isinstance(step.value, tirx.Add):
        return False
    before, more = step.value.a, step.value.b
    if not isinstance(before, ir.TensorLoad) or str(step.buffer.dtype) != "float32":
        return False
    return (
        all(x.same_as(step.buffer) for x in (first.buffer, before.source))
        and not any(load.source.same_as(step.buffer) for load in loads(more))
        and _same(before.indices, step.indices, {loop.loop_var: loop.loop_var - 1})
        and _same(first.indices, before.indices, {loop.loop_var: loop.min})
    )


def _same(one: Any, other: Any, values: dict[Any, Any]) -> bool:
    """Whether indices are others with variables replaced."""
    simplify = Analyzer().simplify
    moved = [simplify(substitute(i, values)) for i in other]
    return ep.same_all([simplify(i) for i in one], moved)

"""Leave out of fused kernels what they compute for nobody."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize


def drop_dead_stores(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures every intermediate of a kernel is read: of several results some may not be wanted.

    Operators with several results (a split) and factors of zero leave such intermediates.
    """
    changed = {
        gvar: new
        for gvar, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and not (new := _without(func)).same_as(func)
    }
    return tvm.IRModule({**mod.functions, **changed}, attrs=mod.attrs) if changed else mod


def _without(func: tirx.PrimFunc) -> tirx.PrimFunc:
    root = func.body.block if isinstance(func.body, SBlockRealize) else None
    if root is None or not isinstance(root.body, tirx.SeqStmt):
        return func
    own = set(root.alloc_buffers)
    kept = [(stmt, *_touched(stmt)) for stmt in root.body.seq]
    count = 0
    while count != len(kept):
        count = len(kept)
        kept = [
            item
            for item in kept
            if not item[2]
            or not item[2] <= own
            or any(item[2] & other[1] for other in kept if other is not item)
        ]
    if len(kept) == len(root.body.seq):
        return func
    used = set[Any]().union(*(reads | writes for _, reads, writes in kept))
    stmts = [stmt for stmt, _, _ in kept]
    block = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        tirx.SeqStmt(stmts) if len(stmts) > 1 else stmts[0],
        root.init,
        [buffer for buffer in root.alloc_buffers if buffer in used],
        root.match_buffers,
        root.annotations,
    )
    return func.with_body(SBlockRealize(func.body.iter_values, func.body.predicate, block))


def _touched(stmt: Any) -> tuple[set[Any], set[Any]]:
    """Return the buffers that a statement reads and writes; it writes none where it has calls."""
    reads: set[Any] = set()
    writes: set[Any] = set()
    calls: list[Any] = []
    tvm_ffi.structural_walk(
        stmt,
        (
            (tvm.ir.TensorLoad, lambda node: reads.add(node.source)),
            (tirx.BufferStore, lambda node: writes.add(node.buffer)),
            (tirx.Evaluate, calls.append),
        ),
    )
    return reads, set() if calls else writes

"""Traces tuned at a static size, applied to the symbolic kernel."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from tvmcap.kernel import intrinsics, prim_func, tensor_core_rule
from tvmcap.kernel.features import copy_func, replay

log = logging.getLogger("tvmcap")

_TILES = ("SamplePerfectTile", "SamplePartitionedTile")


def open_splits(trace: Sequence[Any]) -> list[Any]:
    """Return the trace with tilings as numbers, and the outermost factor of each split open.

    An open factor fits any extent: a loop that the inner factors do not divide gets a guard.
    """
    instructions, decisions = trace
    chosen = {index: values for index, values in decisions}
    sampled: dict[str, int] = {}
    kept: list[Any] = []
    kept_decisions: list[Any] = []
    for index, (name, inputs, attrs, outputs) in enumerate(instructions):
        if name in _TILES:
            sampled.update(zip(outputs, chosen[index], strict=True))
            continue
        if index in chosen:
            kept_decisions.append([len(kept), chosen[index]])
        values = [sampled.get(v, v) if isinstance(v, str) else v for v in inputs]
        if name == "Split":
            values[1] = None
        kept.append([name, values, attrs, outputs])
    return [kept, kept_decisions]


def lends_tile(func: Any, trace: Sequence[Any]) -> bool:
    """Whether a trace gives a PrimFunc of symbolic sizes its tile alone."""
    return bool(prim_func.size_vars(func)) and tensor_core_rule.tile_of(trace) is not None


def _apply(func: Any, trace: Sequence[Any], target: Any) -> Any:
    if lends_tile(func, trace):
        tile = tensor_core_rule.tile_of(trace)
        return tensor_core_rule.schedule(copy_func(func), target, tile)
    opened = open_splits(trace) if prim_func.size_vars(func) else trace
    return replay(func, opened).mod["main"]


def apply_trace(func: Any, trace: Any, target: Any) -> Any:
    """Schedule a PrimFunc, symbolic or static, by a trace (JSON data or text) of a static size.

    Returns the scheduled PrimFunc (a copy), or None where the trace does not apply: it is empty
    (the record of a rule), names blocks that are not there, or needs a step that TVM refuses for
    the symbolic sizes. What is returned computes the same for every size: each step is a
    transformation that TVM proves. Of a tensor-core trace a symbolic kernel takes the tile: its
    steps pad and split for one size.
    """
    data = json.loads(trace) if isinstance(trace, str) else trace
    if not data:
        return None
    try:
        with target:
            done = _apply(func, data, target)
    except Exception as e:
        log.debug("a trace does not apply: %s", e)
        return None
    if done is None:
        return None
    scheduled = done.with_attr("tirx.is_scheduled", True)
    if target.kind.name == "llvm":
        scheduled = intrinsics.expand(scheduled)
    name = func.attrs.get("global_symbol")
    return (
        scheduled.without_attr("global_symbol")
        if name is None
        else scheduled.with_attr("global_symbol", name)
    )

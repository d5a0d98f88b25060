"""What the cost model sees of a loop nest: its loops by kind, its blocks, and its tiles.

How evenly parallel loops fill the cores, whether vectors are as wide as the target's, tails that
need predicates, how many blocks run one after another, what they allocate, and how the loops around
the main block tile it (``loop_bands``). MetaSchedule's features of each store take several
times as long to compute; benchmarks/cost_model.py compares with them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel

from tvmcap.kernel import loop_bands
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group, of_traces
from tvmcap.kernel.records import Record
from tvmcap.schedules import cpu_target

VERSION = 4.0
"""First feature: rows of another list are not mixed with those of this one."""
_NEST = (
    "blocks",
    "predicates",
    "loops",
    "parallel_loops",
    "log_parallel",
    "fill",
    "vector_loops",
    "vector_share",
    "vector_tail",
    "unrolled_loops",
    "log_unrolled",
    "log_step",
    "buffers",
    "log_allocated",
)
FEATURES = (
    "version",
    *_NEST,
    *loop_bands.NAMES,
)


@dataclass(frozen=True)
class LoopNests:
    """What stands for a template where a model is of loop nests."""

    name: str = "loop_nest"
    feature_names: tuple[str, ...] = FEATURES

    def groups(self, records: Iterable[Record]) -> list[Group]:
        """Return what the records of loop nests teach."""
        return of_traces(records, len(FEATURES), VERSION)


LOOP_NESTS = LoopNests()
_SERIAL, _PARALLEL, _VECTOR, _UNROLLED = range(4)
_GPU_LANES = 4
_WHOLE = 1e5


def loop_features(context: Any, candidates: Sequence[Any]) -> Any:
    """Return the features of MetaSchedule's candidates, float32 (candidates, FEATURES)."""
    return _array([nest_features(c.sch.mod["main"], context.target) for c in candidates])


def _array(rows: Sequence[Sequence[float]]) -> Any:
    return np.array(rows, np.float32).reshape(len(rows), len(FEATURES))


def nest_features(func: Any, target: Any) -> list[float]:
    """Return the features of a scheduled PrimFunc for a target, in the order of ``FEATURES``."""
    lanes, cores = _lanes_and_cores(target)
    found = {**_nest(func, cores, lanes), **loop_bands.bands(func, lanes, cores)}
    return [VERSION, *(found[name] for name in FEATURES[1:])]


@functools.lru_cache(8)
def _lanes_and_cores(target: Any) -> tuple[int, int]:
    """Return the elements of a vector and the threads; to ask TVM takes as long as a few nests."""
    if target.kind.name != "llvm":
        return _GPU_LANES, 1
    return cpu_target.vector_lanes(target), cpu_target.threads(target)


def stored(row: Iterable[float]) -> list[float]:
    """Return features as records hold them, to five digits; whole numbers take less room."""
    return [_short(float(value)) for value in np.fromiter(row, np.float32)]


def _short(value: float) -> float:
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < _WHOLE else rounded


def current(record: Record) -> bool:
    """Whether a record has features that today's model takes."""
    row = record.features or []
    return len(row) == len(FEATURES) and row[0] == VERSION


def _nest(func: Any, cores: int, lanes: int) -> dict[str, float]:
    """Count loops by kind, blocks with a predicate, and what is allocated."""
    loops: dict[int, list[int]] = defaultdict(list)
    predicates, allocated, blocks = 0, [], 0
    steps: list[int] = []

    def see_loop(loop: Any) -> None:
        extent = int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else 0
        loops[int(loop.kind)].append(extent)
        if int(loop.kind) == _SERIAL and not isinstance(loop.body, tirx.For):
            steps.append(extent)

    def see_block(realize: Any) -> None:
        nonlocal predicates, blocks
        blocks += 1
        known = isinstance(realize.predicate, tirx.IntImm) and int(realize.predicate) == 1
        predicates += not known
        for buffer in realize.block.alloc_buffers:
            allocated.append(_bytes(buffer))

    tvm_ffi.structural_walk(func.body, [(tirx.For, see_loop), (tvm.s_tir.SBlockRealize, see_block)])
    parallel, vector, unrolled = loops[_PARALLEL], loops[_VECTOR], loops[_UNROLLED]
    fills = [n / (-(-n // cores) * cores) for n in parallel if n]
    return {
        "blocks": blocks,
        "predicates": predicates,
        "loops": sum(map(len, loops.values())),
        "parallel_loops": len(parallel),
        "log_parallel": _log(max(parallel, default=0)),
        "fill": min(fills, default=0.0),
        "vector_loops": len(vector),
        "vector_share": max(vector, default=0) / lanes,
        "vector_tail": sum(n % lanes != 0 for n in vector),
        "unrolled_loops": len(unrolled),
        "log_unrolled": sum(map(_log, unrolled)),
        "log_step": _log(max(steps, default=0)),
        "buffers": len(allocated),
        "log_allocated": _log(sum(allocated)),
    }


def _bytes(buffer: Any) -> int:
    sizes = (int(e) if isinstance(e, tirx.IntImm) else 1 for e in buffer.shape)
    return math.prod(sizes) * int(tvm.DataType(str(buffer.dtype)).itemsize)


def _log(value: float) -> float:
    return math.log2(1 + value)


@derived_object
class LoopCostModel(PyCostModel):  # type: ignore[misc]
    """A RankModel of loop nests behind MetaSchedule's interface, which only asks it.

    Sessions teach the model themselves; ``model`` is what it knew at one moment. Evolution asks
    for the same schedule again and again, so features are kept until ``forget``.
    """

    def __init__(self, model: RankModel) -> None:
        super().__init__()
        self.model = model
        self._rows: dict[Any, list[float]] = {}

    def features(self, context: Any, candidates: Sequence[Any]) -> Any:
        """Return what ``loop_features`` does, worked out once a schedule."""
        for candidate in candidates:
            if candidate.sch not in self._rows:
                row = nest_features(candidate.sch.mod["main"], context.target)
                self._rows[candidate.sch] = row
        return _array([self._rows[candidate.sch] for candidate in candidates])

    def forget(self) -> None:
        """Let go of the schedules whose features are kept."""
        self._rows.clear()

    def load(self, path: str) -> None:
        """Read measurements."""
        self.model.load(path)

    def save(self, path: str) -> None:
        """Write measurements."""
        self.model.save(path)

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn nothing: ``LoopNestSession`` does."""

    def predict(self, context: Any, candidates: Sequence[Any]) -> Any:
        """Return a score in (0, 1) a candidate."""
        return self.model.scores(self.features(context, candidates))

"""What the cost model sees of a loop nest: its loops by kind, its blocks, and its tiles.

How evenly parallel loops fill the cores, whether vectors are as wide as the target's, tails that
need predicates, how many blocks run one after another, what they allocate, and how the loops around
the main block tile it (``loop_bands``). MetaSchedule's features of each store take several
times as long to compute; benchmarks/cost_model.py compares with them.
"""

from __future__ import annotations

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
from tvmcap.kernel.cost_model import RankModel, times_us
from tvmcap.kernel.dataset import Group, of_traces
from tvmcap.kernel.records import Record
from tvmcap.schedules import cpu_target

VERSION = 3.0
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


def loop_features(context: Any, candidates: Sequence[Any]) -> Any:
    """Return the features of MetaSchedule's candidates, float32 (candidates, FEATURES)."""
    is_cpu = context.target.kind.name == "llvm"
    lanes = cpu_target.vector_lanes(context.target) if is_cpu else _GPU_LANES
    cores = cpu_target.threads(context.target) if is_cpu else 1
    rows = np.zeros((len(candidates), len(FEATURES)), np.float32)
    rows[:, 0] = VERSION
    for row, candidate in zip(rows, candidates, strict=True):
        func = candidate.sch.mod["main"]
        found = {**_nest(func, cores, lanes), **loop_bands.bands(func, lanes)}
        row[1:] = [found[name] for name in FEATURES[1:]]
    return rows


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
    """A RankModel of loop nests behind MetaSchedule's interface; before it has trees, chance.

    Equal scores would lead evolution back to what the records hold already.

    Parameters
    ----------
    model: what learns and ranks; it may know other tasks.
    group: name of the task and size that the candidates are of.
    """

    def __init__(self, model: RankModel, group: str) -> None:
        super().__init__()
        self.model, self.group = model, group
        self._rng = np.random.default_rng(model.seed)

    def load(self, path: str) -> None:
        """Read measurements."""
        self.model.load(path)

    def save(self, path: str) -> None:
        """Write measurements."""
        self.model.save(path)

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn from measured candidates."""
        self.model.add(self.group, loop_features(context, candidates), times_us(results))
        self.model.fit()

    def predict(self, context: Any, candidates: Sequence[Any]) -> Any:
        """Return a score in (0, 1) a candidate."""
        if not self.model.learnt:
            return self._rng.uniform(0.25, 0.75, len(candidates))
        return self.model.scores(loop_features(context, candidates))

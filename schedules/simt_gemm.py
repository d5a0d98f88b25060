"""SIMT GEMM: float32 arithmetic on CUDA cores, any size, with the fused PrimFunc's epilogue.

It serves what tensor cores cannot: float32 without tf32, rows that TMA cannot address, batched
products. Thread blocks tile M and N, threads hold small register tiles, and groups of threads split
K inside a block where rows are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from tvmcap.kernel.template import Template
from tvmcap.schedules import gemm_match
from tvmcap.schedules.hopper_plan import SM_COUNT
from tvmcap.schedules.simt_kernel import shared_floats, simt_kernel


@dataclass(frozen=True)
class Knobs:
    """A block computes ``bm`` x ``bn``, a thread ``tm`` x ``tn``.

    ``groups`` of threads split steps of ``bk`` each.
    """

    bm: int = 128
    bn: int = 128
    bk: int = 16
    tm: int = 8
    tn: int = 8
    groups: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.bm // self.tm * (self.bn // self.tn) * self.groups


FEW = 16
_SHAPES = (
    Knobs(8, 32, 16, 8, 1, 16),
    Knobs(8, 32, 16, 8, 1, 8),
    Knobs(8, 64, 16, 8, 1, 8),
    Knobs(16, 32, 16, 4, 4, 8),
    Knobs(16, 64, 16, 4, 4, 4),
    Knobs(32, 32, 16, 4, 4, 4),
    Knobs(32, 64, 16, 4, 4, 2),
    Knobs(64, 64, 16, 4, 4, 1),
    Knobs(64, 64, 16, 8, 4, 2),
    Knobs(64, 128, 16, 8, 4, 1),
    Knobs(64, 128, 8, 8, 8, 1),
    Knobs(128, 64, 16, 8, 4, 1),
    Knobs(128, 128, 8, 8, 8, 1),
    Knobs(128, 128, 16, 8, 8, 1),
)


def match(func: tirx.PrimFunc, target: Any) -> gemm_match.Gemm | None:
    """Return the matrix product that ``func`` is, for any CUDA target."""
    if target.kind.name != "cuda":
        return None
    gemm = gemm_match.read(func)
    if gemm is None or gemm.layout not in ("kn", "nk"):
        return None
    if str(gemm.fused.epilogue.anchor.dtype) != "float32":
        return None
    return replace(gemm, tf32=False)  # it computes in float32 whatever is allowed


def space(gemm: gemm_match.Gemm, target: Any) -> list[Knobs]:
    """Every shape whose shared memory fits what a block gets without asking for more."""
    return [
        knobs
        for knobs in _SHAPES
        if 4 * shared_floats(knobs) <= 48 * 1024 and knobs.threads <= 1024
    ]


def default(gemm: gemm_match.Gemm, target: Any) -> Knobs:
    """The setting of ``ranges`` for the problem's rows; the last one where they are symbolic."""
    rows = gemm.rows if isinstance(gemm.rows, int) else 1 << 30
    return next(knobs for bound, knobs in ranges(gemm, target) if bound is None or rows <= bound)


def ranges(gemm: gemm_match.Gemm, target: Any) -> list[tuple[int | None, Knobs]]:
    """The defaults by rows.

    Narrow tiles with K split inside the block where rows are few; a larger tile serves once its
    blocks fill every multiprocessor.
    """
    columns = gemm.n if isinstance(gemm.n, int) else 1024
    batch = int(np.prod([e if isinstance(e, int) else 1 for e in gemm.batch])) if gemm.batch else 1
    found: list[tuple[int | None, Knobs]] = [(FEW, Knobs(8, 32, 16, 8, 1, 8))]
    steps = [Knobs(32, 64, 16, 4, 4, 2), Knobs(64, 64, 16, 4, 4, 1), Knobs()]
    for small, large in itertools.pairwise(steps):
        across = -(-columns // large.bn) * batch
        # rows below which the larger tile leaves some idle
        enough = -(-SM_COUNT // across) * large.bm - large.bm
        if enough > (found[-1][0] or 0):
            found.append((enough, small))
    return [*found, (None, steps[-1])]


def lower(func: tirx.PrimFunc, gemm: gemm_match.Gemm, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Write the TIRx kernel of a setting, with the parameters of ``func``."""
    return tirx.PrimFunc(func.params, simt_kernel(gemm, knobs).body).with_attr(
        {"tirx.is_scheduled": True}
    )


FEATURES = tuple("rows n k batch bm bn bk tm tn groups threads blocks shared".split())


def features(
    gemm: gemm_match.Gemm, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Problem, knobs, and what follows from both; shape (len(knobs), len(FEATURES))."""
    rows, n, k = (e if isinstance(e, int) else 1024 for e in (gemm.rows, gemm.n, gemm.k))
    batch = int(np.prod([e if isinstance(e, int) else 8 for e in gemm.batch])) if gemm.batch else 1
    table = []
    for c in knobs:
        blocks = -(-rows // c.bm) * -(-n // c.bn) * batch
        knob = [c.bm, c.bn, c.bk, c.tm, c.tn, c.groups]
        table.append([rows, n, k, batch, *knob, c.threads, blocks, 4 * shared_floats(c)])
    return np.asarray(table, dtype=np.float32).reshape(len(knobs), len(FEATURES))


TEMPLATE = Template(
    name="simt_gemm",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=features,
    feature_names=FEATURES,
    ranges=ranges,
    modules=(
        "tvmcap.schedules.simt_kernel",
        "tvmcap.schedules.gpu_epilogue",
        "tvmcap.schedules.gpu_math",
    ),
)

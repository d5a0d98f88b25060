"""Hopper GEMM: wgmma fed by TMA, for bf16 and fp16 on sm_90a, with the fused PrimFunc's epilogue.

One producer warp group fills a ring of shared-memory stages through TMA, two consumer warp groups
of 64 rows each multiply them with wgmma and keep float32 accumulators in registers; the grid is
persistent. Results leave through swizzled shared memory and a TMA store, which overlaps the next
tile's main loop, or straight from registers. Instruction shapes, descriptors and swizzles: PTX ISA
9.0, "Asynchronous warpgroup-level matrix instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tvmcap.kernel.template import Template
from tvmcap.schedules import cpu_match
from tvmcap.schedules.hopper_kernel import SHARED_BYTES, gemm_kernel, stage_bytes

SM_COUNT = 132
FEW_ROWS = 256
_WGMMA_TYPES = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Knobs:
    """Tile of 128 x ``bn`` x ``bk``, ``stages`` of it in shared memory.

    Tiles are walked in groups of ``group`` rows. ``late`` frees a stage one k step late, so that
    the tensor cores never drain. ``tma_store`` lets results leave through TMA.
    """

    bn: int = 128
    bk: int = 64
    stages: int = 6
    group: int = 8
    late: bool = False
    tma_store: bool = True


def match(func: tirx.PrimFunc, target: Any) -> cpu_match.Gemm | None:
    """Return the matrix product that ``func`` is, where TMA and wgmma can serve it."""
    if target.kind.name != "cuda" or str(target.arch) != "sm_90a":
        return None
    gemm = cpu_match.read(func)
    if gemm is None or gemm.batch or gemm.layout not in ("nk", "kn"):
        return None
    kinds = {str(gemm.a.dtype), str(gemm.b.dtype)}
    fixed = isinstance(gemm.n, int) and isinstance(gemm.k, int)
    if (
        len(kinds) != 1
        or not kinds <= set(_WGMMA_TYPES)
        or str(gemm.fused.epilogue.anchor.dtype) != "float32"
    ):
        return None
    # TMA needs rows that start at multiples of 16 bytes
    return gemm if fixed and gemm.n % 8 == 0 and gemm.k % 8 == 0 else None


def stores_through_tma(gemm: cpu_match.Gemm) -> bool:
    """Whether the one output can leave through shared memory; a swizzle row is 64 columns of it."""
    outputs = gemm.fused.epilogue.outputs
    return len(outputs) == 1 and str(outputs[0].dtype) in _WGMMA_TYPES


def fits(gemm: cpu_match.Gemm, knobs: Knobs) -> bool:
    """Whether a setting can run: its shared memory, its store path, no tile wider than needed."""
    if knobs.tma_store and not stores_through_tma(gemm):
        return False
    narrow = knobs.bn <= max(64, -(-gemm.n // 64) * 64)
    return narrow and stage_bytes(knobs) <= SHARED_BYTES


def space(gemm: cpu_match.Gemm, target: Any) -> list[Knobs]:
    """Every setting that fits."""
    points = [
        Knobs(bn, bk, stages, group, late, tma)
        for bn in (64, 128, 192, 256)
        for bk in (64, 128)
        for stages in range(2, 10)
        for group in (4, 8, 16)
        for late in (False, True)
        for tma in (True, False)
    ]
    return [knobs for knobs in points if fits(gemm, knobs)]


def default(gemm: cpu_match.Gemm, target: Any) -> Knobs:
    """The setting that did best over shapes on an H200.

    Narrow tiles where rows are few, 128 columns elsewhere.
    """
    return _default(gemm, gemm.rows if isinstance(gemm.rows, int) else FEW_ROWS + 1)


def ranges(gemm: cpu_match.Gemm, target: Any) -> list[tuple[int | None, Knobs]]:
    """The defaults of a symbolic number of rows: one kernel for few rows, one for the rest."""
    few, many = _default(gemm, FEW_ROWS), _default(gemm, FEW_ROWS + 1)
    return [(None, few)] if few == many else [(FEW_ROWS, few), (None, many)]


def _default(gemm: cpu_match.Gemm, rows: int) -> Knobs:
    tma = stores_through_tma(gemm)
    if rows <= FEW_ROWS or gemm.n <= 64:
        return Knobs(bn=64, stages=8, tma_store=tma)
    return Knobs(tma_store=tma)


def lower(func: tirx.PrimFunc, gemm: cpu_match.Gemm, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Write the TIRx kernel of a setting, with the parameters of ``func``."""
    kernel = gemm_kernel(gemm, knobs)
    attrs = {"tirx.is_scheduled": True}
    return tirx.PrimFunc(func.params, kernel.body).with_attr(attrs)


FEATURES = tuple("rows n k bn bk stages group late tma_store tiles waves bytes_per_stage".split())


def features(
    gemm: cpu_match.Gemm, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Problem, knobs, and what follows from both; shape (len(knobs), len(FEATURES))."""
    rows = gemm.rows if isinstance(gemm.rows, int) else 1024
    table = []
    for k in knobs:
        tiles = -(-rows // 128) * -(-gemm.n // k.bn)
        waves = -(-tiles // SM_COUNT)
        knob = [k.bn, k.bk, k.stages, k.group, k.late, k.tma_store]
        table.append([rows, gemm.n, gemm.k, *knob, tiles, waves, stage_bytes(k)])
    return np.asarray(table, dtype=np.float32).reshape(len(knobs), len(FEATURES))


TEMPLATE = Template(
    name="hopper_gemm",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=features,
    feature_names=FEATURES,
    variants=True,
    ranges=ranges,
    modules=(
        "tvmcap.schedules.gpu_epilogue",
        "tvmcap.schedules.hopper_kernel",
    ),
)

"""Row kernels: norms, softmax and other reductions of rows with the elementwise work around them.

A row is shared by a few threads, one warp or several; each keeps its part of the row in registers
between the passes, so that memory sees one read of every input and one write of every output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from tvmcap.base import codegen
from tvmcap.kernel.template import Template
from tvmcap.schedules import row_match, row_plan
from tvmcap.schedules.row_estimate import (
    BLOCKS,
    REGISTERS,
    SHARED_BYTES,
    SM_COUNT,
    THREADS,
    estimate_us,
    is_short,
    is_tight,
    resident_blocks,
    row_bytes,
)
from tvmcap.schedules.row_kernel import launch_params, row_kernel
from tvmcap.schedules.row_plan import keeps, kept_registers, shared_bytes, steps
from tvmcap.schedules.row_program import RowProgram


@dataclass(frozen=True)
class Knobs:
    """``threads`` share a row, a block has ``rows`` of them, loads take ``vector`` elements.

    ``keep`` says where a row stays between passes: "registers", "shared" memory, or "reload" where
    it is read again. ``recompute`` keeps the inputs alone and computes intermediates in each pass.
    A multiprocessor holds ``resident`` blocks at least, which limits their registers. A
    ``dependent`` kernel starts before the one before it has ended (programmatic dependent launch),
    and waits.
    """

    threads: int = 128
    rows: int = 1
    vector: int = 8
    keep: str = "registers"
    recompute: bool = False
    resident: int = 1
    dependent: bool = False


MAX_ELEMENTS = 128
"""Elements of a row that one thread may hold; the code is unrolled over them."""

RANGES = (SM_COUNT, 4 * SM_COUNT, 16 * SM_COUNT)
"""Rows up to which a default serves where their number is symbolic; a last one serves any."""
MANY = 32768
"""Rows for which that one is chosen."""

_THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_RESIDENT = (1, 2, 3, 4, 6, 8)
_KEEPING = (
    ("registers", False),
    ("registers", True),
    ("shared", False),
    ("shared", True),
    ("reload", True),
)
_OTHER_REGISTERS = 40
_BLOCK = 512
_LONG, _SHORT = 8192, 8
_NEAR = 1.02  # a setting this close to the best serves, too


def match(func: tirx.PrimFunc, target: Any) -> RowProgram | None:
    """Return the row program that ``func`` is, for any CUDA target."""
    return row_match.read(func) if target.kind.name == "cuda" else None


def fits(program: RowProgram, knobs: Knobs, target: Any) -> bool:
    """Whether a setting can run and no thread of it is without work in every row."""
    block = knobs.threads * knobs.rows
    if block % 32 or block > 1024 or knobs.vector > row_plan.vector(program):
        return False
    if knobs.threads > 1 and knobs.threads * knobs.vector >= 2 * program.columns:
        return False
    limit = 48 * 1024
    if knobs.keep == "shared":
        if codegen.compute_capability(target) < 80:  # which copies past the registers
            return False
        limit = int(target.attrs.get("max_shared_memory_per_block", limit)) - 1024
    if shared_bytes(program, knobs) > limit:
        return False
    if knobs.dependent and codegen.compute_capability(target) < 90:
        return False
    if knobs.resident > 1 and not _fits_resident(program, knobs):
        return False
    if knobs.keep != "registers":
        return True
    elements = steps(program, knobs) * knobs.vector
    registers = min(REGISTERS // block, 255)
    return (
        elements <= MAX_ELEMENTS and kept_registers(program, knobs) + _OTHER_REGISTERS <= registers
    )


def _fits_resident(program: RowProgram, knobs: Knobs) -> bool:
    """Whether the blocks asked for fit, and the compiler would not hold as many unasked."""
    threads = knobs.threads * knobs.rows * knobs.resident
    shared = knobs.resident * (shared_bytes(program, knobs) + 1024)
    fits = threads <= THREADS and shared <= SHARED_BYTES and knobs.resident <= BLOCKS
    return fits and is_tight(program, knobs) and not is_short(program, knobs)


def space(program: RowProgram, target: Any) -> list[Knobs]:
    """Every setting that fits, and that differs from the others in what it does."""
    widest = row_plan.vector(program)
    found: dict[Any, Knobs] = {}
    for threads, block, vector, (keep, recompute) in itertools.product(
        _THREADS, _THREADS, (widest, max(widest // 2, 1)), _KEEPING
    ):
        plain = Knobs(threads, block // threads, vector, keep, recompute)
        if not threads <= block <= max(threads, _BLOCK) or not fits(program, plain, target):
            continue
        if keep != "registers" and (program.columns < _LONG or threads < 128):
            continue
        if threads < 32 and steps(program, plain) > _SHORT:
            continue  # neighbouring threads would read far from each other
        kept = tuple(v.var for v in keeps(program, plain))
        for resident, dependent in itertools.product(_RESIDENT, (True, False)):
            knobs = replace(plain, resident=resident, dependent=dependent)
            if fits(program, knobs, target):
                shape = (threads, block, vector, keep, kept)
                found.setdefault((*shape, resident, dependent), knobs)
    # a row of fewer elements than threads of a warp
    return list(found.values()) or [Knobs(1, 32, widest, "reload")]


def default(program: RowProgram, target: Any) -> Knobs:
    """Return the setting that should be fastest by count of bytes and stalls."""
    rows = program.rows if isinstance(program.rows, int) else MANY
    return min(space(program, target), key=lambda knobs: estimate_us(program, knobs, rows))


def ranges(program: RowProgram, target: Any) -> list[tuple[int | None, Knobs]]:
    """Return the defaults of a symbolic number of rows, each the best at its largest rows.

    A setting that is nearly the best serves the range below, too.
    """
    points = space(program, target)
    found: list[tuple[int | None, Knobs]] = []
    for bound, rows in zip((None, *reversed(RANGES)), (MANY, *reversed(RANGES)), strict=True):
        times = [estimate_us(program, knobs, rows) for knobs in points]
        best = min(times)
        if found and estimate_us(program, found[0][1], rows) <= _NEAR * best:
            continue
        found.insert(0, (bound, points[times.index(best)]))
    return found


def estimate(program: RowProgram, knobs: Sequence[Knobs], target: Any) -> list[float]:
    """Estimate the microseconds of settings, good for an order."""
    rows = program.rows if isinstance(program.rows, int) else MANY
    return [estimate_us(program, point, rows) for point in knobs]


def lower(func: tirx.PrimFunc, program: RowProgram, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Write the TIRx kernel of a setting, with the parameters of ``func``."""
    attrs = {
        "tirx.is_scheduled": True,
        "tvmcap.trailing": program.trailing,
        "tirx.kernel_launch_params": launch_params(program, knobs),
    }
    return tirx.PrimFunc(func.params, row_kernel(program, knobs).body).with_attr(attrs)


FEATURES = tuple(
    "rows columns bytes passes threads block vector registers shared reload recompute resident"
    " dependent steps blocks held waves estimate_us".split()
)


def features(
    program: RowProgram, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Problem, knobs, and what follows from both; shape (len(knobs), len(FEATURES))."""
    rows = program.rows if isinstance(program.rows, int) else MANY
    problem = [rows, program.columns, sum(row_bytes(program)), row_plan.passes(program)]
    table = []
    for k, us in zip(knobs, estimate(program, knobs, target), strict=True):
        blocks, held = -(-rows // k.rows), resident_blocks(program, k)
        shape = [k.threads, k.threads * k.rows, k.vector]
        stays = [kept_registers(program, k), shared_bytes(program, k), k.keep == "reload"]
        flags = [k.recompute, k.resident, k.dependent]
        waves = -(-blocks // (SM_COUNT * held))
        table.append([*problem, *shape, *stays, *flags, steps(program, k), blocks, held, waves, us])
    return np.asarray(table, dtype=np.float32).reshape(len(knobs), len(FEATURES))


TEMPLATE = Template(
    name="row_norm",
    knobs=Knobs,
    match=match,
    space=space,
    default=default,
    lower=lower,
    features=features,
    feature_names=FEATURES,
    ranges=ranges,
    estimate=estimate,
    modules=(
        "tvmcap.schedules.gpu_epilogue",
        "tvmcap.schedules.gpu_math",
        "tvmcap.schedules.row_estimate",
        "tvmcap.schedules.row_kernel",
        "tvmcap.schedules.row_match",
        "tvmcap.schedules.row_math",
        "tvmcap.schedules.row_plan",
        "tvmcap.schedules.row_program",
        "tvmcap.schedules.row_storage",
    ),
)

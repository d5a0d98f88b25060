"""Row kernels: norms, softmax and other reductions of rows with the elementwise work around them.

A row is shared by a few threads, one warp or several; each keeps its part of the row in registers
between the passes, so that memory sees one read of every input and one write of every output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tvmcap.kernel.template import Template
from tvmcap.schedules import row_match, row_plan
from tvmcap.schedules.row_kernel import row_kernel
from tvmcap.schedules.row_plan import keeps, kept_registers, shared_bytes, steps
from tvmcap.schedules.row_program import RowProgram


@dataclass(frozen=True)
class Knobs:
    """``threads`` share a row, a block has ``rows`` of them, loads take ``vector`` elements.

    ``keep`` says where a row stays between passes: "registers", "shared" memory, or "reload" where
    it is read again. ``recompute`` keeps the inputs alone and computes intermediates in each pass.
    """

    threads: int = 128
    rows: int = 1
    vector: int = 8
    keep: str = "registers"
    recompute: bool = False


MAX_ELEMENTS = 128
"""Elements of a row that one thread may hold; the code is unrolled over them."""

SM_COUNT = 132
"""Multiprocessors of an H200; rows are few below that."""

_THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_KEEPING = (
    ("registers", False),
    ("registers", True),
    ("shared", False),
    ("shared", True),
    ("reload", True),
)
_OTHER_REGISTERS = 40
_BLOCK, _DEFAULT_BLOCK = 512, 128
_VECTORS = 4
_LONG, _SHORT = 8192, 8


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
        limit = int(target.attrs.get("max_shared_memory_per_block", limit)) - 1024
    if shared_bytes(program, knobs) > limit:
        return False
    if knobs.keep != "registers":
        return True
    elements = steps(program, knobs) * knobs.vector
    registers = min(65536 // block, 255)
    return (
        elements <= MAX_ELEMENTS and kept_registers(program, knobs) + _OTHER_REGISTERS <= registers
    )


def space(program: RowProgram, target: Any) -> list[Knobs]:
    """Every setting that fits, and that differs from the others in what it does."""
    widest = row_plan.vector(program)
    found: dict[Any, Knobs] = {}
    for threads, block, vector, (keep, recompute) in itertools.product(
        _THREADS, _THREADS, (widest, max(widest // 2, 1)), _KEEPING
    ):
        knobs = Knobs(threads, block // threads, vector, keep, recompute)
        if not threads <= block <= max(threads, _BLOCK) or not fits(program, knobs, target):
            continue
        if keep != "registers" and (program.columns < _LONG or threads < 128):
            continue
        if threads < 32 and steps(program, knobs) > _SHORT:
            continue  # neighbouring threads would read far from each other
        kept = tuple(v.var for v in keeps(program, knobs))
        found.setdefault((threads, block, vector, keep, kept), knobs)
    return list(found.values())


def default(program: RowProgram, target: Any) -> Knobs:
    """The setting of ``ranges`` for the program's rows; the last one where they are symbolic."""
    rows = program.rows if isinstance(program.rows, int) else 1 << 30
    return next(knobs for bound, knobs in ranges(program, target) if bound is None or rows <= bound)


def ranges(program: RowProgram, target: Any) -> list[tuple[int | None, Knobs]]:
    """The defaults by rows: as many threads as a row has work for where rows are few."""
    few, many = (_default(program, target, each) for each in (1, _VECTORS))
    return [(None, many)] if few == many else [(SM_COUNT, few), (None, many)]


def _default(program: RowProgram, target: Any, vectors: int) -> Knobs:
    """Give each thread ``vectors`` loads of a row, and the row the first storage that holds it."""
    vector = row_plan.vector(program)
    share = program.columns / (vector * vectors)
    least = next((t for t in _THREADS if 1.5 * t > share), _THREADS[-1])
    for keep, recompute in _KEEPING:
        for threads in (t for t in _THREADS if t >= least):
            rows = max(1, _DEFAULT_BLOCK // threads)
            for knobs in (Knobs(threads, r, vector, keep, recompute) for r in (rows, 1)):
                if fits(program, knobs, target):
                    return knobs
    # a row of fewer elements than threads of a warp
    return Knobs(1, 32, vector, "reload")


def lower(func: tirx.PrimFunc, program: RowProgram, knobs: Knobs, target: Any) -> tirx.PrimFunc:
    """Write the TIRx kernel of a setting, with the parameters of ``func``."""
    attrs = {"tirx.is_scheduled": True, "tvmcap.trailing": program.trailing}
    return tirx.PrimFunc(func.params, row_kernel(program, knobs).body).with_attr(attrs)


FEATURES = tuple(
    "rows columns bytes passes threads block vector registers shared reload recompute steps"
    " blocks waves".split()
)


def features(
    program: RowProgram, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Problem, knobs, and what follows from both; shape (len(knobs), len(FEATURES))."""
    rows = program.rows if isinstance(program.rows, int) else 1024
    loads = [v for v in program.values if v.kind == "load" and v.by_row and v.by_column]
    width = sum(row_plan.itemsize(v) for v in loads)
    width += sum(row_plan.itemsize(o.buffer) for o in program.outputs if o.by_column)
    problem = [rows, program.columns, width, row_plan.passes(program)]
    table = []
    for k in knobs:
        registers, block = kept_registers(program, k), k.threads * k.rows
        blocks = -(-rows // k.rows)
        resident = min(2048 // block, 65536 // (block * (registers + _OTHER_REGISTERS)))
        held = [registers, shared_bytes(program, k), k.keep == "reload", k.recompute]
        waves = -(-blocks // (SM_COUNT * max(resident, 1)))
        shape = [k.threads, block, k.vector]
        table.append([*problem, *shape, *held, steps(program, k), blocks, waves])
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
    modules=(
        "tvmcap.schedules.gpu_epilogue",
        "tvmcap.schedules.gpu_math",
        "tvmcap.schedules.row_kernel",
        "tvmcap.schedules.row_match",
        "tvmcap.schedules.row_math",
        "tvmcap.schedules.row_plan",
        "tvmcap.schedules.row_program",
    ),
)

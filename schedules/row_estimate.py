"""How long a setting of a row kernel should take, from counted bytes, waves and stalls.

It picks the defaults and what tuning tries first: it ranks settings, it does not predict times. The
rates are an H200's as these kernels meet them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from tvmcap.schedules import row_plan
from tvmcap.schedules.row_plan import WARP, keeps, shared_bytes, steps
from tvmcap.schedules.row_program import RowProgram

SM_COUNT = 132
"""Multiprocessors of an H200."""

REGISTERS, THREADS, BLOCKS, SHARED_BYTES = 65536, 2048, 32, 232448
"""Of a multiprocessor (CUDA C++ Programming Guide, compute capability 9.0)."""

_HBM_BYTES_A_US = 4.1e6
_ALONE_BYTES_A_US = 0.1e6  # that one multiprocessor gets at most
_LATENCY_US = 0.9  # of a load while memory is busy
_LAUNCH_US = 0.6
_EARLY_US = 0.4  # of the launch, that a dependent kernel hides
_STALL_US = 0.75  # of a block that loads, then stores,
_SUM_US = (0.3, 0.4)  # and reduces, in a warp or across warps
_APART = 0.05  # of a stall that is left where blocks have drifted apart
_CYCLES_A_US = 1775.0
_OPERATIONS = (4.0, 4.0)  # instructions of an element in a pass, of a vector,
_EXPOSED = 0.1  # and the part of them that no load hides
_BUSY_WARPS = 24.0  # of a multiprocessor, to issue an instruction each cycle
_SHARED = 0.03  # of the time, for the way through shared memory,
_AGAIN = 0.3  # for reading the row again, from the L2 cache
_TIGHT = 0.03  # for registers that are few,
_SPILLED = 0.2  # and for too few
_BLOCK, _TOGETHER = 128, 0.005  # for each doubling of the threads of a block of several rows
_UNROLLED = 64  # elements of a thread up to which the compiler gets by with few registers
_LEAST, _BASE, _WIDENED = 36, 16, 1.25  # registers of a thread, and for each element it keeps


def natural_registers(program: RowProgram, knobs: Any) -> int:
    """Return about how many registers of a thread the compiler takes where it is free."""
    if knobs.keep != "registers" or not keeps(program, knobs):
        return 40
    return int(_BASE + _WIDENED * steps(program, knobs) * knobs.vector)


def is_short(program: RowProgram, knobs: Any) -> bool:
    """Whether registers would spill: values kept, loads in flight, arithmetic."""
    if knobs.keep != "registers" or not keeps(program, knobs):
        return _most_registers(knobs) < _LEAST
    loads = [v for v in program.values if v.kind == "load" and v.by_row and v.by_column]
    elements = steps(program, knobs) * knobs.vector
    if elements > _UNROLLED and is_tight(program, knobs):
        return True
    flight = sum(-(-elements * row_plan.itemsize(v) // 4) for v in loads)
    reductions = [v for v in program.values if v.combine is not None]
    held = max(row_plan.kept_registers(program, knobs), flight) + 8 * (knobs.rows > 1)
    return bool(held + 20 + 8 * len(reductions) > _most_registers(knobs))


def is_tight(program: RowProgram, knobs: Any) -> bool:
    """Whether the blocks asked for leave fewer registers than the compiler would take."""
    return natural_registers(program, knobs) > _most_registers(knobs)


def _most_registers(knobs: Any) -> int:
    most: int = REGISTERS // (knobs.threads * knobs.rows * knobs.resident) // 8 * 8
    return min(most, 255)


def resident_blocks(program: RowProgram, knobs: Any) -> int:
    """Return how many blocks a multiprocessor holds at once."""
    block = knobs.threads * knobs.rows
    registers = min(natural_registers(program, knobs), _most_registers(knobs))
    registers = min(-(-max(registers, 24) // 8) * 8, 255)
    shared = shared_bytes(program, knobs) + 1024
    most = min(THREADS // block, BLOCKS, SHARED_BYTES // shared)
    return int(max(min(most, REGISTERS // (block * registers)), 1))


@lru_cache(maxsize=64)
def row_bytes(program: RowProgram) -> tuple[int, int]:
    """Return the bytes of a row that are read, and that are written."""
    loads = [v for v in program.values if v.kind == "load" and v.by_row and v.by_column]
    read = sum(row_plan.itemsize(v) for v in loads) * program.columns
    outputs = [o for o in program.outputs if o.by_column]
    return read, sum(row_plan.itemsize(o.buffer) for o in outputs) * program.columns


def estimate_us(program: RowProgram, knobs: Any, rows: int) -> float:
    """Estimate the microseconds of a setting."""
    blocks, block = -(-rows // knobs.rows), knobs.threads * knobs.rows
    read, written = row_bytes(program)
    resident = resident_blocks(program, knobs)
    share = max(blocks / SM_COUNT, 1.0)
    flight = min(share, resident) * knobs.rows * max(read, 1)
    rate = min(_HBM_BYTES_A_US / min(blocks, SM_COUNT), _ALONE_BYTES_A_US, flight / _LATENCY_US)
    again = _AGAIN * read * (row_plan.passes(program) - 1) if knobs.keep == "reload" else 0.0
    moved = share * knobs.rows * (read + written + again) / rate
    waves = -(-blocks // (SM_COUNT * resident))
    stalls = min(waves, 2) + _APART * max(waves - 2, 0)
    exposed = _EXPOSED * _arithmetic(program, knobs, share, min(share, resident))
    factor = 1.0 + _SHARED * (knobs.keep == "shared") + _TIGHT * is_tight(program, knobs)
    uneven = abs(math.log2(block / _BLOCK)) if knobs.rows > 1 or block < _BLOCK else 0.0
    factor += _SPILLED * is_short(program, knobs) + _TOGETHER * uneven
    fixed = _LAUNCH_US - (_EARLY_US if knobs.dependent else 0.0)
    return float(fixed + moved * factor + stalls * _stall(program, knobs) + exposed)


def _stall(program: RowProgram, knobs: Any) -> float:
    """Microseconds in which a block neither loads nor stores."""
    reductions = len({v.phase for v in program.values if v.combine is not None})
    return _STALL_US + reductions * _SUM_US[knobs.threads > WARP]


def _arithmetic(program: RowProgram, knobs: Any, share: float, resident: float) -> float:
    """Microseconds to issue the instructions of a multiprocessor's rows."""
    extra = 1.25 if keeps(program, knobs) and knobs.recompute else 1.0
    lanes = min(1.0, program.columns / (knobs.threads * knobs.vector))
    warps = max(resident * knobs.threads * knobs.rows / WARP, 1.0)
    busy = min(1.0, warps * max(lanes, 0.25) / _BUSY_WARPS)
    elements = share * knobs.rows * program.columns * row_plan.passes(program)
    operations = _OPERATIONS[0] + _OPERATIONS[1] / knobs.vector
    return float(operations * extra * elements / (128 * busy * _CYCLES_A_US))

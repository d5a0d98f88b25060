"""An estimate of how long a loop nest takes on a CPU, which its cost model starts from.

The main block issues a multiply-add and its loads and stores, at two instructions a cycle, or waits
for what its tiles fetch into the first and the second cache, whichever takes longest (a roofline:
Williams et al., 2009); the other blocks come on top. Constants are those of a server core of the
2020s; the trees on top correct what they miss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvmcap.kernel.loop_blocks import Block, total, unrolled
from tvmcap.kernel.loop_body import fetched, traffic

NAMES = ("log_issue", "log_near", "log_far", "log_rounds")
_CACHES = (32 << 10, 1 << 20)
"""Bytes of the first cache and the second."""
_NEAR, _FAR, _ISSUES = 32.0, 8.0, 2.0
"""Bytes a cycle from the second cache and from what is behind it, and instructions a cycle."""
_CYCLES_A_US = 3000.0


def estimate(blocks: Sequence[Block], main: Block, lanes: int, cores: int) -> dict[str, float]:
    """Return ``NAMES``, and ``log_estimate_us``, the logarithm of the estimate in microseconds.

    ``lanes`` is how many elements a register holds, ``cores`` how many threads may run.
    """
    loops = [(loop.name, loop.extent) for loop in reversed(main.loops)]
    near, far = (fetched(main.accesses, main.inside, loops, size) / main.runs for size in _CACHES)
    issue, rounds = _instructions(main, lanes), main.rounds(cores)
    cycles = max(issue / _ISSUES, near / _NEAR, far / _FAR) * main.runs * rounds
    cycles += sum(block.steps(lanes, cores) for block in blocks if block is not main)
    return {
        "log_issue": math.log2(issue),
        "log_near": math.log2(near),
        "log_far": math.log2(far),
        "log_rounds": math.log2(rounds * cores),
        "log_estimate_us": math.log(cycles / _CYCLES_A_US),
    }


def _instructions(main: Block, lanes: int) -> float:
    """Return the instructions for each run of the main block.

    Where TVM makes no vector, LLVM makes one of the innermost loop that is left, if it can.
    """
    body, moving, each = list(unrolled(main.loops)), main.moving(main.vector), main.each(lanes)
    rest = main.rest
    if main.width == 1 and rest is not None and rest.name not in main.summed:
        along = main.moving(rest)
        kinds = {access.kind(along) for access in main.accesses}
        if "apart" not in kinds and "contiguous" in kinds:
            each, moving, body = 1 / min(lanes, rest.extent), along, [*body, rest]
    moved, _ = traffic(main.accesses, moving, main.sizes([*body, *main.loops[-1:]]), each)
    return each + moved / total(body)

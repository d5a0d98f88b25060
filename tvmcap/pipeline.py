"""THE list of passes, in order. Nothing else decides order.

Dumping, timing and contract checks happen here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tvm

from tvmcap import contracts
from tvmcap.base.config import Config
from tvmcap.base.errors import BuildError, ConfigError, LibraryError, TvmcapError
from tvmcap.base.signature import evaluate, grows
from tvmcap.capture import precision
from tvmcap.graph import canonicalize, fuse, layout, vendor
from tvmcap.kernel import apply, column_sums, cpu_rows, spaces
from tvmcap.kernel.choice import Choose
from tvmcap.library import plan

logger = logging.getLogger("tvmcap")

Pass = Callable[[tvm.IRModule], tvm.IRModule]

OPTIONAL = ("canonicalize", "fold", "layout", "fuse")
"""Passes that ``disable`` may name: the others are needed for any code at all."""


@dataclass
class Trace:
    """What a run of the passes leaves behind: seconds of each, and what serves each task."""

    seconds: list[tuple[str, float]] = field(default_factory=list)
    coverage: list[apply.Served] = field(default_factory=list)

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step that is no pass and note its seconds."""
        start = time.perf_counter()
        result = step()
        self.seconds.append((name, time.perf_counter() - start))
        return result


def front(
    target: Any,
    allow_tf32: bool = False,
    vendor_matmul: bool = False,
    quantize: Pass | None = None,
) -> list[tuple[str, Pass]]:
    """From captured graph to fused kernels: what tuning sees.

    ``quantize`` is the pass that makes some products 8-bit, where that is wanted.
    """
    tf32 = allow_tf32 and target.kind.name == "cuda"
    pack = partial(spaces.pack_weight, target=target, allow_tf32=tf32)
    return [
        # before widen, which gives each kernel a cast of its own: sharing those would store 32 bits
        ("canonicalize", canonicalize.canonicalize),
        # before widen: torch's kernels take and return 16 bits
        *([("vendor", vendor.leave_matmuls)] if vendor_matmul else []),
        # 16-bit chains compute in float32 between the loads and stores of the kernels to be
        ("operators", precision.widen),
        # what is constant can be packed; after widen, because TVM cannot legalize bf16
        # normalisations
        ("fold", canonicalize.fold),
        # after fold, which makes constants of the weights, and would make floats of 8-bit ones
        *([("quantize", quantize)] if quantize is not None else []),
        # before legalize: a matmul is still one operator
        ("layout", partial(layout.layout, pack=pack)),
        # operators to PrimFuncs, one each
        ("legalize", fuse.legalize),
        # PrimFuncs to fused PrimFuncs: the step that saves the traffic
        ("fuse", partial(fuse.fuse, serves=partial(one_kernel, target=target))),
        # after fuse, which keeps no attributes: what a kernel's products may be computed in
        ("tf32", partial(spaces.mark_tf32, allowed=tf32)),
    ]


def one_kernel(func: tvm.tirx.PrimFunc, target: Any) -> bool:
    """Whether one kernel serves a fused PrimFunc at least as well as one for each of its parts."""
    if spaces.find(func, target) is not None or column_sums.suits(func, target):
        return True
    return target.kind.name == "llvm" and cpu_rows.is_rowwise(func)


def back(
    target: Any, lookup: apply.Lookup, trace: Trace, choose: Choose | None = None
) -> list[tuple[str, Pass]]:
    """From fused kernels to scheduled kernels with storage: what codegen takes."""
    return [
        # a record where one exists, else a cost model's choice, else a rule
        (
            "schedule",
            partial(
                apply.schedule,
                target=target,
                lookup=lookup,
                coverage=trace.coverage,
                choose=choose,
            ),
        ),
        # after schedule: kernels may ask for workspace
        ("plan", plan.plan),
    ]


def count_kernels(planned: tvm.IRModule) -> int:
    """Kernels that one call of a planned module launches."""
    return sum(
        1
        for block in planned["main"].body.blocks
        for b in block.bindings
        if plan.is_launch(b.value)
    )


def calls(planned: tvm.IRModule, kernel: str) -> bool:
    """Whether a kernel is still part of a planned module: reshapes became views."""
    return any(gvar.name_hint == kernel for gvar, _ in planned.functions.items())


def peak_bytes(planned: tvm.IRModule) -> int | None:
    """Bytes of planned intermediates at the largest sizes.

    None where a dimension has no upper bound, and where a storage may be larger at smaller sizes.
    """
    bounds = {
        str(k): int(v)
        for k, v in (planned["main"].attrs or {}).get("tir_var_upper_bound", {}).items()
    }
    total = 0
    for unit, size in planned.attrs["tvmcap.storage"].items():
        if not grows(str(unit) or 1):
            return None
        try:
            total += int(size) * evaluate(str(unit) or 1, bounds)
        except LibraryError:
            return None
    return total


def check_disable(disable: Sequence[str]) -> None:
    """Raise ConfigError where ``disable`` names something that is no optional pass."""
    for name in disable:
        if name not in OPTIONAL:
            raise ConfigError(
                f"disable={name!r}: the passes that can be left out are {', '.join(OPTIONAL)}"
            )


def run(
    mod: tvm.IRModule, passes: list[tuple[str, Pass]], target: Any, config: Config, trace: Trace
) -> tvm.IRModule:
    """Run passes in order; raises BuildError that names the pass that failed."""
    check_disable(config.disable)
    for name, step in passes:
        if name in config.disable:
            continue
        start = time.perf_counter()
        try:
            with target:
                mod = step(mod)
        except TvmcapError:
            raise
        except Exception as e:
            advice = f"; disable={name!r} goes around it" if name in OPTIONAL else ""
            raise BuildError(f"pass {name!r} failed: {_last_line(e)}{advice}") from e
        trace.seconds.append((name, time.perf_counter() - start))
        if config.dump:
            _dump(mod, Path(config.dump), len(trace.seconds), name)
        if os.environ.get("TVMCAP_CHECK") == "1":
            contracts.check(mod, name)
    return mod


def _dump(mod: tvm.IRModule, folder: Path, number: int, name: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}_{name}.py").write_text(mod.script(show_meta=False))
    except OSError as e:
        raise BuildError(
            f"cannot write the IR to {folder}: {e}; choose another folder for dump="
        ) from e


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__

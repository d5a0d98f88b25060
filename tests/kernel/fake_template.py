"""A template with knobs that work, crash, hang, fail to lower or compute something else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tvmcap.kernel.template import Template

GOOD, SLOW, WRONG, CRASH, HANG, NO_LOWER, NO_COMPILE, RUN_CRASH = range(8)
RUN_HANG, STRAY, SPOILS_INPUT, SPOILS_PROCESS = range(8, 12)


@dataclass(frozen=True)
class Knobs:
    """``mode`` says how the candidate behaves."""

    tile: int
    mode: int = GOOD


@dataclass(frozen=True)
class Problem:
    """A matmul of (rows, k) by (k, n)."""

    rows: Any
    k: int
    n: int

    def key(self) -> dict[str, Any]:
        return {"k": self.k, "n": self.n}

    def flops(self, sizes: Mapping[str, int]) -> float:
        return 2.0 * self.k * self.n

    def bytes(self, sizes: Mapping[str, int]) -> float:
        return 4.0 * self.k * self.n


def match(func: Any, target: Any) -> Problem | None:
    x, w = func.params[0], func.params[1]
    if len(x.shape) != 2 or len(w.shape) != 2:
        return None
    rows = x.shape[0]
    return Problem(
        int(rows) if isinstance(rows, tirx.IntImm) else rows, int(w.shape[0]), int(w.shape[1])
    )


def space(problem: Problem, target: Any) -> list[Knobs]:
    return [Knobs(tile) for tile in (1, 2, 4, 8, 16)]


def space_with_failures(problem: Problem, target: Any) -> list[Knobs]:
    return [Knobs(4), Knobs(8)] + [
        Knobs(4, mode) for mode in (WRONG, CRASH, NO_LOWER, NO_COMPILE, RUN_CRASH)
    ]


def space_all_wrong(problem: Problem, target: Any) -> list[Knobs]:
    return [Knobs(tile, NO_COMPILE) for tile in (1, 2, 4, 8)]


def default(problem: Problem, target: Any) -> Knobs:
    return Knobs(4)


def default_wrong(problem: Problem, target: Any) -> Knobs:
    return Knobs(4, NO_COMPILE)


def lower(func: Any, problem: Problem, knobs: Knobs, target: Any) -> Any:
    if knobs.mode == CRASH:
        os.abort()
    if knobs.mode == HANG:
        time.sleep(600)
    if knobs.mode == NO_LOWER:
        raise ValueError("tile does not divide")
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    block = sch.get_child_blocks(sch.get_sblock("root"))[0]
    i, j, k = sch.get_loops(block)
    j0, j1 = sch.split(j, [None, knobs.tile])
    sch.reorder(j0, i, k, j1)
    lowered = sch.mod["main"]
    if knobs.mode == WRONG:
        lowered = _multiplied_by_two(lowered)
    if knobs.mode == NO_COMPILE:
        lowered = _with_statement(
            lowered, tirx.Evaluate(tirx.call_intrin("int32", "tirx.ptx_cp_async_commit_group"))
        )
    if knobs.mode == RUN_CRASH:
        lowered = _with_statement(lowered, tirx.Evaluate(tirx.call_extern("int32", "abort")))
    if knobs.mode == RUN_HANG:
        lowered = _with_statement(lowered, tirx.Evaluate(tirx.call_extern("int32", "pause")))
    if knobs.mode == STRAY:  # past the end of the output
        rows, width = func.params[2].shape
        lowered = _with_statement(lowered, _overwrite(lowered, 2, (rows - 1, width - 1), 68))
    if knobs.mode == SPOILS_INPUT:
        lowered = _with_statement(lowered, _overwrite(lowered, 1, (0, 0), 4))
    if knobs.mode == SPOILS_PROCESS:  # its own result is right, and the next request cannot be read
        lowered = _with_statement(lowered, tirx.Evaluate(tirx.call_extern("int32", "close", 0)))
    return lowered


def _overwrite(func: Any, param: int, at: tuple[Any, ...], count: int) -> Any:
    """Zero some bytes from an element of an argument on, the element itself kept where it can."""
    buffer = func.params[param]
    start = tirx.address_of(tirx.BufferLoad(buffer, list(at)))
    return tirx.Evaluate(tirx.call_extern("handle", "memset", start, 0, tirx.const(count, "int64")))


def _with_statement(func: Any, statement: Any) -> Any:
    body = func.body
    block = body.block
    block = tvm.s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        tirx.SeqStmt([block.body, statement]),
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    return func.with_body(tvm.s_tir.SBlockRealize(body.iter_values, body.predicate, block))


def _multiplied_by_two(func: Any) -> Any:
    import tvm_ffi

    def double(value: Any) -> Any:
        return value * tirx.const(2.0, "float32") if str(value.ty.dtype) == "float32" else value

    return tvm_ffi.structural_map(func, (tirx.Mul, double))


def features(
    problem: Problem, knobs: Sequence[Knobs], target: Any
) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([[k.tile, k.mode, float(problem.rows)] for k in knobs], "float32")


def _template(name: str, **changes: Any) -> Template:
    parts = dict(match=match, space=space, default=default, lower=lower, features=features)
    return Template(
        name=name, knobs=Knobs, feature_names=("tile", "mode", "rows"), **{**parts, **changes}
    )


FAKE = _template("fake")
FAILING = _template("failing", space=space_with_failures)
BROKEN = _template("broken", space=space_all_wrong, default=default_wrong)


def find(func: Any, target: Any) -> Any:
    return FAKE, match(func, target)


def find_failing(func: Any, target: Any) -> Any:
    return FAILING, match(func, target)


def find_broken(func: Any, target: Any) -> Any:
    return BROKEN, match(func, target)


def target() -> Any:
    return tvm.target.Target({"kind": "llvm", "num-cores": 2})


def module(
    k: int = 32, n: int = 48, rows: int | None = None, name: str = "B", calls: int = 1
) -> Any:
    """A fused module: matmuls of a symbolic (or static) number of rows."""
    builder = relax.BlockBuilder()
    m = tirx.Var(name, "int64") if rows is None else rows
    x = relax.Var("x", relax.TensorType((m, k), "float32"))
    w = relax.Var("w", relax.TensorType((k, n), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = x
            for _ in range(calls):
                y = builder.emit(relax.op.matmul(y, w))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    mod = builder.get()
    if rows is None:
        mod["main"] = mod["main"].with_attr("tir_var_upper_bound", {name: 64})
    passes = [relax.transform.LegalizeOps(), relax.transform.FuseOps(), relax.transform.FuseTIR()]
    return tvm.transform.Sequential(passes)(mod)

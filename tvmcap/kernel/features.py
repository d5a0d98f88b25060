"""What a cost model sees of a template's candidate, and how a candidate carries its knobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from tvmcap.base import ir_text
from tvmcap.kernel.tensor_intrinsics import import_tensor_intrinsics

KNOBS = "tvmcap.knobs"
"""Annotation of the root block: the knobs as canonical JSON, all that MetaSchedule sees."""


def copy_func(func: Any) -> Any:
    """Return a deep copy of a PrimFunc, named main.

    A schedule overlooks that the body of a PrimFunc is shared with the one it was made from by
    ``with_attr``, and changes both: what is scheduled must be a copy.
    """
    return ir_text.parse(tvm.ir.save_json(func.with_attr("global_symbol", "main")))


def new_schedule(func: Any) -> Any:
    """Return a schedule of a copy of ``func``, named main."""
    return tvm.s_tir.Schedule(tvm.IRModule({"main": copy_func(func)}))


def replay(func: Any, trace: Sequence[Any]) -> Any:
    """Return a schedule of a copy of ``func`` by a trace (JSON data)."""
    if any(name == "Tensorize" for name, *_ in trace[0]):
        import_tensor_intrinsics()
    sch = new_schedule(func)
    tvm.s_tir.schedule.Trace.apply_json_to_schedule(trace, sch)
    return sch


def annotate(func: Any, knobs_json: str) -> Any:
    """Return a schedule of ``func`` whose trace is one annotation that holds the knobs."""
    return annotated(new_schedule(func), knobs_json)


def annotated(plain: Any, knobs_json: str) -> Any:
    """Return what ``annotate`` does from a schedule of the function, which stays as it is.

    To copy a schedule costs far less than to copy its function.
    """
    sch = plain.copy()
    sch.annotate(sch.get_sblock("root"), KNOBS, knobs_json)
    return sch


def read_knobs(sch: Any) -> str | None:
    """Return the knobs that a schedule carries, or None."""
    value = sch.get(sch.get_sblock("root")).annotations.get(KNOBS)
    return None if value is None else str(value)


def template_features(template: Any, problem: Any, knobs: Sequence[Any], target: Any) -> Any:
    """Return the template's features as a finite float32 array (candidates, features)."""
    rows = np.asarray(template.features(problem, knobs, target), dtype=np.float32)
    return np.nan_to_num(rows.reshape(len(knobs), -1), posinf=3e38, neginf=-3e38)

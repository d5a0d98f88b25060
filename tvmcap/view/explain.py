"""explain: what was captured and frozen, what serves each kernel, and what would make it faster."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tvmcap.base.training import Training
from tvmcap.view import accuracy
from tvmcap.view.inspect import signature_text


def explain(compiled: Any) -> str:
    """Say what the library is made of, and which record or rule serves each kernel."""
    manifest = compiled.manifest
    sections = [_origin(compiled), signature_text(manifest.signature)]
    if manifest.frozen:
        names = ", ".join(manifest.frozen)
        sections.append(f"frozen at build (a later change in PyTorch is not seen): {names}")
    if manifest.training is not None:
        sections.append(_training(manifest.training))
    if compiled.accuracy is not None:
        sections.append(accuracy.text(compiled.accuracy))
    sections.append("\n".join(["kernels", *map(_task, manifest.coverage)]))
    notice = tuning_notice(manifest.coverage)
    return "\n\n".join([*sections, notice] if notice else sections)


def _origin(compiled: Any) -> str:
    manifest = compiled.manifest
    target = manifest.target
    name = target.get("arch") or target.get("mcpu") or ""
    lines = [f"library for {target['kind']} {name}".rstrip()]
    if manifest.key:
        where = "from the compile cache" if compiled.from_cache else "compiled"
        lines.append(f"{where}, key {manifest.key}")
    if not compiled.from_cache and compiled.passes:
        longest = sorted(compiled.passes, key=lambda p: -p[1])[:3]
        steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
        total = sum(seconds for _, seconds in compiled.passes)
        lines.append(f"{total:.2f} s of work; longest: {steps}")
    if compiled.executor is None:
        lines.append(f"cannot run here: {compiled.foreign}")
    else:
        lines.append(
            f"inputs copied so far (not contiguous or misaligned): {compiled.executor.copies}"
        )
    state = {True: "yes", False: "no", None: "not yet: tvmcap.verify(lib, reference=fn)"}
    lines.append(f"verified: {state[manifest.verified]}")
    return "\n".join(lines)


def _training(training: Training) -> str:
    """Say what the forward entry saves for the backward one, and what gets a gradient."""
    lines = [f"with gradients, memory_budget {training.memory_budget:g}; saved for the backward"]
    for saved in training.saved:
        shape = ", ".join(map(str, saved.shape))
        where = "" if saved.source == "own" else f" (the {saved.source} itself)"
        lines.append(f"  {saved.name}: {saved.dtype}[{shape}]{where}")
    if training.updates:
        lines.append(f"buffers that a call changes: {', '.join(training.updates)}")
    if training.draws:
        drawn = ", ".join(dict.fromkeys(draw.operator for draw in training.draws))
        lines.append(f"drawn by PyTorch's generator before a call: {drawn}")
    return "\n".join(lines)


def _task(task: Mapping[str, Any]) -> str:
    calls = int(task.get("calls") or 1)
    times = f", {calls} calls" if calls > 1 else ""
    lines = [f"  {task['task']}: {task.get('by', task.get('served_by', ''))}{times}"]
    for size, record in sorted(dict(task.get("records") or {}).items(), key=_numbers):
        lines.append(f"    tuned at {size}: {record}")
    ranges = dict(task.get("ranges") or {})
    for bound, knobs in sorted(ranges.items(), key=_numbers):
        above = "any size above" if len(ranges) > 1 else "any size"
        limit = above if bound == "any" else f"up to {bound.removeprefix('<=')} rows"
        lines.append(f"    {limit}: {knobs}")
    if task.get("reason"):
        lines.append(f"    fell back: {task['reason']}")
    return "\n".join(lines)


def _numbers(item: tuple[str, Any]) -> list[float]:
    """Order sizes and bounds by their numbers; what has none comes last."""
    return [float(number) for number in re.findall(r"\d+", item[0])] or [math.inf]


def tuning_notice(coverage: Sequence[Mapping[str, Any]]) -> str:
    """Say how many tasks are tuned, and what to do about the rest; "" with nothing to tune."""
    tunable = [task for task in coverage if task.get("tunable", True)]
    tuned = sum(1 for task in tunable if task.get("tuned"))
    if not tunable:
        return ""
    left = sum(1 for task in tunable if str(task.get("served_by")).startswith("vendor:"))
    rest = tuned + left < len(tunable)
    advice = "; tvmcap tune, or build(..., tune=64), tunes the rest" if rest else ""
    vendor = f"; {left} left to torch" if left else ""
    return f"{tuned} of {len(tunable)} tasks tuned{vendor}{advice}"

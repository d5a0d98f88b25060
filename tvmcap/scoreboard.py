"""The scoreboard: what a library costs and gains against eager PyTorch and torch.compile."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmcap import training_score
from tvmcap.base.config import Config
from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.base.score import Latency, Score
from tvmcap.base.signature import Signature, unflatten
from tvmcap.base.timing import measure, rotated
from tvmcap.verify.check import Subject, device_of, example_leaves
from tvmcap.verify.inputs import InputSet, draw, example_sizes
from tvmcap.view.eager import count_eager, parameters
from tvmcap.view.traffic import Table, count, kernel_table, nbytes, served_by, weight_like

log = logging.getLogger("tvmcap")

Progress = Callable[[str], None]


def score(
    compiled: Any,
    sizes: Mapping[str, int] | None = None,
    baselines: bool = True,
    progress: Progress | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    budget_s: float = 2.0,
    cold: bool = False,
) -> Score:
    """Count kernels and bytes, and time the library against its baselines, interleaved.

    Parameters
    ----------
    compiled: what ``build`` or ``load`` returned. One that cannot run here has no latencies.
    sizes: symbolic sizes; by default those of the example.
    baselines: time eager and torch.compile too; needs the PyTorch code (captured, or
        ``reference``).
    progress: called with the name of each step.
    budget_s: seconds of measurement, compilation by torch.compile apart.
    cold: rotate through copies of the inputs larger than the last-level cache.
    """
    sig: Signature = compiled.signature
    say = progress or (lambda step: None)
    if compiled.manifest.training is not None:
        return training_score.score(
            compiled, sizes, baselines, say, reference=reference, budget_s=budget_s, cold=cold
        )
    example = None if compiled.captured is None else example_leaves(compiled.captured)
    chosen = {**example_sizes(sig, example), **(sizes or {})}
    say("counting kernels and bytes")
    result = counted(compiled.manifest, chosen, kernel_table(compiled))
    if compiled.executor is None:
        return result
    if compiled.captured is None and reference is None:
        subject, leaves = None, draw(sig, InputSet("normal", chosen, 0))
    else:
        subject = Subject.of(compiled, reference)
        leaves = draw(sig, InputSet("normal", chosen, 0), example)
    device = device_of(compiled)
    with torch.no_grad():
        ours = [t.to(device) for t in leaves]
        result = _traced(compiled, result, ours)
        calls: dict[str, Callable[..., Any]] = {"ours": compiled}
        args = tuple(ours) if subject is None else subject.arguments(ours)
        if subject is not None and baselines and subject.eager_device.type == device:
            result = _eager_counts(result, subject, leaves)
            calls["eager"] = subject.eager
            say("torch.compile")
            calls.update(_torch_compile(subject, ours))
        say("measuring " + ", ".join(calls))
        bound = {name: _bound(subject, fn) for name, fn in calls.items()}
        inputs = rotated(args) if cold else [args]
        _match_threads()
        times = measure(bound, inputs, device=device, budget_s=budget_s)
    return _with_times(result, times)


def counted(manifest: Manifest, sizes: dict[str, int], table: Table | None) -> Score:
    """Fill in what needs no run: kernels, bytes, planned memory, coverage."""
    coverage = manifest.coverage
    tunable = [task for task in coverage if task.get("tunable", True)]
    common: dict[str, Any] = {
        "build_s": manifest.build_s,
        "tuned_tasks": sum(1 for task in tunable if task.get("tuned")),
        "tasks": len(tunable),
        "verified": manifest.verified,
    }
    if table is None:
        return Score(sizes, manifest.kernels_per_call, None, None, None, None, **common)
    traffic = count(table, manifest.signature, sizes, served_by(coverage))
    return Score(
        sizes=sizes,
        kernels=traffic.launches,
        hbm_bytes=traffic.hbm_bytes,
        activation_traffic=traffic.ratio,
        weight_bytes=traffic.weight_bytes,
        peak_bytes_planned=traffic.peak_planned,
        per_kernel=tuple(traffic.kernels),
        **common,
    )


def _traced(compiled: Any, result: Score, leaves: list[torch.Tensor]) -> Score:
    """Run once under the executor's instruments: kernels launched and memory alive at once."""
    args = unflatten(compiled.signature.in_tree, leaves)
    trace = compiled.executor.trace(*args)
    called = len(trace.kernels)
    planned = len(result.per_kernel) if result.per_kernel else result.kernels
    if planned is not None and called != planned:
        log.warning("counted %d kernels in the module, but a run called %d", planned, called)
    outputs = sum(nbytes(o.dtype, o.shape, result.sizes) for o in compiled.signature.outputs)
    return replace(
        result, kernels_traced=called, peak_bytes_measured=trace.intermediate_bytes + outputs
    )


def _eager_counts(result: Score, subject: Subject, leaves: list[torch.Tensor]) -> Score:
    home = [t.to(subject.eager_device) for t in leaves]
    flags = weight_like(subject.signature)
    weights = [t for t, w in zip(home, flags, strict=True) if w] + parameters(subject.eager)
    traffic = count_eager(lambda: subject.call(subject.eager, home), weights)
    return replace(
        result,
        eager_kernels=len(traffic.kernels),
        eager_hbm_bytes=traffic.hbm_bytes,
        eager_activation_traffic=traffic.ratio,
    )


def _torch_compile(subject: Subject, leaves: list[torch.Tensor]) -> dict[str, Callable[..., Any]]:
    """Compile with torch.compile; empty, with the reason logged, where that fails."""
    try:
        dynamo: Any = importlib.import_module("torch._dynamo")
        dynamo.reset()
        fn = torch.compile(subject.eager)
        subject.call(fn, leaves)
        return {"torch.compile": fn}
    except Exception as e:
        lines = [line for line in str(e).splitlines() if line.strip()]
        log.info("torch.compile cannot run here: %s", lines[0] if lines else type(e).__name__)
        return {}


def _bound(subject: Subject | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the arguments that the function takes by keyword, by keyword."""
    names = () if subject is None else subject.keywords
    if not names:
        return fn

    def call(*values: Any) -> Any:
        count = len(values) - len(names)
        return fn(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return call


def _match_threads() -> None:
    """Warn where PyTorch and the library would run on different numbers of threads."""
    from tvmcap.runtime.loader import configure_threads

    ours, theirs = configure_threads(), torch.get_num_threads()
    if ours != theirs:
        log.warning(
            "the library runs on %d threads and PyTorch on %d: set TVM_NUM_THREADS=%d for a fair "
            "comparison",
            ours,
            theirs,
            theirs,
        )


def _with_times(result: Score, times: Mapping[str, Latency]) -> Score:
    ours, eager = times["ours"], times.get("eager")
    return replace(
        result,
        latency_us=ours,
        eager_us=eager,
        torch_compile_us=times.get("torch.compile"),
        speedup=None if eager is None else eager.median / ours.median,
    )


@dataclass(frozen=True)
class WalkRow:
    """One step of the walk from eager to compiled."""

    name: str
    score: Score


def walk(
    fn: Callable[..., Any],
    args: Sequence[Any],
    configs: Mapping[str, Config] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> list[WalkRow]:
    """Build ``fn`` with each of ``configs`` and score it: the walk from eager to compiled.

    ``configs``: name of the step to Config; by default ``default_steps``. Baselines are measured
    with each, so that every ratio is interleaved.
    """
    from tvmcap.build import build

    steps = configs or default_steps(Config())
    rows = []
    for name, config in steps.items():
        if progress:
            progress(name)
        lib = build(fn, tuple(args), kwargs, config=config)
        if lib.executor is None:
            raise LibraryError("the walk measures, so it needs a target that runs on this machine")
        rows.append(WalkRow(name, score(lib, sizes)))
    return rows


def default_steps(config: Config) -> dict[str, Config]:
    """From every optional pass left out to none."""
    without = {
        "no canonicalize, fold, layout, fuse": ("canonicalize", "fold", "layout", "fuse"),
        "no fuse": ("fuse",),
        "all passes, untuned": (),
    }
    steps = {name: replace(config, disable=off, tune="none") for name, off in without.items()}
    return {**steps, "all passes, with records": replace(config, disable=())}

"""The scoreboard of a library with gradients: forward and backward together."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tvmcap.base.manifest import Manifest
from tvmcap.base.score import Score
from tvmcap.base.timing import measure, rotated
from tvmcap.base.training import Training
from tvmcap.verify.check import device_of, example_leaves
from tvmcap.verify.inputs import InputSet, draw, example_sizes
from tvmcap.view.traffic import count, nbytes, served_by

log = logging.getLogger("tvmcap")


def counted(manifest: Manifest, sizes: dict[str, int]) -> Score:
    """Fill in what needs no run: kernels, bytes and planned memory of both entries."""
    training = manifest.training
    assert training is not None
    served = served_by(manifest.coverage)
    first, second = (
        count(training.kernels[name], entry.signature, sizes, served)
        for name, entry in (("forward", training.forward), ("backward", training.backward))
    )
    kept = saved_bytes(training, sizes)
    outputs = sum(nbytes(o.dtype, o.shape, sizes) for o in manifest.signature.outputs)
    peaks = (first.peak_planned, second.peak_planned)
    tunable = [task for task in manifest.coverage if task.get("tunable", True)]
    return Score(
        sizes=sizes,
        kernels=first.launches + second.launches,
        hbm_bytes=first.hbm_bytes + second.hbm_bytes,
        activation_traffic=(first.activations + second.activations) / outputs if outputs else 0.0,
        weight_bytes=0,
        peak_bytes_planned=None if None in peaks else max(peaks[0] or 0, kept + (peaks[1] or 0)),
        build_s=manifest.build_s,
        tuned_tasks=sum(1 for task in tunable if task.get("tuned")),
        tasks=len(tunable),
        verified=manifest.verified,
        per_kernel=(*first.kernels, *second.kernels),
    )


def saved_bytes(training: Training, sizes: Mapping[str, int]) -> int:
    """Bytes of what the forward entry keeps for the backward one, inputs and outputs apart."""
    return sum(nbytes(s.dtype, s.shape, sizes) for s in training.saved if s.source == "own")


def score(
    compiled: Any,
    sizes: Mapping[str, int] | None = None,
    baselines: bool = True,
    say: Callable[[str], None] = lambda step: None,
    *,
    reference: Callable[..., Any] | None = None,
    budget_s: float = 2.0,
    cold: bool = False,
) -> Score:
    """Count, and time forward and backward through autograd against eager and torch.compile.

    Parameters are those of ``scoreboard.score``. A loaded library of a module needs ``reference``,
    whose parameters it then uses; one of a function does not.
    """
    captured = compiled.captured
    example = None if captured is None else example_leaves(captured)
    signature = compiled.signature
    training = compiled.manifest.training
    shapes = signature.inputs[: len(signature.inputs) - len(training.state)]
    chosen = {**example_sizes(signature, example), **(sizes or {})}
    result = counted(compiled.manifest, chosen)
    fn = reference or (None if captured is None else captured.eager)
    if compiled.executor is None or (fn is None and training.state):
        return result
    device = device_of(compiled)
    leaves = draw(replace(signature, inputs=shapes), InputSet("normal", chosen, 0), example)
    leaves = [t.to(device) for t in leaves]
    if training.state and reference is not None:
        compiled.executor.use_module(reference)
    result = _traced(compiled, result, leaves)
    names = () if captured is None else tuple(captured.kwargs)
    calls: dict[str, Callable[..., Any]] = {"ours": compiled}
    if fn is not None and baselines:
        calls["eager"] = fn
        say("torch.compile")
        calls.update(_torch_compile(fn))
    step = _Steps(compiled, leaves, names)
    steps = {name: step.of(call) for name, call in calls.items()}
    for name in [n for n in steps if n != "ours"]:
        try:
            steps[name](*step.values)
        except Exception as e:
            log.info("%s cannot run here: %s", name, (str(e).splitlines() or [repr(e)])[0])
            del steps[name]
    say("measuring " + ", ".join(steps))
    inputs = rotated(step.values) if cold else [tuple(step.values)]
    times = measure(steps, inputs, device=device, budget_s=budget_s)
    ours, eager = times["ours"], times.get("eager")
    return replace(
        result,
        latency_us=ours,
        eager_us=eager,
        torch_compile_us=times.get("torch.compile"),
        speedup=None if eager is None else eager.median / ours.median,
    )


class _Steps:
    """One training step of a function: outputs, then gradients of dense random numbers."""

    def __init__(self, compiled: Any, leaves: list[torch.Tensor], keywords: tuple[str, ...]):
        executor = compiled.executor
        self.keywords = keywords
        self.values = tuple(leaves)
        count = len(executor.training.state)
        self.wanted = [i - count for i in executor.training.grads if i >= count]
        self.own = [executor.state()[i] for i in executor.training.grads if i < count]
        self.tree = executor.signature
        with torch.no_grad():
            outputs = executor.apply([*executor.state(), *leaves])
        self.tangents = [torch.randn_like(outputs[i]) for i in executor.training.tangents]
        self.chosen = executor.training.tangents

    def of(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the flat inputs that runs ``fn`` and its gradient."""
        from tvmcap.base.signature import unflatten

        items = [i for i in self.tree.in_tree["items"] if i["kind"] != "dict" or not self.own]

        def step(*values: torch.Tensor) -> Any:
            with torch.enable_grad():
                own = [v.detach().requires_grad_(i in self.wanted) for i, v in enumerate(values)]
                args = unflatten({"kind": "tuple", "items": items}, own)
                count = len(args) - len(self.keywords)
                named = dict(zip(self.keywords, args[count:], strict=True))
                outputs = [
                    t
                    for t in tree_leaves(fn(*args[:count], **named))
                    if isinstance(t, torch.Tensor)
                ]
                return torch.autograd.grad(
                    [outputs[i] for i in self.chosen],
                    [*self.own, *(own[i] for i in self.wanted)],
                    self.tangents,
                    allow_unused=True,
                )

        return step


def _traced(compiled: Any, result: Score, leaves: list[torch.Tensor]) -> Score:
    """Run once under the executor's instruments: kernels launched and memory alive at once."""
    executor = compiled.executor
    first, second = executor.traces([*executor.state(), *leaves])
    training, sizes = compiled.manifest.training, result.sizes
    written = [
        sum(nbytes(o.dtype, o.shape, sizes) for o in entry.signature.outputs)
        for entry in (training.forward, training.backward)
    ]
    peak = max(
        first.intermediate_bytes + written[0],
        saved_bytes(training, sizes) + second.intermediate_bytes + written[1],
    )
    launched = len(first.kernels) + len(second.kernels)
    return replace(result, kernels_traced=launched, peak_bytes_measured=peak)


def _torch_compile(fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    return {"torch.compile": torch.compile(fn)}

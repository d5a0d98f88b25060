"""The backend of ``torch.compile(model, backend="tvmcap")``.

Dynamo hands over graphs; AOTAutograd makes forward and backward graphs of ATen operators of them;
each becomes a library of the compile cache. Weights stay inputs. What has no lowering stays with
PyTorch's kernels, part by part.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

from tvmcap.base import codegen
from tvmcap.base.config import FIELDS, Config, make_config
from tvmcap.base.errors import BuildError, CaptureError, ConfigError, ToolchainError
from tvmcap.capture import ir, partition, parts, recurrent
from tvmcap.capture.decompositions import for_inference, for_training
from tvmcap.capture.operators import operator_name
from tvmcap.capture.random import axes_in_memory, draw_first
from tvmcap.graph_library import compile_graph
from tvmcap.pipeline import check_disable
from tvmcap.runtime.graph_call import GraphCall

logger = logging.getLogger("tvmcap")

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "max-autotune": {"tune": 64},
    "max-autotune-no-cudagraphs": {"tune": 64},
}
"""What each ``mode`` sets; ``options`` go before it."""

_FIXED = {
    "dynamic": "torch.compile finds the dimensions that vary; use its dynamic= or "
    "torch._dynamo.mark_dynamic",
    "constants": "weights and arguments are never frozen here",
    "quantize": "build the trained model with tvmcap.build(..., quantize=...)",
    "calibration": "build the trained model with tvmcap.build(..., quantize=...)",
    "backward": "torch.compile finds out whether gradients are wanted",
    "verify": "compare with eager PyTorch, or verify the part with tvmcap.build",
}
"""Fields of Config that say nothing here, and what does."""

_told: set[str] = set()


def backend(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's; ``torch.compile`` calls this.

    Parameters
    ----------
    graph, inputs: what Dynamo captured.
    mode: "default" or "max-autotune", which tunes each graph with 64 trials before it runs.
    options: fields of ``Config``.

    Raises
    ------
    ConfigError: for an unknown mode or option, or one that has no meaning here.
    BuildError: where a compiler is missing (ToolchainError).
    """
    config = read_options(mode, options)
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    compiler = aot_autograd(**stages(config, training))
    on_gpu = any(t.device.type == "cuda" for t in tensors)
    # on a GPU attention stays with PyTorch's fused kernels, which have no lowering
    attention = contextlib.nullcontext() if on_gpu else sdpa_kernel(SDPBackend.MATH)
    with attention, recurrent.Layers():
        compiled: Callable[..., Any] = compiler(graph, inputs)
    return compiled


def stages(config: Config, training: bool) -> dict[str, Any]:
    """Return what AOTAutograd takes: the compiler of its graphs, the cut, the decompositions."""

    def cut(
        joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        pair = partition.partition(joint, num_fwd_outputs, config.memory_budget)
        pair.forward.meta[_OUTPUTS] = num_fwd_outputs
        pair.backward.meta[_OUTPUTS] = 0
        return pair.forward, pair.backward

    return {
        "fw_compiler": lambda graph, _: serve(graph, config),
        "bw_compiler": lambda graph, _: serve(graph, config),
        "partition_fn": cut,
        "decompositions": for_training() if training else for_inference(),
    }


def _forget() -> None:
    """Warn again of what stays with PyTorch; ``torch._dynamo.reset`` calls this."""
    _told.clear()


backend.reset = _forget  # type: ignore[attr-defined]

_OUTPUTS = "tvmcap.outputs"
"""Key of a graph's meta: how many of its outputs the caller sees, whose strides must be eager's."""


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Config:
    """Return the Config of a call of torch.compile; raises ConfigError."""
    if mode is not None and mode not in MODES:
        more = " (replay of CUDA graphs is not there)" if mode == "reduce-overhead" else ""
        raise ConfigError(f"mode={mode!r}: the modes are {', '.join(MODES)}{more}")
    for name in options or {}:
        if name in _FIXED:
            raise ConfigError(f"option {name!r} has no meaning under torch.compile: {_FIXED[name]}")
    config = make_config(**{**MODES[mode or "default"], **(options or {})})
    check_disable(config.disable)
    unfixed: dict[str, Any] = {name: FIELDS[name].default for name in _FIXED}
    return replace(config, **unfixed)


def serve(graph: fx.GraphModule, config: Config) -> Callable[..., Any]:
    """Compile what the back end serves of a graph; the rest stays with PyTorch's kernels."""
    seen = graph.meta.get(_OUTPUTS)
    orders = _orders(graph, seen)
    device = device_of(graph)
    if device is None:
        return _Call(graph, orders)
    config = replace(config, target=_target(config, device))
    draw_first(graph)
    known = ir.known_operators()
    refused: dict[str, str] = {}
    while True:
        found = parts.split(
            partition.copy(graph),
            device,
            known,
            lambda n: refused.get(n.meta[parts.NAME], ""),
            seen,
        )
        try:
            for name in found.served:
                part = getattr(found.graph, name)
                setattr(found.graph, name, _compile(part, config, found.left))
        except CaptureError as e:  # one node more for PyTorch, and once again
            refused[parts.origin(e.node).meta[parts.NAME]] = str(e)
            continue
        _tell(found.left)
        return _Call(found.graph, orders)


def _compile(part: fx.GraphModule, config: Config, left: dict[str, str]) -> Callable[..., Any]:
    """Compile one part; one that the passes cannot compile stays with PyTorch, which ``left`` says.

    Raises CaptureError for a node that cannot be translated, ToolchainError.
    """
    try:
        return _Part(compile_graph(part, config))
    except ToolchainError:
        raise
    except (CaptureError, BuildError) as e:
        if getattr(e, "node", None) is not None:
            raise
        names = dict.fromkeys(operator_name(n) for n in part.graph.nodes if _is_call(n))
        left[f"a part of {len(names)} operators ({', '.join(names)})"] = str(e)
        kept: Callable[..., Any] = part
        return kept


class _Part(torch.nn.Module):  # type: ignore[misc]
    """A compiled part in the place of the graph it was made of."""

    def __init__(self, call: GraphCall) -> None:
        super().__init__()
        self.call_ = call

    def forward(self, *values: Any) -> list[Any]:
        return self.call_(*values)


class _Call:
    """A graph as AOTAutograd calls it; what the caller sees has the strides that eager gives it."""

    def __init__(self, graph: fx.GraphModule, orders: Sequence[tuple[int, ...] | None]) -> None:
        self.graph = graph
        self._orders = [(i, order) for i, order in enumerate(orders) if order is not None]
        self._boxed_call = True  # AOTAutograd hands over a list, which is emptied to free memory

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        values = list(boxed)
        boxed.clear()
        results: Sequence[Any] = self.graph(*values)
        if self._orders:
            results = list(results)
            for i, order in self._orders:
                results[i] = parts.in_order(results[i], order)
        return results


def _orders(graph: fx.GraphModule, count: int | None) -> list[tuple[int, ...] | None]:
    """Say for each of the first ``count`` outputs how eager has its axes in memory.

    None for a dense one in the natural order, for an input of the graph, which comes back as it is,
    and for a view that PyTorch makes.
    """
    views = parts.last_views(graph, count)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    found: list[tuple[int, ...] | None] = []
    for node in output.args[0][:count]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        dense = not isinstance(value, torch.Tensor) or node.op == "placeholder" or node in views
        order = None if dense else axes_in_memory(value)
        natural = order is None or order == tuple(range(len(order)))
        found.append(None if natural else order)
    return found


def device_of(graph: fx.GraphModule) -> torch.device | None:
    """Return the device that the back end compiles for: a GPU's before the CPU; None for others."""
    values = (n.meta.get("val") for n in graph.graph.nodes)
    devices = dict.fromkeys(v.device for v in values if isinstance(v, torch.Tensor))
    return next((d for kind in ("cuda", "cpu") for d in devices if d.type == kind), None)


def _target(config: Config, device: torch.device) -> Any:
    """Return the target of a graph's device; raises ConfigError for one of another device."""
    kind = {"cuda": "cuda", "cpu": "llvm"}[device.type]
    if config.target is None:
        return kind
    found = codegen.make_target(config.target).kind.name
    if found != kind:
        raise ConfigError(
            f"target={config.target!r} is for {found}, but the tensors are on {device}; leave "
            "target out, or move the model"
        )
    return config.target


def _is_call(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _tell(left: Mapping[str, str]) -> None:
    """Warn, once each, of what stays with PyTorch."""
    for name, why in left.items():
        if name not in _told:
            _told.add(name)
            logger.warning("torch.compile: %s stays with PyTorch's own kernels: %s", name, why)

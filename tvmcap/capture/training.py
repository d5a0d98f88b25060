"""Capture with gradients: a forward and a backward module, and what a call does around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tvmcap.base.config import Config, Dim
from tvmcap.base.errors import CaptureError
from tvmcap.base.signature import DimSpec, Signature, TensorSpec
from tvmcap.base.training import DrawSpec, Entry, Saved, Training
from tvmcap.capture import arguments, autograd, graphs, partition, shapes
from tvmcap.capture.structure import describe, dtype_name
from tvmcap.capture.symbols import Symbols


@dataclass(frozen=True)
class TrainingCapture:
    """What capture with gradients found.

    Attributes
    ----------
    forward, backward: the modules and their calling conventions.
    training: what a call does around them.
    signature: the user's calling convention: arguments, then a dict of parameters and buffers by
        name where there are any.
    eager: the function in PyTorch, called as the user calls it; ``args`` and ``kwargs`` are the
        example.
    """

    forward: graphs.Imported
    backward: graphs.Imported
    training: Training
    signature: Signature
    eager: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def capture_training(
    fn: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, config: Config
) -> TrainingCapture:
    """Capture a function or module (in train or eval mode, as it stands) and its gradient.

    Parameters are those of ``capture.export.capture``. Parameters and buffers of a module are no
    constants: a call reads them. Raises CaptureError as that does, and for an exported program,
    which has lost what gradients need.
    """
    args, kwargs = arguments.checked(args, kwargs)
    if not callable(fn) or isinstance(fn, torch.export.ExportedProgram):
        raise CaptureError(
            f"backward=True needs the function or the nn.Module itself, got a {type(fn).__name__}"
        )
    call = arguments.freeze(fn, args or (), kwargs or {}, config.constants)
    leaves: list[tuple[str, torch.Tensor]] = []
    items = [describe(v, name, leaves) for name, v in zip(call.names, call.values, strict=True)]
    for item, is_required in zip(items, call.required, strict=True):
        if item["kind"] == "const" and is_required:
            item["required"] = True
    free = shapes.resolve(config.dynamic, call.names, leaves)
    state = autograd.state_of(fn)
    joint = autograd.trace_joint(call, leaves, free, state)
    count = joint.outputs + len(joint.updates)
    pair = partition.partition(joint.graph, count, config.memory_budget)
    _leave_out(pair.forward, count, joint.constants)
    symbols = _symbols(pair.forward, free, joint.state)
    dims = free.dims
    constants = joint.constants
    names = [n for n in joint.names if n not in _lifted(joint)]
    forward = graphs.read(pair.forward, names, dims, symbols, constants)
    back_names = [n.name for n in _placeholders(pair.backward) if n.name not in constants]
    backward = graphs.read(pair.backward, back_names, dims, symbols, constants)
    known = _known(pair.forward, free, joint)
    training = Training(
        forward=forward.entry,
        backward=backward.entry,
        state=tuple(state),
        updates=joint.updates,
        draws=tuple(_draw(d, known) for d in joint.draws),
        tangents=joint.tangents,
        grads=joint.grads,
        saved=_saved(pair.forward, count, known),
        memory_budget=config.memory_budget,
    )
    examples, named = call.examples()
    return TrainingCapture(
        forward,
        backward,
        training,
        _signature(call, items, leaves, joint, (forward.entry, backward.entry), free, state),
        call.eager if call.frozen else call.fn,
        examples,
        named,
    )


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _leave_out(forward: fx.GraphModule, count: int, constants: Mapping[str, Any]) -> None:
    """Ensures the forward graph saves no constant: the backward graph holds its own."""
    output = next(n for n in forward.graph.nodes if n.op == "output")
    results = output.args[0]
    saved = (n for n in results[count:] if n.name not in constants)
    output.args = ((*results[:count], *saved),)
    forward.recompile()


def _lifted(joint: autograd.Joint) -> set[str]:
    return {f"constant{i}" for i in range(len(joint.constants))}


def _symbols(graph: fx.GraphModule, free: shapes.Free, state: int) -> dict[str, str]:
    nodes = _placeholders(graph)
    return {
        str(nodes[state + leaf].meta["val"].shape[axis].node.expr): name
        for (leaf, axis), name in free.where.items()
    }


def _known(graph: fx.GraphModule, free: shapes.Free, joint: autograd.Joint) -> Symbols:
    values = [n.meta["val"] for n in _placeholders(graph)[joint.state :]]
    return Symbols(free, values, joint.names[joint.state :])


def _draw(draw: Any, symbols: Symbols) -> DrawSpec:
    shape = tuple(map(symbols.text, draw.value.shape))
    return DrawSpec(draw.operator, dtype_name(draw.like), shape, draw.order, draw.numbers)


def _saved(graph: fx.GraphModule, count: int, symbols: Symbols) -> tuple[Saved, ...]:
    output = next(n for n in graph.graph.nodes if n.op == "output")
    returned = output.args[0][:count]
    found = []
    for node in output.args[0][count:]:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            continue
        source = "input" if node.op == "placeholder" else "output" if node in returned else "own"
        shape = tuple(map(symbols.text, value.shape))
        found.append(Saved(node.name, dtype_name(value.dtype), shape, source))
    return tuple(found)


def _signature(
    call: arguments.BoundCall,
    items: list[Any],
    leaves: shapes.Leaves,
    joint: autograd.Joint,
    entries: tuple[Entry, Entry],
    free: shapes.Free,
    state: Mapping[str, torch.Tensor],
) -> Signature:
    """The user's calling convention; of it the forward entry knows the shapes."""
    entry = entries[0]
    by_name = {spec.name: spec for spec in entry.signature.inputs}
    inputs = [by_name[name] for name, _ in leaves] + [by_name[name] for name in state]
    names = call.names
    if state:
        label = "parameters"
        while label in names:
            label += "_"
        places = range(len(leaves), len(inputs))
        own = [{"kind": "leaf", "index": i} for i in places]
        items = [*items, {"kind": "dict", "keys": list(state), "items": own}]
        names = (*names, label)
    outputs = []
    for i, port in enumerate(entry.outputs[: joint.outputs]):
        spec = (
            entry.signature.inputs[entry.inputs[port.index].index]
            if port.kind == "input"
            else entry.signature.outputs[port.index]
        )
        outputs.append(replace(spec, name=f"out{i}"))
    return Signature(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        dims=tuple(_bounds(d, entries) for d in free.dims.values()),
        in_tree={"kind": "tuple", "items": items},
        out_tree=joint.out_tree,
        arg_names=tuple(names),
    )


def _bounds(dim: Dim, entries: tuple[Entry, Entry]) -> DimSpec:
    """Return the bounds within which both entries run."""
    least = [d.min for entry in entries for d in entry.signature.dims if d.name == dim.name]
    return DimSpec(dim.name, max(least, default=dim.min), dim.max)


__all__ = ["TensorSpec", "TrainingCapture", "capture_training"]

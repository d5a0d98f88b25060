"""Which values the forward graph saves for the backward one, and which that one computes again."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from tvmcap.base.errors import CaptureError
from tvmcap.capture import source
from tvmcap.capture.random import draw_first, draws, hide, restore

_aten = torch.ops.aten
_PRODUCTS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
)
_STEPS = 10
"""Budgets that are tried, as fractions of 1."""


@dataclass(frozen=True)
class Pair:
    """A partitioned joint graph.

    Attributes
    ----------
    forward: from the joint graph's inputs to its outputs, then what is saved.
    backward: from what is saved and the gradients of outputs to those of the inputs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule


def partition(graph: fx.GraphModule, outputs: int, memory_budget: float) -> Pair:
    """Cut a joint graph, of whose outputs the first ``outputs`` are the forward graph's.

    At ``memory_budget`` 1 every operand of a product of the backward graph is saved, and else
    what is cheap to compute again is not; below 1 less is saved than that takes, down to nothing
    but the inputs at 0. The partitioner's own cuts for less budget may need more memory, as what
    is computed again in one go lives at once, or save more. So of the cuts in steps of a tenth,
    from 1 down to this budget, each is taken that needs less memory than the last one taken and
    saves no more: less budget never means more of either. What is drawn is always saved, as
    drawing again gives other numbers.
    """
    best, needed, saved = None, 0, 0
    for step in range(_STEPS, -1, -1):
        if step / _STEPS < memory_budget and best is not None:
            break
        pair = _cut(graph, outputs, step / _STEPS)
        peak, kept = peak_bytes(pair, outputs), saved_bytes(pair, outputs)
        if best is None or (peak < needed and kept <= saved):
            best, needed, saved = pair, peak, kept
    assert best is not None
    return best


def _cut(graph: fx.GraphModule, outputs: int, budget: float) -> Pair:
    config: Any = importlib.import_module("torch._functorch.config")
    whole = copy(graph)
    draw_first(whole)
    drawn = _drawn(whole)
    joint, hidden = hide(copy(whole), drawn)
    if budget == 1:
        _save_operands(joint)
    try:
        with config.patch(activation_memory_budget=budget):
            forward, backward = min_cut_rematerialization_partition(
                joint, None, num_fwd_outputs=outputs
            )
    except Exception as e:
        raise CaptureError(
            f"PyTorch's partitioner failed at memory_budget={budget}: {type(e).__name__}: "
            f"{source.first_line(e)}. Another memory_budget may do"
        ) from e
    pair = _save_bases(forward, backward, outputs)
    return Pair(restore(pair.forward, whole, drawn, hidden), pair.backward)


def copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph; what its nodes know of their values is shared."""
    return fx.GraphModule(graph, _copy(graph.graph))


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, values)
    new.output(output)
    for node, twin in values.items():
        twin.meta = dict(node.meta)
    return new


def _save_operands(graph: fx.GraphModule) -> None:
    """Mark what products of the backward graph read: computing it again would be a kernel.

    What the user's own checkpoints are to compute again stays so.
    """
    policy = CheckpointPolicy.MUST_SAVE
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    forward = _forward_nodes(graph)
    for node in graph.graph.nodes:
        if node.target not in _PRODUCTS or node in forward:
            continue
        for operand in node.all_input_nodes:
            base = _unviewed(operand)
            marked = base.meta.get("recompute") in again
            if base in forward and base.op == "call_function" and not marked:
                base.meta["recompute"] = policy


def _forward_nodes(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on no gradient."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            inside = "tangents" not in str(node.target)
        else:
            inside = all(n in found for n in node.all_input_nodes)
        if inside and node.op != "output":
            found.add(node)
    return found


def _drawn(graph: fx.GraphModule) -> list[fx.Node]:
    """List what the forward part of a joint graph draws."""
    forward = _forward_nodes(graph)
    theirs = ("partitioner_tag", "is_backward")  # a gradient that draws numbers of its own
    return [
        n for n in graph.graph.nodes if n in forward and draws(n) and theirs not in n.meta.items()
    ]


VIEWS = (
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.expand.default,
    _aten.detach.default,
    _aten.alias.default,
)
"""Operators that only look at memory in another way."""


def _unviewed(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = node.args[0]
    return node


_SIZES = (
    _aten.sym_size.int,
    operator.mul,
    operator.add,
    operator.sub,
    operator.floordiv,
    operator.mod,
)


def _save_bases(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Pair:
    """Save what memory holds in the place of views of it, which the backward graph makes itself.

    Without this a saved transpose of a weight would be a copy. The order is AOTAutograd's: the
    forward graph returns tensors before sizes, the backward one takes sizes before tensors.
    """
    output = next(n for n in forward.graph.nodes if n.op == "output")
    source_of = {n.name: n for n in output.args[0][outputs:] if isinstance(n, fx.Node)}
    entering = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    tangents = [n for n in entering.values() if n.name not in source_of]
    for name in [n for n in entering if n in source_of and source_of[n].target in VIEWS]:
        if not _is_cheap(source_of[name], tuple(source_of.values())):
            continue
        old = entering.pop(name)
        with backward.graph.inserting_before(tangents[0]):
            new = _rebuild(source_of[name], backward.graph, entering, source_of)
        old.replace_all_uses_with(new)
        backward.graph.erase_node(old)
    saved = [source_of[n.name] for n in entering.values() if n.name in source_of]
    tensors = [n for n in saved if isinstance(n.meta["val"], torch.Tensor)]
    sizes = [n for n in saved if n not in tensors]
    output.args = ((*output.args[0][:outputs], *tensors, *sizes),)
    _order_inputs(backward.graph, [entering[n.name] for n in (*sizes, *tensors)] + tangents)
    for graph in (forward, backward):
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
    return Pair(forward, backward)


def _is_cheap(node: fx.Node, saved: tuple[fx.Node, ...]) -> bool:
    """Whether a view can be made again of inputs, and of what is saved or computed anyway."""
    if node.op == "placeholder" or node.target not in (*VIEWS, *_SIZES):
        return (
            node.op == "placeholder"
            or (node in saved)
            or isinstance(node.meta.get("val"), torch.Tensor)
        )
    return all(_is_cheap(n, saved) for n in node.all_input_nodes)


def _rebuild(
    node: fx.Node, graph: fx.Graph, entering: dict[str, fx.Node], sources: dict[str, fx.Node]
) -> fx.Node:
    """Write a view of the forward graph into the backward one; its base becomes an input of it."""
    if node.name in entering:
        return entering[node.name]
    if node.target in (*VIEWS, *_SIZES):
        return graph.node_copy(node, lambda n: _rebuild(n, graph, entering, sources))
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        new = graph.placeholder(node.name)
    new.meta = dict(node.meta)
    entering[node.name], sources[node.name] = new, node
    return new


def _order_inputs(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    first = next(iter(graph.nodes))
    for node in nodes:
        if node is not first:
            first.prepend(node)
        else:
            first = first.next


def peak_bytes(pair: Pair, outputs: int) -> int:
    """Estimate the most memory that a forward and a backward call hold at once, inputs apart.

    What is saved lives through both; every other value until its last use. Elementwise values
    count, though most of them never reach memory.
    """
    returned, saved = _returned(pair, outputs)
    kept = sum(map(_bytes, saved))
    forward = _live(pair.forward, kept=(*returned, *saved))
    return max(forward, kept + _live(pair.backward, kept=()))


def saved_bytes(pair: Pair, outputs: int) -> int:
    """Bytes that the forward graph keeps for the backward one, inputs and outputs apart."""
    returned, saved = _returned(pair, outputs)
    return sum(_bytes(node) for node in saved if node not in returned)


def _returned(pair: Pair, outputs: int) -> tuple[list[Any], list[fx.Node]]:
    """Part what the forward graph returns into its outputs and what it saves, inputs apart."""
    results = next(n for n in pair.forward.graph.nodes if n.op == "output").args[0]
    saved = [n for n in dict.fromkeys(results[outputs:]) if isinstance(n, fx.Node)]
    return list(results[:outputs]), [n for n in saved if n.op != "placeholder"]


def _live(graph: fx.GraphModule, kept: Iterable[Any]) -> int:
    nodes = list(graph.graph.nodes)
    last = {n: i for i, node in enumerate(nodes) for n in node.all_input_nodes}
    last.update({n: len(nodes) for n in kept if isinstance(n, fx.Node)})
    ends: dict[int, list[fx.Node]] = {}
    for node, at in last.items():
        ends.setdefault(at, []).append(node)
    now = peak = 0
    for i, node in enumerate(nodes):
        if node.op == "call_function" and node.target not in VIEWS:
            now += _bytes(node)
        peak = max(peak, now)
        done = (n for n in ends.get(i, ()) if n.op == "call_function" and n.target not in VIEWS)
        now -= sum(map(_bytes, done))
    return peak


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for size in value.shape:
        count *= int(size if isinstance(size, int) else size.node.hint or 1)
    return count * int(value.dtype.itemsize)

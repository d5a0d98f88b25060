"""A graph in parts: what the back end serves, and between it what stays with PyTorch's kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils._pytree import tree_leaves

from tvmcap.capture import source
from tvmcap.capture.operators import is_known, operator_name
from tvmcap.capture.partition import VIEWS
from tvmcap.capture.random import axes_in_memory, is_random
from tvmcap.capture.size_nodes import Sizes, told_symbols

NAME = "tvmcap.node"
"""Key of a node's meta: its name in the whole graph, which its copies in parts keep."""
_PREFIX = "part"


@dataclass(frozen=True)
class Parts:
    """A graph whose parts that the back end serves are modules of it.

    Attributes
    ----------
    graph: calls the parts, and PyTorch's kernels between them.
    served: names of the parts, attributes of ``graph``; none where nothing is served.
    left: the operators left to PyTorch for want of a lowering, by name, with the reason.
    """

    graph: fx.GraphModule
    served: tuple[str, ...]
    left: dict[str, str] = field(default_factory=dict)


def split(
    graph: fx.GraphModule,
    device: torch.device,
    known: Collection[str],
    refused: Callable[[fx.Node], str],
    seen: int | None = 0,
) -> Parts:
    """Part a functional graph; it is rewritten in place.

    Parameters
    ----------
    graph: its nodes know their values (``meta["val"]``).
    device: of the tensors that the back end computes.
    known: bare names of the operators that have a converter.
    refused: says why a node is not served though its operator is known, or "".
    seen: how many outputs the caller sees, None for all: views among them stay views.
    """
    left: dict[str, str] = {}
    served: dict[fx.Node, bool] = {}
    views = last_views(graph, seen)
    _keep_order(graph)
    for node in graph.graph.nodes:
        node.meta.setdefault(NAME, node.name)
        if node.op != "call_function":
            continue
        why = _unserved(node, device, known, served) or refused(node)
        served[node] = not why and node not in views
        if why and not is_random(node) and isinstance(node.target, torch._ops.OperatorBase):
            line = source.of_node(node)
            left.setdefault(operator_name(node), why + (f" (at {line})" if line else ""))
    support = create_op_support(lambda _, node: served.get(node, False))
    partitioner = CapabilityBasedPartitioner(
        graph, support, allows_single_node_partition=True, non_compute_ops=()
    )
    found = [p.nodes for p in partitioner.propose_partitions() if any(map(_computes, p.nodes))]
    parted = fuse_by_partitions(graph, found, prefix=_PREFIX, always_return_tuple=True)
    _free_order(parted)
    _lay_out(parted)
    _pass_sizes(parted)
    names = tuple(n.target for n in parted.graph.nodes if n.op == "call_module")
    return Parts(parted, names, left)


_AFTER = "after"
"""Keyword of a random operator while a graph is parted: the one that draws before it."""


def _keep_order(graph: fx.GraphModule) -> None:
    """Let each random operator wait for the one before it: the generator's numbers are eager's."""
    for before, after in pairwise(n for n in graph.graph.nodes if is_random(n)):
        after.update_kwarg(_AFTER, before)


def _free_order(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if _AFTER in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != _AFTER}


def _lay_out(parted: fx.GraphModule) -> None:
    """Give PyTorch's kernels what a part computes with its axes in memory as in eager.

    Parts compute dense tensors in the natural order; random numbers and strides of views depend
    on it.
    """
    for node in list(parted.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or origin(node).op != "call_module":
            continue
        order = axes_in_memory(value)
        readers = [n for n in node.users if n.op == "call_function"]
        if order == tuple(range(len(order))) or not readers:
            continue
        with parted.graph.inserting_after(node):
            new = parted.graph.call_function(in_order, (node, order))
        new.meta["val"] = value
        for reader in readers:
            reader.replace_input_with(node, new)


def in_order(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return ``x`` dense in memory, with its axes from the largest stride to the smallest."""
    back = [order.index(axis) for axis in range(len(order))]
    found: torch.Tensor = x.permute(*order).contiguous().permute(back)
    return found


_LOOKS = (*VIEWS, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int)


def last_views(graph: fx.GraphModule, seen: int | None) -> set[fx.Node]:
    """Collect the views that nothing but the caller reads: PyTorch makes them, without a copy."""
    output = graph.graph.output_node()
    shown = {n for n in output.args[0][:seen] if isinstance(n, fx.Node)}
    found: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        readers = set(node.users) - found
        if node.target in _LOOKS and readers <= {output} and (node in shown or not readers):
            found.add(node)
    return found


def origin(node: fx.Node) -> fx.Node:
    """Return the operator that computes what a node picks out of several results."""
    while node.target is operator.getitem:
        node = node.args[0]
    return node


def _unserved(
    node: fx.Node, device: torch.device, known: Collection[str], served: dict[fx.Node, bool]
) -> str:
    """Say why the back end cannot compute a node; "" where it can."""
    value = node.meta.get("val")
    if node.target is operator.getitem:
        source = node.args[0]
        is_served = isinstance(source, fx.Node) and served.get(source, False)
        return "" if is_served else "part of a result that PyTorch computes"
    if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
        return "" if not free_unbacked_symbols(value) else "a number out of a tensor's values"
    if is_random(node):
        return "PyTorch's generator draws it"
    if not is_known(node, known):
        return "it has no lowering"
    for tensor in _tensors(node):
        if tensor.device != device:
            return f"a tensor on {tensor.device}, while the others are on {device}"
        if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
            return f"a tensor of {tensor.dtype}, {tensor.layout}"
        if free_unbacked_symbols(tensor):
            return "a size out of a tensor's values"
    return ""


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    return (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))


def _computes(node: fx.Node) -> bool:
    """Whether a node is more than another look at memory or a size."""
    looks = node.target in (*VIEWS, operator.getitem, torch.ops.aten.empty.memory_format)
    return isinstance(node.meta.get("val"), torch.Tensor | tuple | list) and not looks


def _pass_sizes(parted: fx.GraphModule) -> None:
    """Give each part, as an input, every symbol that no tensor of its inputs has as a dimension."""
    sizes = Sizes(parted.graph)
    for call in [n for n in parted.graph.nodes if n.op == "call_module"]:
        part = getattr(parted, call.target)
        inputs = [n for n in part.graph.nodes if n.op == "placeholder"]
        told = {symbol for n in inputs for symbol, _ in told_symbols(n.meta.get("val"))}
        for symbol in sorted(_symbols(part) - told, key=str):
            size = sizes.node(symbol)
            if size is None:
                continue
            with part.graph.inserting_before(next(iter(part.graph.nodes))):
                new = part.graph.placeholder(str(symbol))
            new.meta["val"] = size.meta["val"]
            call.args = (size, *call.args)
        part.recompile()
    parted.recompile()


def _symbols(graph: fx.GraphModule) -> set[Any]:
    """Collect the symbols of all sizes of a graph."""
    found: set[Any] = set()
    for node in graph.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
    return found

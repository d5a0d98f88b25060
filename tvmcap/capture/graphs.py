"""From an FX graph of ATen operators to a Relax module with a calling convention.

The graph may be one that AOTAutograd made: inputs are tensors and sizes, outputs are tensors, its
own inputs, sizes and None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm
from torch import fx

from tvmcap.base.config import Dim
from tvmcap.base.errors import CaptureError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.base.training import Entry, Port
from tvmcap.capture import flattening, ir, operators, simplify
from tvmcap.capture.shapes import Free
from tvmcap.capture.structure import dtype_name
from tvmcap.capture.symbols import Symbols


@dataclass(frozen=True)
class Imported:
    """What was read: ``main`` of ``mod`` computes what the entry's signature says."""

    mod: tvm.IRModule
    entry: Entry


@dataclass(frozen=True)
class Layout:
    """How a graph's inputs and outputs become an entry's.

    Attributes
    ----------
    labels, values: names and descriptions of the entry's inputs; those past ``nodes`` only tell a
        size.
    nodes: the graph's inputs that are tensors of the entry.
    results: the distinct tensors that the entry computes.
    """

    entry: Entry
    labels: tuple[str, ...]
    values: tuple[torch.Tensor, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    symbols: Symbols


def read(
    graph: fx.GraphModule,
    names: Sequence[str],
    dims: Mapping[str, Dim],
    symbols: Mapping[str, str],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> Imported:
    """Import a graph, which it may simplify, whose nodes know their values (``meta["val"]``).

    Parameters
    ----------
    names: one name an input of the graph.
    dims: the bounds of the dimensions, by name.
    symbols: the dimensions' names by torch's symbols; another symbol keeps torch's name.
    constants: tensors that stand for inputs of the graph, by the name of its placeholder.

    Raises CaptureError (UnsupportedOperatorError) for what cannot be imported.
    """
    simplify.sums(graph.graph)
    flattening.flatten(graph.graph)
    operators.check_supported(graph.graph, ir.known_operators())
    laid = lay_out(graph, names, dims, symbols, constants)
    inputs = list(zip(laid.labels, laid.nodes, strict=False))
    count = len(laid.nodes)
    unread = dict(zip(laid.labels[count:], laid.values[count:], strict=True))
    mod = ir.import_fx(
        graph.graph, inputs, unread, constants or {}, laid.symbols, list(laid.results)
    )
    signature = replace(laid.entry.signature, dims=laid.symbols.dims())
    return Imported(mod, replace(laid.entry, signature=signature))


def lay_out(
    graph: fx.GraphModule,
    names: Sequence[str],
    dims: Mapping[str, Dim],
    symbols: Mapping[str, str],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> Layout:
    """Find the calling convention of a graph without importing it; parameters as of ``read``."""
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
    nodes = [n for n in nodes if n.name not in (constants or {})]
    plain = [(name, n) for name, n in zip(names, nodes, strict=True) if _is_tensor(n)]
    values = [n.meta["val"] for _, n in plain]
    sized = _untold(nodes, values)
    values += [torch.empty((size,), dtype=torch.uint8, device="meta") for size in sized]
    labels = [*(name for name, _ in plain), *(f"size{i}" for i in range(len(sized)))]
    free = _free(values, dims, symbols)
    known = Symbols(free, values, labels)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    results, ports = _outputs(output, nodes, known)
    if not results:
        raise CaptureError("the graph computes no tensor")
    signature = Signature(
        inputs=tuple(_spec(n, v, known) for n, v in zip(labels, values, strict=True)),
        outputs=tuple(_spec(f"out{i}", n.meta["val"], known) for i, n in enumerate(results)),
        dims=known.dims(),
        in_tree=_tuple_tree(len(labels)),
        out_tree=_tuple_tree(len(results)),
        arg_names=tuple(labels),
    )
    places = {node: i for i, (_, node) in enumerate(plain)}
    taken = [
        Port("tensor", places[n]) if n in places else _number(n.meta["val"], known) for n in nodes
    ]
    taken += [Port("sized", len(plain) + i, known.text(s)) for i, s in enumerate(sized)]
    entry = Entry(signature, tuple(taken), ports)
    own = tuple(n for _, n in plain)
    return Layout(entry, tuple(labels), tuple(values), own, tuple(results), known)


def _number(value: Any, symbols: Symbols) -> Port:
    whole = isinstance(value, int | torch.SymInt)
    return Port("size", size=symbols.text(value)) if whole else Port("number")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _untold(nodes: Sequence[fx.Node], values: Sequence[torch.Tensor]) -> list[Any]:
    """Sizes among the inputs that no tensor has as a dimension of its own."""
    told = {
        s.node.expr
        for v in values
        for s in v.shape
        if isinstance(s, torch.SymInt) and s.node.expr.is_symbol
    }
    found: dict[Any, Any] = {}
    for node in nodes:
        size = node.meta.get("val")
        if not isinstance(size, torch.SymInt) or not size.node.expr.is_symbol:
            continue
        if size.node.expr not in told:
            found.setdefault(size.node.expr, size)
    return list(found.values())


def _free(
    values: Sequence[torch.Tensor], dims: Mapping[str, Dim], symbols: Mapping[str, str]
) -> Free:
    where, used = {}, {}
    for leaf, value in enumerate(values):
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                symbol = str(size.node.expr)
                name = symbols.get(symbol, symbol)
                where[leaf, axis] = name
                used[name] = dims.get(name, Dim(name))
    return Free(used, where)


def _outputs(
    output: fx.Node, inputs: Sequence[fx.Node], symbols: Symbols
) -> tuple[list[fx.Node], tuple[Port, ...]]:
    """Return the distinct tensors to compute, and what stands at each place of the output.

    A graph that only hands inputs on computes copies of them: a library has at least one result.
    """
    only_inputs = all(node is None or node in inputs for node in output.args[0])
    results: dict[fx.Node, int] = {}
    ports = []
    for node in output.args[0]:
        value = (
            None if node is None else node.meta.get("val") if isinstance(node, fx.Node) else node
        )
        if node is None:
            ports.append(Port("none"))
        elif not isinstance(value, torch.Tensor):
            ports.append(Port("size", size=symbols.text(value)))
        elif node in inputs and not only_inputs:
            ports.append(Port("input", list(inputs).index(node)))
        else:
            ports.append(Port("tensor", results.setdefault(node, len(results))))
    return list(results), tuple(ports)


def _spec(name: str, value: torch.Tensor, symbols: Symbols) -> TensorSpec:
    return TensorSpec(name, dtype_name(value.dtype), tuple(map(symbols.text, value.shape)))


def _tuple_tree(count: int) -> dict[str, Any]:
    return {"kind": "tuple", "items": [{"kind": "leaf", "index": i} for i in range(count)]}

"""Elementwise work on matrices where products are on matrices: views out of the way of fusion.

AOTAutograd writes a linear layer of a [B, T, K] tensor as a view to [B * T, K], a product and a
view back. Elementwise work behind it would find the view between the product and itself; moved
before the view back, it is part of the product's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_ELEMENTWISE = (_aten._to_copy.default, _aten.clone.default)
_ROW_SUMS = (_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default)


def flatten(graph: fx.Graph) -> None:
    """Write elementwise and row-wise work around views of matrices on the matrices themselves."""
    for node in list(graph.nodes):
        _sum_rows(graph, node)
    for node in list(graph.nodes):
        matrix = next((m for m in map(_matrix, _tensors(node)) if m is not None), None)
        if _is_elementwise(node) and matrix is not None:
            view = next(n for n in _tensors(node) if _matrix(n) is not None)
            new = _on_rows(graph, node, matrix.meta["val"].shape[0], before=node)
            if new is not None:
                shape = [*list(view.args[1])[:-1], node.meta["val"].shape[-1]]
                back = _view(graph, new, shape, node.meta["val"], before=node)
                node.replace_all_uses_with(back)
                graph.erase_node(node)
        else:
            _cancel(graph, node)
    for node in reversed(list(graph.nodes)):
        source = node.args[0] if node.target in _VIEWS else None
        if not isinstance(source, fx.Node) or len(source.users) != 1:
            continue
        if _parts_rows(node.meta["val"], source.meta["val"]) and _is_elementwise(source):
            value = node.meta["val"]
            new = _on_rows(graph, source, value.shape[0], before=node)
            if new is not None:
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                graph.erase_node(source)
    for node in list(graph.nodes):
        _cancel(graph, node)
    graph.eliminate_dead_code()


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each row of a node's result follows from the same row of its operands."""
    target = node.target
    if target in _ROW_SUMS:
        x, *rest = node.args
        dims, *rest = rest or [()]
        if not isinstance(x, fx.Node) or not isinstance(dims, list | tuple):
            return False
        last = x.meta["val"].dim() - 1
        return [d % (last + 1) for d in dims] == [last] and bool(rest and rest[0])
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format):
        return False
    pointwise = torch.Tag.pointwise in target.tags or target in _ELEMENTWISE
    return pointwise and isinstance(node.meta.get("val"), torch.Tensor)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _matrix(node: fx.Node) -> fx.Node | None:
    """Return the matrix that a node of more dimensions is a view of, rows parted; else None."""
    source = node.args[0] if node.target in _VIEWS else None
    if not isinstance(source, fx.Node):
        return None
    inner, outer = source.meta["val"], node.meta["val"]
    return source if _parts_rows(inner, outer) else None


def _parts_rows(matrix: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the elements of a matrix, whose rows are parted by further dimensions.

    Symbolic columns do not count: to compare them would bind them.
    """
    if matrix.dim() != 2 or tensor.dim() < 3:
        return False
    columns = matrix.shape[1], tensor.shape[-1]
    return all(isinstance(n, int) for n in columns) and columns[0] == columns[1]


def _on_rows(graph: fx.Graph, node: fx.Node, rows: Any, before: fx.Node) -> fx.Node | None:
    """Write an elementwise node on matrices of ``rows``; None where an operand has no such form."""
    value = node.meta["val"]
    for operand in _tensors(node):
        own = operand.meta["val"]
        if own.dim() > 1 and (own.dim() != value.dim() or own.shape[:-1] != value.shape[:-1]):
            return None
        if own.dim() == 1 and node.target in _ROW_SUMS:
            return None

    def on_rows(operand: fx.Node) -> fx.Node:
        own = operand.meta.get("val")
        if not isinstance(own, torch.Tensor) or own.dim() < 2:
            return operand
        matrix = _matrix(operand)
        if matrix is not None:
            return matrix
        flat = own.reshape(rows, own.shape[-1])
        return _view(graph, operand, [-1, own.shape[-1]], flat, before)

    args, kwargs = fx.map_arg((node.args, node.kwargs), on_rows)
    if node.target in _ROW_SUMS:
        args = (args[0], [1], *args[2:])
    with graph.inserting_before(before):
        new = graph.call_function(node.target, args, kwargs)
    new.meta = {**node.meta, "val": value.reshape(rows, value.shape[-1])}
    return new


def _view(graph: fx.Graph, node: fx.Node, shape: list[Any], value: Any, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        new = graph.call_function(_aten.view.default, (node, shape))
    new.meta["val"] = value
    return new


def _cancel(graph: fx.Graph, node: fx.Node) -> None:
    """Take off a view that gives a viewed tensor its own shape again."""
    source = node.args[0] if node.target in _VIEWS else None
    if not isinstance(source, fx.Node) or source.target not in _VIEWS:
        return
    first = source.args[0]
    assert isinstance(first, fx.Node)
    inner, outer = first.meta["val"], node.meta["val"]
    if inner.dim() == outer.dim() and all(
        a == b for a, b in zip(inner.shape, outer.shape, strict=True)
    ):
        node.replace_all_uses_with(first)
        graph.erase_node(node)


def _sum_rows(graph: fx.Graph, node: fx.Node) -> None:
    """Write a sum over all dimensions but the last as one over the rows of a matrix."""
    if node.target is not _aten.sum.dim_IntList:
        return
    x, dims, *rest = node.args
    if not isinstance(x, fx.Node) or (rest and rest[0]):
        return
    value = x.meta["val"]
    if value.dim() < 3 or sorted(d % value.dim() for d in dims) != list(range(value.dim() - 1)):
        return
    rows = value.numel() // value.shape[-1]
    flat = _view(graph, x, [-1, value.shape[-1]], value.reshape(rows, value.shape[-1]), node)
    node.args = (flat, [0], *rest)

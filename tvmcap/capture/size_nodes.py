"""Nodes of a graph that compute sizes out of its inputs alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


class Sizes:
    """The symbols that the inputs of a graph tell, and nodes that compute sizes of them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self._home: dict[Any, tuple[fx.Node, int | None]] = {}
        for node in inputs:
            for symbol, axis in told_symbols(node.meta.get("val")):
                if axis is None or symbol not in self._home:
                    self._home[symbol] = node, axis
        self._first = next(n for n in graph.nodes if n.op != "placeholder")
        self._made: dict[Any, fx.Node] = {}

    def node(self, symbol: Any) -> fx.Node | None:
        """Return a node that gives a symbol, an input or a new one; None where no input tells."""
        if symbol not in self._made and symbol in self._home:
            source, axis = self._home[symbol]
            self._made[symbol] = source
            if axis is not None:
                with self.graph.inserting_before(self._first):
                    new = self.graph.call_function(torch.ops.aten.sym_size.int, (source, axis))
                new.meta["val"] = source.meta["val"].shape[axis]
                self._made[symbol] = new
        return self._made.get(symbol)

    def argument(self, size: Any) -> Any:
        """Return a size as an argument of a node: an int, or a node that computes it.

        None for what is more than sums and products of symbols and whole numbers.
        """
        if isinstance(size, int):
            return size
        expr = size.node.expr
        found = self._of(expr)
        if isinstance(found, fx.Node):
            found.meta.setdefault("val", size)
        return found

    def _of(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_symbol:
            return self.node(expr)
        combine = {"Add": operator.add, "Mul": operator.mul}.get(type(expr).__name__)
        parts = [self._of(part) for part in expr.args] if combine else [None]
        if any(part is None for part in parts):
            return None
        assert combine is not None
        total = parts[0]
        for i, part in enumerate(parts[1:], 2):
            with self.graph.inserting_before(self._first):
                total = self.graph.call_function(combine, (total, part))
            total.meta["val"] = _value(expr.func(*expr.args[:i]), parts)
        return total


def _value(expr: Any, parts: list[Any]) -> Any:
    """Return a size of the expression ``expr``; one of ``parts`` is a node with a symbolic size."""
    known = next(p.meta["val"] for p in parts if isinstance(p, fx.Node))
    return known.node.shape_env.create_symintnode(expr, hint=None)


def told_symbols(value: Any) -> list[tuple[Any, int | None]]:
    """List the symbols that an input is, or that stand among its dimensions, and where."""
    if isinstance(value, torch.SymInt):
        return [(value.node.expr, None)] if value.node.expr.is_symbol else []
    if not isinstance(value, torch.Tensor):
        return []
    return [
        (size.node.expr, axis)
        for axis, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    ]

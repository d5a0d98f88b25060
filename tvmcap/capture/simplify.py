"""Rewriting what AOTAutograd writes in a roundabout way."""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten


def sums(graph: fx.Graph) -> None:
    """Write a sum that keeps its dimensions, and a view that drops them, as a sum that drops them.

    A bias gradient is written so; the view would stand between the sum and its cast.
    """
    for node in list(graph.nodes):
        if node.target not in (_aten.view.default, _aten.reshape.default):
            continue
        total = node.args[0]
        if not isinstance(total, fx.Node) or total.target is not _aten.sum.dim_IntList:
            continue
        x, dims, *rest = total.args
        if not (rest and rest[0]) or len(total.users) != 1 or not isinstance(x, fx.Node):
            continue
        shape = x.meta["val"].shape
        dropped = {d % len(shape) for d in dims}
        kept = [size for axis, size in enumerate(shape) if axis not in dropped]
        if len(kept) == len(node.meta["val"].shape):
            with graph.inserting_before(node):
                new = graph.call_function(
                    _aten.sum.dim_IntList, (x, sorted(dropped), False), dict(total.kwargs)
                )
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            graph.erase_node(total)

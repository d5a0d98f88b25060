"""Random numbers: drawn by PyTorch's generator before a call, and never again in the backward.

So a library gives what eager gives under the same seed, and the backward graph sees the very mask
that the forward one used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tvmcap.base.errors import CaptureError
from tvmcap.base.training import DRAWS
from tvmcap.capture import source

_aten = torch.ops.aten
_MADE = {f"aten.{name}": name for name in DRAWS}


@dataclass(frozen=True)
class Draw:
    """A random tensor.

    Attributes
    ----------
    name: of the graph's input that takes it.
    operator: a key of ``base.training.DRAWS``.
    value: describes the tensor: shape, dtype.
    like: dtype of the tensor in whose place it is drawn: generators go by it.
    order: its axes from the largest stride to the smallest, as eager has it in memory.
    numbers: the operator's further arguments.
    """

    name: str
    operator: str
    value: Any
    like: torch.dtype
    order: tuple[int, ...]
    numbers: tuple[float, ...]


def lift_draws(graph: fx.GraphModule, mode: FakeTensorMode) -> tuple[Draw, ...]:
    """Turn the random operators of a joint graph into inputs, in the order of the graph.

    Raises CaptureError for one whose distribution depends on the values of tensors.
    """
    draws: list[Draw] = []
    for node in list(graph.graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded not in target.tags:
            continue
        name = f"random{len(draws)}"
        if target is _aten.native_dropout.default:
            draw = _lift_dropout(graph, node, name, mode)
        else:
            draw = _lift(graph, node, name)
        if draw is not None:
            draws.append(draw)
    return tuple(draws)


def add_input(graph: fx.GraphModule, value: Any) -> fx.Node:
    """Append an input to the forward part of a joint graph; ``value`` describes it."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    primals = [n for n in placeholders if "tangents" not in str(n.target)]
    with graph.graph.inserting_after(primals[-1]):
        node = graph.graph.placeholder(f"primals_{len(primals) + 1}")
    node.meta["val"] = value
    return node


def _lift(graph: fx.GraphModule, node: fx.Node, name: str) -> Draw:
    operator = _MADE.get(str(node.target))
    numbers = [a for a in node.args[1:] if not isinstance(a, fx.Node)]
    if operator is None or any(isinstance(a, fx.Node) for a in node.args[1:]):
        raise CaptureError(
            f"{node.target} draws random numbers whose distribution is not fixed, at "
            f"{source.of_node(node) or 'an unknown line'}. Draw them outside and pass them as an "
            "argument"
        )
    value = node.meta["val"]
    new = add_input(graph, value)
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
    first = node.args[0] if node.args else None
    like = first.meta["val"] if isinstance(first, fx.Node) else value
    return Draw(name, operator, value, like.dtype, _order(value), tuple(map(float, numbers)))


def _lift_dropout(
    graph: fx.GraphModule, node: fx.Node, name: str, mode: FakeTensorMode
) -> Draw | None:
    """Write ``native_dropout(x, p)`` as ``x * mask * (1 / (1 - p))`` with a mask that is drawn."""
    x, p, train = node.args
    assert isinstance(x, fx.Node) and isinstance(p, float | int)
    source_value = x.meta["val"]
    mask_value = node.meta["val"][1]
    draw = None
    if train and 0 < p < 1:
        mask = add_input(graph, mask_value)
        draw = Draw(
            name, "dropout", mask_value, source_value.dtype, _order(source_value), (float(p),)
        )
        with graph.graph.inserting_before(node):
            kept = _emit(graph, mode, _aten._to_copy.default, mask, dtype=source_value.dtype)
            scaled = _emit(graph, mode, _aten.mul.Tensor, kept, 1.0 / (1.0 - p))
            result = _emit(graph, mode, _aten.mul.Tensor, x, scaled)
    else:
        with graph.graph.inserting_before(node):
            result = _emit(graph, mode, _aten.mul.Tensor, x, float(not train or p == 0))
            mask = _emit(graph, mode, _aten.ne.Scalar, result, float("nan"))
    for user in list(node.users):
        user.replace_all_uses_with((result, mask)[user.args[1]])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
    return draw


def _emit(graph: fx.GraphModule, mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    node = graph.graph.call_function(op, args, kwargs)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    with mode, torch.no_grad():
        node.meta["val"] = op(*values, **kwargs)
    return node


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """Axes from the largest stride to the smallest; the natural order where strides are symbols."""
    strides: Sequence[Any] = value.stride()
    hints = [s if isinstance(s, int) else s.node.hint for s in strides]
    if any(h is None for h in hints):
        return tuple(range(value.ndim))
    return tuple(sorted(range(value.ndim), key=lambda axis: (-hints[axis], axis)))

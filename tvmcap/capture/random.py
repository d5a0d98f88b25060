"""Random numbers: drawn by PyTorch's generator before a call, and never again in the backward.

So a library gives what eager gives under the same seed, and the backward graph sees the very mask
that the forward one used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tvmcap.base.errors import CaptureError
from tvmcap.base.training import DRAWS
from tvmcap.capture import source
from tvmcap.capture.size_nodes import Sizes

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


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return node.target is draw_mask or torch.Tag.nondeterministic_seeded in tags


def draw_mask(
    shape: Sequence[int],
    order: Sequence[int],
    p: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Draw the mask of dropout as eager does for a tensor of this shape, dtype and order of axes.

    True, with probability ``1 - p``, for what is kept.
    """
    back = [order.index(axis) for axis in range(len(order))]
    like = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device).permute(back)
    mask: torch.Tensor = torch.native_dropout(like, p, True)[1]
    return mask


def draw_first(graph: fx.GraphModule) -> None:
    """Draw the masks of dropout out of sizes alone, so that no kernel has to wait for them.

    The numbers are those of eager: a mask depends on the shape, the order in memory, the dtype and
    the generator.
    """
    sizes = Sizes(graph.graph)
    for node in [n for n in graph.graph.nodes if n.target is _aten.native_dropout.default]:
        x, p, train = node.args
        value, mask_value = x.meta["val"], node.meta["val"][1]
        shape = [sizes.argument(size) for size in value.shape]
        drops = train and isinstance(p, int | float) and 0 < p < 1
        if not drops or any(size is None for size in shape):
            continue
        with graph.graph.inserting_before(node):
            add = graph.graph.call_function
            order = axes_in_memory(mask_value)
            mask = add(draw_mask, (shape, order, p, value.dtype, value.device))
            kept = add(_aten._to_copy.default, (mask,), {"dtype": value.dtype})
            scaled = add(_aten.mul.Tensor, (kept, 1.0 / (1.0 - p)))
            result = add(_aten.mul.Tensor, (x, scaled))
        told = {key: value for key, value in node.meta.items() if key != "tensor_meta"}
        for new in (mask, kept, scaled, result):
            new.meta = {**told, "val": mask_value if new is mask else node.meta["val"][0]}
        for user in list(node.users):
            user.replace_all_uses_with((result, mask)[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)


def draws(node: fx.Node) -> bool:
    """Whether an operator draws with these arguments; fused attention does so for dropout alone."""
    target: Any = node.target
    if not is_random(node) or target is draw_mask:
        return is_random(node)
    names = [a.name for a in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    p = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(p != 0)


def hide(graph: fx.GraphModule, drawn: Sequence[fx.Node]) -> tuple[fx.GraphModule, dict[str, str]]:
    """Make inputs of what nodes of those names draw, so that no partition draws it again.

    ``graph`` is rewritten in place. Returns it, and what each new input stands for, by name.
    """
    names = {node.name for node in drawn}
    hidden: dict[str, str] = {}
    for node in [n for n in graph.graph.nodes if n.name in names]:
        picked = isinstance(node.meta["val"], tuple | list)
        for value in list(node.users) if picked else [node]:
            new = add_input(graph, value.meta["val"])
            hidden[new.name] = value.name
            value.replace_all_uses_with(new)
            if picked:
                graph.graph.erase_node(value)
        graph.graph.erase_node(node)
    return graph, hidden


def restore(
    forward: fx.GraphModule,
    joint: fx.GraphModule,
    drawn: Sequence[fx.Node],
    hidden: Mapping[str, str],
) -> fx.GraphModule:
    """Draw in a forward graph what ``hide`` made inputs of, in the order of the joint graph.

    ``drawn`` are nodes of ``joint``, which is the graph before that. All are drawn, as in eager.
    """
    if not drawn:
        return forward
    kept = {n.name: n for n in forward.graph.nodes if n.op not in ("placeholder", "output")}
    needed = set(drawn)
    for node in reversed(joint.graph.nodes):
        if node.name in hidden.values() or node in needed:
            needed |= {node, *node.all_input_nodes}
    new = fx.Graph()
    env: dict[str, fx.Node] = {}

    def add(node: fx.Node) -> None:
        env[node.name] = new.node_copy(node, lambda n: env[hidden.get(n.name, n.name)])

    for node in forward.graph.nodes:
        if node.op == "placeholder" and node.name not in hidden:
            add(node)
    for node in joint.graph.nodes:
        if node.op not in ("placeholder", "output") and (node.name in kept or node in needed):
            add(kept.get(node.name, node))
    add(forward.graph.output_node())
    return fx.GraphModule(joint, new)


def add_input(graph: fx.GraphModule, value: Any) -> fx.Node:
    """Append an input to the forward part of a joint graph; ``value`` describes it."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    primals = [n for n in placeholders if "tangents" not in str(n.target)]
    with graph.graph.inserting_after(primals[-1]):
        node = graph.graph.placeholder(f"primals_{len(primals) + 1}")
    node.meta["val"] = value
    return node


def _lift(graph: fx.GraphModule, node: fx.Node, name: str) -> Draw:
    name_of = _MADE.get(str(node.target))
    numbers = [a for a in node.args[1:] if not isinstance(a, fx.Node)]
    if name_of is None or any(isinstance(a, fx.Node) for a in node.args[1:]):
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
    return Draw(name, name_of, value, like.dtype, axes_in_memory(value), tuple(map(float, numbers)))


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
            name,
            "dropout",
            mask_value,
            source_value.dtype,
            axes_in_memory(mask_value),
            (float(p),),
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


def axes_in_memory(value: torch.Tensor) -> tuple[int, ...]:
    """Axes from the largest stride to the smallest; the natural order where strides are symbols."""
    strides: Sequence[Any] = value.stride()
    hints = [s if isinstance(s, int) else s.node.hint for s in strides]
    if any(h is None for h in hints):
        return tuple(range(value.ndim))
    return tuple(sorted(range(value.ndim), key=lambda axis: (-hints[axis], axis)))

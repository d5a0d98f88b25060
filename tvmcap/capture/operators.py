"""Decompositions on the exported graph, and the checks before importing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.export import ExportedProgram

from tvmcap.base.errors import (
    CaptureError,
    DataDependentError,
    MutationError,
    UnsupportedOperatorError,
)
from tvmcap.capture import custom, source
from tvmcap.capture.decompositions import missing_in_torch

_aten = torch.ops.aten

#: Composite operators that stay whole, because the importer (ours or TVM's) makes better code of
#: them.
WHOLE = (
    _aten.linear.default,
    _aten.logsumexp.default,
    _aten.matmul.default,
    _aten.baddbmm.default,
    _aten.scaled_dot_product_attention.default,
    _aten.silu.default,
    _aten.max_pool2d.default,
    _aten.max_pool1d.default,
    _aten.hardswish.default,
    _aten.hardsigmoid.default,
    _aten.avg_pool1d.default,
)

#: Operators that TVM's importer translates wrongly or in part: decomposed where torch can, else
#: refused.
WRONG = frozenset(
    {
        "as_strided.default",
        "bernoulli.p",
        "celu.default",
        "elu.default",
        "selu.default",
        "softplus.default",
        "softshrink.default",
        "exponential.default",
        "std.correction",
        "prelu.default",
        "rand.default",
        "randn.default",
        "rand_like.default",
        "randn_like.default",
        "item.default",
        "_local_scalar_dense.default",
        "masked_select.default",
        "nonzero.default",
        "cond",
        "_assert_async.default",
        "_assert_async.msg",
        "grid_sampler_2d.default",
        "pixel_shuffle.default",
    }
)

_RANDOM_UNLESS: dict[str, Callable[[fx.Node], bool]] = {
    "aten.dropout.default": lambda n: not n.args[2] or n.args[1] == 0,
    "aten.native_dropout.default": lambda n: not n.args[2] or n.args[1] == 0,
    "aten.feature_dropout.default": lambda n: not n.args[2] or n.args[1] == 0,
    "aten.alpha_dropout.default": lambda n: not n.args[2] or n.args[1] == 0,
    "aten.scaled_dot_product_attention.default": lambda n: _argument(n, 4, "dropout_p", 0.0) == 0,
    **{
        f"aten.{kind}.input": lambda n: not n.args[6] or n.args[5] == 0
        for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    },
}


def decompose(program: ExportedProgram, known: Collection[str]) -> ExportedProgram:
    """Rewrite the graph into operators of ``known`` as far as torch has decompositions.

    In-place ones become pure.
    """
    own = missing_in_torch()
    table = torch.export.default_decompositions()
    table.update(own)
    for operator in WHOLE:
        table.pop(operator, None)
    program = program.run_decompositions(table)
    for _ in range(4):
        missing = {n.target for n in calls(program.graph) if not is_known(n, known)}
        rules = {**decomposition_table, **own}  # what rules are made of may need one in turn
        extra: dict[Any, Any] = {t: rules[t] for t in missing if t in rules}
        if not extra:
            break
        tried = program.run_decompositions(extra)
        if any(
            operator_name(n).startswith("prims.")
            for n in calls(tried.graph)
            if not is_known(n, known)
        ):
            break  # the message names the operators the user wrote
        program = tried
    return program


def calls(graph: fx.Graph) -> list[fx.Node]:
    """List the operators of a graph that compute tensors."""
    return [n for n in graph.nodes if n.op == "call_function" and not _is_scalar(n)]


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or isinstance(
        value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool
    )


def is_known(node: fx.Node, known: Collection[str]) -> bool:
    """Whether the importer translates ``node``.

    Its table has bare names, so other namespaces are refused unless they are registered, but for
    the cast that AOTAutograd puts behind a number that is an argument.
    """
    name = getattr(node.target, "__name__", "")
    if name == "getitem":
        return True
    if custom.find(node.target) is not None:
        return True
    if node.target is torch.ops.prims.convert_element_type.default:
        return name in known
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return name in known


def operator_name(node: fx.Node) -> str:
    """Name of a node's operator with its namespace, such as ``aten.gelu.default``."""
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else str(getattr(node.target, "__name__", node.target))
    )


def check_supported(graph: fx.Graph, known: Collection[str]) -> None:
    """Refuse operators that have no lowering, all at once, with counts and source lines."""
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function" and not _is_scalar(node) and not is_known(node, known)
        ):
            name = str(node.target) if node.op == "get_attr" else operator_name(node)
            if node.op == "call_function":
                found.setdefault(name, []).append(source.of_node(node))
    if not found:
        return
    rows = []
    for name, lines in sorted(found.items()):
        places = list(dict.fromkeys(line for line in lines if line))
        rows.append(
            f"  - {name} ({len(lines)}x)" + "".join(f"\n      {place}" for place in places[:4])
        )
    custom = [n for n in found if not n.startswith(("aten.", "cond", "while_loop", "map"))]
    control = [n for n in found if n in ("cond", "while_loop", "map_impl", "scan")]
    advice = "write them with other operators, or keep that part outside the function"
    if custom:
        advice += (
            f". {', '.join(custom)}: a custom operator needs a lowering registered with"
            " tvmcap.register_op, or a"
            " decomposition: torch.library.impl(op, 'CompositeImplicitAutograd')"
        )
    if control:
        advice += ". Control flow on tensor values: use torch.where, which computes both sides"
    raise UnsupportedOperatorError(
        f"{len(found)} operator(s) of the graph have no lowering:\n"
        + "\n".join(rows)
        + f"\nWhat to do: {advice}"
    )


def check_pure(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Refuse changes of arguments and buffers, random numbers and train-mode layers.

    ``names`` gives the user's name of each graph input.
    """
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        _check_random(node)
        if not node.target._schema.is_mutable:
            continue
        for position, argument in enumerate(node.target._schema.arguments):
            if (
                argument.alias_info is None
                or not argument.alias_info.is_write
                or position >= len(node.args)
            ):
                continue
            for target in (
                node.args[position]
                if isinstance(node.args[position], list)
                else [node.args[position]]
            ):
                base = _base(target)
                if base is not None and base.op == "placeholder":
                    _refuse_mutation(
                        names.get(base.name, base.name), operator_name(node), source.of_node(node)
                    )


def check_outputs(program: ExportedProgram) -> None:
    """Refuse mutations that only the functionalized graph shows."""
    kinds = torch.export.graph_signature.OutputKind
    for spec in program.graph_signature.output_specs:
        if spec.kind not in (kinds.USER_OUTPUT, kinds.LOSS_OUTPUT):
            _refuse_mutation(str(spec.target), spec.kind.name.lower().replace("_", " "), "")


def check_data_dependent(graph: fx.Graph, symbols: Collection[str]) -> None:
    """Refuse sizes and numbers that come from the values of tensors.

    ``symbols`` are those of the inputs' shapes.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                continue
            unknown = [str(s) for s in size.node.expr.free_symbols if str(s) not in symbols]
            if unknown:
                raise DataDependentError(
                    f"{operator_name(node)} makes a size or a number out of the values of a"
                    " tensor, at"
                    f" {source.of_node(node) or 'an unknown line'}. A library's shapes follow"
                    " from its inputs' shapes:"
                    " use torch.where or a mask of fixed size instead, or compute that part outside"
                )


def _base(node: Any) -> fx.Node | None:
    """Follow views and in-place results back to the tensor that owns the memory."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
        if not isinstance(node.target, torch._ops.OpOverload):
            node = node.args[0]
            continue
        returns = node.target._schema.returns
        composite_view = node.target.name() in (
            "aten::reshape",
            "aten::contiguous",
            "aten::flatten.using_ints",
        )
        if not (composite_view or (returns and returns[0].alias_info is not None)):
            return node
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _refuse_mutation(what: str, how: str, line: str) -> None:
    raise MutationError(
        f"{what} is changed in place ({how}){' at ' + line if line else ''}; a library computes"
        " outputs from inputs and"
        " changes nothing else. Return the new value as an output instead (x = x + 1, not x +="
        " 1); for batch norm call"
        " model.eval()"
    )


def _check_random(node: fx.Node) -> None:
    name, line = operator_name(node), source.of_node(node) or "an unknown line"
    assert isinstance(node.target, torch._ops.OpOverload)
    if "batch_norm" in name and _argument(node, 5, "training", False) is True:
        raise CaptureError(
            f"batch norm runs in training mode at {line}; call model.eval() before building"
        )
    if name in _RANDOM_UNLESS:
        if _RANDOM_UNLESS[name](node):
            return
        raise CaptureError(
            f"dropout runs in training mode at {line}; call model.eval() before building"
        )
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        raise CaptureError(
            f"{name} draws random numbers at {line}; a library is a function of its inputs. Draw"
            " them outside and pass"
            " them as an argument"
        )


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)

"""Capture: one PyTorch function in, one well-formed Relax module with its calling convention out.

Ensures a straight-line graph of operators the back end lowers, with symbolic sizes that carry the
user's names.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram

from tvmcap.base.config import Config
from tvmcap.base.errors import CaptureError
from tvmcap.base.signature import Signature, TensorSpec, Tree
from tvmcap.capture import arguments, ir, operators, shapes, source
from tvmcap.capture.fingerprint import fingerprint
from tvmcap.capture.references import named_tensors
from tvmcap.capture.structure import describe, dtype_name
from tvmcap.capture.symbols import Symbols
from tvmcap.capture.tracing import trace

__all__ = ["Captured", "capture", "fingerprint"]


@dataclass(frozen=True)
class Captured:
    """What capture found.

    Attributes
    ----------
    mod: Relax module; ``main`` takes the run-time inputs in ``signature.inputs`` order and returns
        a tuple of the outputs in ``signature.outputs`` order; frozen weights are constants inside;
        the symbolic variables are named like the dimensions, with ``tir_var_lower_bound`` and
        ``tir_var_upper_bound`` attributes.
    signature: the calling convention; arguments frozen by ``Config.constants`` are no part of it.
    frozen: names of the frozen weights and arguments.
    eager: the function in PyTorch, called as the signature says.
    args, kwargs: the example inputs, as the signature says.
    lines: operator of the graph to the first source line that uses it.
    weights: the frozen tensors by name.
    """

    mod: tvm.IRModule
    signature: Signature
    frozen: tuple[str, ...]
    eager: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lines: dict[str, str]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def capture(
    fn: Callable[..., Any] | ExportedProgram | str | os.PathLike[str],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Captured:
    """Capture a function, an nn.Module in eval mode, an ExportedProgram or a .pt2 file.

    Parameters
    ----------
    args, kwargs: example inputs (torch, numpy or DLPack tensors, numbers, strings, None, or tuples,
        lists and dicts of them); an exported program brings its own.
    config: ``dynamic`` and ``constants`` matter here.

    Raises CaptureError (UnsupportedOperatorError, DataDependentError, MutationError) for code that
    cannot be captured, ConfigError for options that do not fit the arguments.
    """
    config = config or Config()
    args, kwargs = arguments.checked(args, kwargs)
    if isinstance(fn, str | os.PathLike):
        fn = _load(fn)
    if isinstance(fn, ExportedProgram):
        fn, args, kwargs, config = _unpack(fn, args, kwargs, config)
    call = arguments.freeze(fn, args or (), kwargs or {}, config.constants)
    leaves: list[tuple[str, torch.Tensor]] = []
    items = [
        describe(value, name, leaves) for name, value in zip(call.names, call.values, strict=True)
    ]
    for item, is_required in zip(items, call.required, strict=True):
        if item["kind"] == "const" and is_required:
            item["required"] = True
    free = shapes.resolve(config.dynamic, call.names, leaves)
    program, out_tree = trace(call, leaves, free)
    return _finish(program, call, leaves, free, {"kind": "tuple", "items": items}, out_tree)


def _load(path: str | os.PathLike[str]) -> ExportedProgram:
    try:
        return torch.export.load(path)
    except Exception as e:
        raise CaptureError(
            f"cannot read {os.fspath(path)!r} as an exported program ({source.first_line(e)});"
            " expected a file that torch.export.save wrote"
        ) from e


def _unpack(
    program: ExportedProgram,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    config: Config,
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Config]:
    """Turn an exported program into its module, its examples and its dynamic dimensions."""
    if args is None and kwargs is None:
        if program.example_inputs is None:
            raise CaptureError("this exported program holds no example inputs; pass args")
        args, kwargs = program.example_inputs
    module = program.module(check_guards=False)
    dynamic = arguments.program_dims(program, args or (), kwargs or {}, config.dynamic)
    return module, args or (), kwargs or {}, replace(config, dynamic=dynamic)


def _finish(
    program: ExportedProgram,
    call: arguments.BoundCall,
    leaves: shapes.Leaves,
    free: shapes.Free,
    in_tree: Tree,
    out_tree: Tree,
) -> Captured:
    """Check the graph, decompose it, import it, and describe its calling convention."""
    names = [name for name, _ in leaves]
    placeholders = _user_placeholders(program)
    symbols = Symbols(free, [node.meta["val"] for node in placeholders], names)
    frozen = _frozen_names(program, call)
    labels = {**frozen, **{node.name: name for node, name in zip(placeholders, names, strict=True)}}
    operators.check_pure(program, labels)
    operators.check_data_dependent(program.graph, symbols.names)
    lines: dict[str, str] = {}
    for node in operators.calls(program.graph):
        lines.setdefault(operators.operator_name(node), source.of_node(node))
    known = ir.known_operators()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = operators.decompose(program, known)
    except Exception as e:
        raise CaptureError(
            f"PyTorch could not decompose the graph: {type(e).__name__}: {source.first_line(e)}"
        ) from e
    operators.check_outputs(program)
    operators.check_supported(program.graph, known)
    placeholders = _user_placeholders(program)
    symbols = Symbols(free, [node.meta["val"] for node in placeholders], names)
    params = list(zip(_identifiers(names), placeholders, strict=True))
    constants = _constants(program)
    mod = ir.import_graph(program, params, constants, symbols)
    values = [node.meta["val"] for node in _outputs(program)]
    signature = Signature(
        inputs=tuple(
            _spec(name, node.meta["val"], symbols)
            for name, node in zip(names, placeholders, strict=True)
        ),
        outputs=tuple(_spec(f"out{i}", value, symbols) for i, value in enumerate(values)),
        dims=symbols.dims(),
        in_tree=in_tree,
        out_tree=out_tree,
        arg_names=call.names,
    )
    args, kwargs = call.examples()
    eager = call.eager if call.frozen else call.fn
    weights = {frozen[name]: value for name, value in constants.items() if name in frozen}
    used = tuple(dict.fromkeys(frozen.values()))
    return Captured(mod, signature, used, eager, args, kwargs, lines, weights)


def _user_placeholders(program: ExportedProgram) -> list[fx.Node]:
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [nodes[str(name)] for name in program.graph_signature.user_inputs]


def _outputs(program: ExportedProgram) -> list[fx.Node]:
    output = next(n for n in program.graph.nodes if n.op == "output")
    if not output.args[0]:
        raise CaptureError("the function returns no tensor; return what it computes")
    return list(output.args[0])


def _constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Map placeholders to the values of the graph's frozen tensors."""
    kinds = torch.export.graph_signature.InputKind
    out = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is kinds.USER_INPUT:
            continue
        target = str(spec.target)
        out[spec.arg.name] = (
            program.state_dict[target]
            if target in program.state_dict
            else program.constants[target]
        )
    return out


def _frozen_names(program: ExportedProgram, call: arguments.BoundCall) -> dict[str, str]:
    """Map placeholders to the user's names of the frozen tensors that the graph uses."""
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    known = named_tensors(call.fn, call.frozen)
    values = _constants(program)
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    return {
        name: known.get(tensor.data_ptr()) or targets[name].removeprefix("fn.")
        for name, tensor in values.items()
        if name in used
    }


def _spec(name: str, value: torch.Tensor, symbols: Symbols) -> TensorSpec:
    return TensorSpec(
        name, dtype_name(value.dtype), tuple(symbols.text(size) for size in value.shape)
    )


def _identifiers(names: Sequence[str]) -> list[str]:
    """Make distinct identifiers of dotted names."""
    out: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name)
        while plain in out:
            plain += "_"
        out.append(plain)
    return out

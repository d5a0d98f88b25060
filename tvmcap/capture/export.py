"""Capture: one PyTorch function in, one well-formed Relax module with its calling convention out.

Ensures a straight-line graph of operators the back end lowers, with symbolic sizes that carry the user's names.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tvmcap.base.config import Config
from tvmcap.base.errors import CaptureError, DataDependentError, TvmcapError
from tvmcap.base.signature import DimSpec, Signature, TensorSpec, Tree
from tvmcap.capture import arguments, ir, operators, shapes, source
from tvmcap.capture.fingerprint import fingerprint
from tvmcap.capture.references import named_tensors
from tvmcap.capture.structure import describe, dtype_name, replace_tensors

__all__ = ["Captured", "capture", "fingerprint"]


@dataclass(frozen=True)
class Captured:
    """What capture found.

    Attributes
    ----------
    mod: Relax module; ``main`` takes the run-time inputs in ``signature.inputs`` order and returns a tuple of the
        outputs in ``signature.outputs`` order; frozen weights are constants inside; the symbolic variables are named
        like the dimensions, with ``tir_var_lower_bound`` and ``tir_var_upper_bound`` attributes.
    signature: the calling convention; arguments frozen by ``Config.constants`` are no part of it.
    frozen: names of the frozen weights and arguments.
    eager: the function in PyTorch, called as the signature says.
    args, kwargs: the example inputs, as the signature says.
    lines: operator of the graph to the first source line that uses it.
    """

    mod: tvm.IRModule
    signature: Signature
    frozen: tuple[str, ...]
    eager: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lines: dict[str, str]


def capture(
    fn: Callable[..., Any] | ExportedProgram | str | os.PathLike[str],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Captured:
    """Capture ``fn``: a function, an nn.Module in eval mode, an ExportedProgram, or the path of a .pt2 file.

    Parameters
    ----------
    args, kwargs: example inputs (torch, numpy or DLPack tensors, numbers, strings, None, or tuples, lists and dicts of
        them); an exported program brings its own.
    config: ``dynamic`` and ``constants`` matter here.

    Raises CaptureError (UnsupportedOperatorError, DataDependentError, MutationError) for code that cannot be captured,
    ConfigError for options that do not fit the arguments.
    """
    config = config or Config()
    if isinstance(fn, str | os.PathLike):
        fn = _load(fn)
    if isinstance(fn, ExportedProgram):
        fn, args, kwargs, config = _unpack(fn, args, kwargs, config)
    call = arguments.freeze(fn, args or (), kwargs or {}, config.constants)
    leaves: list[tuple[str, torch.Tensor]] = []
    items = [
        describe(value, name, leaves) for name, value in zip(call.names, call.values, strict=True)
    ]
    free = shapes.resolve(config.dynamic, call.names, leaves)
    program, out_tree = _export(call, leaves, free)
    return _finish(program, call, leaves, free, {"kind": "tuple", "items": items}, out_tree)


def _load(path: str | os.PathLike[str]) -> ExportedProgram:
    try:
        return torch.export.load(path)
    except Exception as e:
        raise CaptureError(
            f"cannot read {os.fspath(path)!r} as an exported program ({_first_line(e)}); expected a file that"
            " torch.export.save wrote"
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


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """The user's function on a flat list of tensors, as torch.export wants it."""

    def __init__(self, call: arguments.BoundCall) -> None:
        super().__init__()
        self.call_ = call
        self.found = SimpleNamespace(
            out_tree=None
        )  # torch.export restores attributes, but not what they hold
        if isinstance(call.fn, torch.nn.Module):
            self.fn = call.fn

    def forward(self, *leaves: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(leaves)
        values = [replace_tensors(value, lambda: next(rest)) for value in self.call_.values]
        outputs: list[tuple[str, torch.Tensor]] = []
        self.found.out_tree = describe(self.call_.invoke(values), "output", outputs)
        return [tensor for _, tensor in outputs]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the caller's random state, grad mode and attention switch as they were."""
    states = torch.get_rng_state(), random.getstate()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_rng_state(states[0])
        random.setstate(states[1])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging and printing what our errors say; its logs come back with TORCH_LOGS."""
    names = (
        "torch._subclasses.fake_tensor",
        "torch.fx.experimental.symbolic_shapes",
        "torch.export",
    )
    loggers = [logging.getLogger(name) for name in names]
    before = [log.disabled for log in loggers]
    is_quiet = not os.environ.get("TORCH_LOGS")
    for log in loggers:
        log.disabled = log.disabled or is_quiet
    try:
        with contextlib.redirect_stderr(io.StringIO()) if is_quiet else contextlib.nullcontext():
            yield
    finally:
        for log, was in zip(loggers, before, strict=True):
            log.disabled = was


def _export(
    call: arguments.BoundCall, leaves: shapes.Leaves, free: shapes.Free
) -> tuple[ExportedProgram, Tree]:
    """Run torch.export with sizes chosen to avoid coincidences, then with the example's own if that fails."""
    chosen, given = shapes.example_sizes(free, leaves), shapes.given_sizes(free, leaves)
    try:
        return _export_at(call, leaves, free, chosen)
    except TvmcapError:
        if chosen == given:
            raise
        return _export_at(call, leaves, free, given)


def _export_at(
    call: arguments.BoundCall, leaves: shapes.Leaves, free: shapes.Free, sizes: Mapping[str, int]
) -> tuple[ExportedProgram, Tree]:
    flat = _Flat(call)
    dynamic = {"leaves": shapes.torch_shapes(free, leaves)} if free.dims else None
    try:
        with _undisturbed(), source.recording():
            inputs = shapes.resize(free, leaves, sizes)
            with _quiet():
                program = torch.export.export(flat, inputs, dynamic_shapes=dynamic, strict=False)
    except TvmcapError:
        raise
    except Exception as e:
        raise _translate(e, [name for name, _ in leaves], sizes) from e
    return program, flat.found.out_tree


def _translate(error: Exception, names: Sequence[str], sizes: Mapping[str, int]) -> CaptureError:
    """Turn an error of torch.export into one that says where and what to do."""
    line = source.of_error(error.__traceback__)
    at = f" at {line}" if line else ""
    text = str(error)
    if "Constraints violated" in text:
        return CaptureError(shapes.explain_violation(text, names))
    if isinstance(error, GuardOnDataDependentSymNode) or "DataDependent" in type(error).__name__:
        return DataDependentError(
            f"the code branches on, or takes a number out of, the values of tensors{at}. A library is one straight line"
            " of operators: use torch.where or a mask, or keep the decision outside the function"
        )
    chosen = f" (captured with {', '.join(f'{n}={s}' for n, s in sizes.items())})" if sizes else ""
    return CaptureError(
        f"PyTorch could not trace the function{at}: {type(error).__name__}: {_first_line(error)}{chosen}. Check that the"
        " function runs on the example inputs, and that its dynamic dimensions may vary"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:400]


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
    symbols = shapes.Symbols(free, [node.meta["val"] for node in placeholders], names)
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
            f"PyTorch could not decompose the graph: {type(e).__name__}: {_first_line(e)}"
        ) from e
    operators.check_outputs(program)
    operators.check_supported(program.graph, known)
    placeholders = _user_placeholders(program)
    symbols = shapes.Symbols(free, [node.meta["val"] for node in placeholders], names)
    params = list(zip(_identifiers(names), placeholders, strict=True))
    mod = ir.import_graph(program, params, _constants(program), symbols)
    values = [node.meta["val"] for node in _outputs(program)]
    signature = Signature(
        inputs=tuple(
            _spec(name, node.meta["val"], symbols)
            for name, node in zip(names, placeholders, strict=True)
        ),
        outputs=tuple(_spec(f"out{i}", value, symbols) for i, value in enumerate(values)),
        dims=tuple(DimSpec(d.name, d.min, d.max) for d in free.dims.values()),
        in_tree=in_tree,
        out_tree=out_tree,
        arg_names=call.names,
    )
    args, kwargs = call.examples()
    eager = call.eager if call.frozen else call.fn
    return Captured(
        mod, signature, tuple(dict.fromkeys(frozen.values())), eager, args, kwargs, lines
    )


def _user_placeholders(program: ExportedProgram) -> list[fx.Node]:
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [nodes[str(name)] for name in program.graph_signature.user_inputs]


def _outputs(program: ExportedProgram) -> list[fx.Node]:
    output = next(n for n in program.graph.nodes if n.op == "output")
    if not output.args[0]:
        raise CaptureError("the function returns no tensor; return what it computes")
    return list(output.args[0])


def _constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Placeholder name to value of every frozen tensor of the graph."""
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
    """Placeholder name to the user's name of every frozen tensor that the graph has."""
    known = named_tensors(call.fn, call.frozen)
    values = _constants(program)
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    return {
        name: known.get(tensor.data_ptr()) or targets[name].removeprefix("fn.")
        for name, tensor in values.items()
    }


def _spec(name: str, value: torch.Tensor, symbols: shapes.Symbols) -> TensorSpec:
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

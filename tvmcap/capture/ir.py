"""From an exported graph to Relax, node by node, each result checked against torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvmcap.base.errors import CaptureError
from tvmcap.capture import custom, empty, source
from tvmcap.capture.converters import CONVERTERS
from tvmcap.capture.fractions import scalar
from tvmcap.capture.operators import WRONG, operator_name
from tvmcap.capture.structure import dtype_name
from tvmcap.capture.symbols import Symbols


def known_operators() -> set[str]:
    """Name every ATen operator that has a converter, TVM's or ours."""
    return (set(ExportedProgramImporter().convert_map) - WRONG) | set(CONVERTERS)


def import_graph(
    program: ExportedProgram,
    inputs: Sequence[tuple[str, fx.Node]],
    constants: Mapping[str, torch.Tensor],
    symbols: Symbols,
) -> tvm.IRModule:
    """Translate the graph into a Relax module whose ``main`` returns a tuple of the outputs.

    Parameters
    ----------
    inputs: name and placeholder of each run-time input, in signature order.
    constants: placeholder name to value, for parameters, buffers and lifted tensors.
    symbols: the symbolic sizes.

    Raises CaptureError, the original chained, where a converter fails or disagrees with torch on a
    shape.
    """
    output = next((n for n in program.graph.nodes if n.op == "output"), None)
    if output is None:
        raise CaptureError("the exported graph has no output")
    return import_fx(program.graph, inputs, {}, constants, symbols, list(output.args[0]))


def import_fx(
    graph: fx.Graph,
    inputs: Sequence[tuple[str, fx.Node]],
    unread: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    symbols: Symbols,
    results: Sequence[fx.Node],
) -> tvm.IRModule:
    """Translate a graph as ``import_graph`` does; ``main`` returns ``results``.

    ``unread`` are further run-time inputs, after the others, that nothing but sizes is read of.
    """
    importer = _Importer(symbols)
    builder = importer.block_builder = relax.BlockBuilder()
    params = []
    for name, value in [*((n, node.meta["val"]) for n, node in inputs), *unread.items()]:
        shape = [symbols.expr(size) for size in value.shape]
        params.append(relax.Var(name, relax.TensorType(shape, dtype_name(value.dtype))))
    importer.env.update({node: var for (_, node), var in zip(inputs, params, strict=False)})
    with builder.function("main", params):
        with builder.dataflow():
            _translate(importer, graph, _Constants(constants), symbols)
            outputs = relax.Tuple([importer.env[node] for node in results])
            result = builder.emit_output(outputs)
        builder.emit_func_output(result)
    return _well_formed(builder.get(), params, symbols)


class _Importer(ExportedProgramImporter):  # type: ignore[misc]
    """TVM's importer, with the sizes that our converters ask for."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self.symbols = symbols


def _translate(
    importer: ExportedProgramImporter, graph: fx.Graph, constants: _Constants, symbols: Symbols
) -> None:
    for node in graph.nodes:
        if node.op == "placeholder" and node not in importer.env:
            importer.env[node] = _input(importer, node, constants, symbols)
        elif node.op == "call_function":
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt | int):
                importer.env[node] = symbols.expr(value)
            elif isinstance(value, torch.SymFloat):
                importer.env[node] = scalar(importer, value.node.expr)
            elif isinstance(value, torch.Tensor | tuple | list):
                importer.env[node] = _convert(importer, node, symbols)


def _input(
    importer: ExportedProgramImporter, node: fx.Node, constants: _Constants, symbols: Symbols
) -> Any:
    """Return what an input that is no tensor of a call stands for."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return symbols.expr(value)
    if isinstance(value, torch.SymFloat):
        return scalar(importer, value.node.expr)
    return constants.get(node.name)


class _Constants:
    """Frozen tensors as Relax constants; tied ones are shared."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[tuple[Any, ...], Any] = {}

    def get(self, name: str) -> Any:
        tensor = self.tensors[name]
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() == 0 or key not in self.made:
            dense = (
                tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
            )
            own = dense.cpu().clone(memory_format=torch.contiguous_format)
            self.made[key] = relax.const(tvm.runtime.from_dlpack(own))
        return self.made[key]


def _convert(importer: ExportedProgramImporter, node: fx.Node, symbols: Symbols) -> Any:
    name, registered = node.target.__name__, custom.find(node.target)
    try:
        empty.bound(node, symbols)
        if empty.has_no_elements(node.meta["val"]):
            result = empty.nothing(importer, node.meta["val"], symbols)
        elif registered is not None:
            result = custom.convert(node, importer, registered)
        elif empty.reads_no_elements(node):
            result = empty.result(importer, node, symbols)
        elif name in CONVERTERS:
            result = CONVERTERS[name](node, importer)
        else:
            result = importer.convert_map[name](node)
        return _agree(importer, result, node.meta["val"], symbols)
    except CaptureError as e:
        e.node = node
        raise
    except Exception as e:
        error = CaptureError(
            f"the importer cannot translate {operator_name(node)} with {_describe(node)}, at"
            f" {source.of_node(node) or 'an unknown line'}: {_first_line(e)}. Write it with other"
            " operators, or keep it"
            " outside the function"
        )
        error.node = node
        raise error from e


def _agree(importer: ExportedProgramImporter, result: Any, value: Any, symbols: Symbols) -> Any:
    """Make the result's dtype torch's, and its shape known.

    Raise ValueError where the shapes differ.
    """
    if isinstance(value, tuple | list):
        if isinstance(result, tuple | list):
            pairs = zip(result, value, strict=False)
            return [None if r is None else _agree(importer, r, v, symbols) for r, v in pairs]
        if isinstance(result.ty, relax.TensorType):  # the importer gives the first result alone
            first = _agree(importer, result, value[0], symbols)
            return [first, *[None] * (len(value) - 1)]
        return result
    if isinstance(result, relax.Call):  # some rules of the importer's bind no variable
        result = importer.block_builder.emit(result)
    if not isinstance(result, relax.Expr) or not isinstance(result.ty, relax.TensorType):
        raise ValueError(f"no tensor came out, but {type(result).__name__}")
    builder, dtype = importer.block_builder, dtype_name(value.dtype)
    if str(result.ty.dtype.dtype) != dtype:
        result = builder.emit(relax.op.astype(result, dtype))
    expected = [symbols.expr(size) for size in value.shape]
    found = result.ty.shape
    if not isinstance(found, relax.ShapeExpr):
        return builder.match_cast(result, relax.TensorType(expected, dtype))
    if len(found) != len(expected):
        raise ValueError(f"the rank came out as {len(found)}, torch has {len(expected)}")
    plain = tvm.sym.Analyzer()
    differ = [
        i
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
        if not plain.can_prove_equal(a, b)
    ]
    for axis in differ:
        a, b = found[axis], expected[axis]
        if symbols.is_true(a != b):
            raise ValueError(f"axis {axis} came out as {a}, torch has {b}")
    if any(isinstance(expected[axis], tvm.tirx.Var) for axis in differ):
        # a match_cast to a bare variable would define it anew, and CanonicalizeBindings never ends
        return builder.emit(relax.op.reshape(result, expected))
    return builder.match_cast(result, relax.TensorType(expected, dtype)) if differ else result


def _well_formed(mod: tvm.IRModule, params: Sequence[relax.Var], symbols: Symbols) -> tvm.IRModule:
    main = mod["main"]
    dims = symbols.bounds
    if dims:
        main = main.with_attr("tir_var_lower_bound", {name: low for name, (low, _) in dims.items()})
        upper = {name: high for name, (_, high) in dims.items() if high is not None}
        if upper:
            main = main.with_attr("tir_var_upper_bound", upper)
    mod["main"] = main
    mod = relax.transform.DeadCodeElimination(["main"])(mod)
    try:
        relax.analysis.well_formed(mod)
    except Exception as e:
        raise CaptureError(
            f"the importer made a Relax module that is not well formed: {_first_line(e)}"
        ) from e
    return mod


def _describe(node: fx.Node) -> str:
    parts = []
    for argument in node.args:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        parts.append(
            f"{dtype_name(value.dtype)}{list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else repr(value)
        )
    return f"({', '.join(parts)})"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if len(text) <= 300 else f"... {text[-300:]}"

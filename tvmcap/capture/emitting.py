"""What converters share: reading a node's arguments and emitting Relax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax, tirx

from tvmcap.capture.structure import dtype_name

Converter = Callable[[fx.Node, Any], Any]
HALF = ("float16", "bfloat16")


def dtype_of(x: relax.Expr) -> str:
    """Element type of a Relax tensor as text."""
    return str(x.ty.dtype.dtype)


def emit(importer: Any, expr: relax.Expr) -> Any:
    """Bind ``expr`` to a new variable."""
    return importer.block_builder.emit(expr)


def cast(importer: Any, x: relax.Expr, dtype: str) -> Any:
    """Return ``x`` with elements of ``dtype``."""
    return x if dtype_of(x) == dtype else emit(importer, relax.op.astype(x, dtype))


def operand(importer: Any, value: Any, dtype: str) -> Any:
    """Return a number, a symbolic size or a tensor as a tensor of ``dtype``."""
    if isinstance(value, bool | int | float):
        return relax.const(value, dtype)
    if isinstance(value, tirx.IntImm):
        return relax.const(int(value), dtype)
    if not isinstance(value.ty, relax.TensorType):  # a symbolic size
        value = emit(importer, relax.op.shape_to_tensor(relax.ShapeExpr([value])))
        value = emit(importer, relax.op.reshape(value, ()))
    return cast(importer, value, dtype)


def shape_of(node: fx.Node, importer: Any) -> list[Any]:
    """Shape that torch gives the node's result, as Relax has it."""
    return [importer.symbols.expr(size) for size in node.meta["val"].shape]


def arguments_of(node: fx.Node, importer: Any) -> dict[str, Any]:
    """Name every argument of the node, defaults included, with tensors as Relax values."""
    assert isinstance(node.target, torch._ops.OpOverload)
    named = {}
    for i, argument in enumerate(node.target._schema.arguments):
        value = (
            node.args[i]
            if i < len(node.args)
            else node.kwargs.get(argument.name, argument.default_value)
        )
        named[argument.name] = importer._retrieve_args(value)
    return named


def out_dtype(node: fx.Node) -> str:
    """Element type that torch gives the node's result."""
    return dtype_name(node.meta["val"].dtype)

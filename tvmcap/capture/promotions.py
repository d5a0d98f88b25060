"""Converters for operands of several dtypes, which PyTorch promotes and TVM's importer does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from tvmcap.capture.emitting import (
    Converter,
    arguments_of,
    cast,
    emit,
    operand,
    out_dtype,
    shape_of,
)


def _joined(op: Callable[..., relax.Expr]) -> Converter:
    """Put tensors together; PyTorch lets empty ones of rank 1 stand in any list."""

    def convert(node: fx.Node, importer: Any) -> Any:
        a = arguments_of(node, importer)
        parts = [cast(importer, x, out_dtype(node)) for x in a["tensors"]]
        return emit(importer, op(parts, axis=a["dim"]))

    return convert


def _where(node: fx.Node, importer: Any) -> Any:
    condition, *values = importer.retrieve_args(node)[:3]
    a, b = (operand(importer, value, out_dtype(node)) for value in values)
    return emit(importer, relax.op.where(cast(importer, condition, "bool"), a, b))


def _masked_fill(node: fx.Node, importer: Any) -> Any:
    """Put a number where a mask says; TVM's converter has no kernel for infinity or nan."""
    x, mask, value = importer.retrieve_args(node)[:3]
    number = operand(importer, value, out_dtype(node))
    return emit(importer, relax.op.where(cast(importer, mask, "bool"), number, x))


def between(node: fx.Node, importer: Any) -> Any:
    """Bound by numbers or tensors, which broadcast both ways."""
    a = arguments_of(node, importer)
    x = cast(importer, a["self"], out_dtype(node))
    for name, op in (("min", relax.op.maximum), ("max", relax.op.minimum)):
        if a[name] is not None:
            x = emit(importer, op(x, operand(importer, a[name], out_dtype(node))))
    return x


def _fmod(node: fx.Node, importer: Any) -> Any:
    a, b = (operand(importer, v, out_dtype(node)) for v in importer.retrieve_args(node)[:2])
    return emit(importer, relax.op.mod(a, b))


def _eye(node: fx.Node, importer: Any) -> Any:
    """Ones on the diagonal, also of a dtype that is left out."""
    rows, columns = shape_of(node, importer)
    return emit(importer, relax.op.eye(rows, columns, dtype=out_dtype(node)))


PROMOTIONS: dict[str, Converter] = {
    "cat.default": _joined(relax.op.concat),
    "stack.default": _joined(relax.op.stack),
    "where.self": _where,
    "masked_fill.Scalar": _masked_fill,
    "clamp.Tensor": between,
    **dict.fromkeys(("fmod.Tensor", "fmod.Scalar"), _fmod),
    **dict.fromkeys(("eye.default", "eye.m"), _eye),
}

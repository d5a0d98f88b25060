"""Tensors without elements: made anew where they are results, and known where they are all input.

Kernels divide by their sizes, and TVM's rules for reductions do while they are compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from tvm import relax

from tvmcap.base.errors import CaptureError
from tvmcap.capture import source
from tvmcap.capture.structure import dtype_name
from tvmcap.capture.symbols import Symbols


def has_no_elements(value: Any) -> bool:
    """Whether a value is a tensor of which a size is 0 whatever the dynamic dimensions are."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return any(isinstance(size, int) and size == 0 for size in sizes)


def nothing(importer: Any, value: torch.Tensor, symbols: Symbols) -> Any:
    """Make a tensor without elements, whatever computes it."""
    shape = relax.ShapeExpr([symbols.expr(size) for size in value.shape])
    return importer.block_builder.emit(relax.op.zeros(shape, dtype_name(value.dtype)))


def reads_no_elements(node: fx.Node) -> bool:
    """Whether an operator reads tensors, and all that it reads are without elements."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if not isinstance(v, torch.SymInt | int)]
    return bool(tensors) and all(map(has_no_elements, tensors))


def result(importer: Any, node: fx.Node, symbols: Symbols) -> Any:
    """Give the tensors that PyTorch makes of no elements: one number, everywhere the same.

    Raises CaptureError where PyTorch refuses, as it does the greatest of no elements.
    """
    try:
        with unset_fake_temporarily():  # torch.compile has compilers run where tensors are fake
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _example(n.meta["val"]))
            made = node.target(*args, **kwargs)
    except Exception as e:
        raise CaptureError(
            f"{node.target} of a tensor without elements, at"
            f" {source.of_node(node) or 'an unknown line'}: {source.first_line(e)}"
        ) from e
    value = node.meta["val"]
    if isinstance(made, torch.Tensor):
        return _filled(importer, value, made, symbols)
    return [_filled(importer, v, m, symbols) for m, v in zip(made, value, strict=True)]


def _example(value: Any) -> Any:
    """Return a tensor or a size as it is where each dynamic dimension is 2."""
    if not isinstance(value, torch.Tensor):
        return _size(value)
    return torch.empty([_size(size) for size in value.shape], dtype=value.dtype)


def _size(size: Any) -> int:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs({symbol: 2 for symbol in expr.free_symbols}))


def _filled(importer: Any, value: torch.Tensor, made: torch.Tensor, symbols: Symbols) -> Any:
    if has_no_elements(value):
        return nothing(importer, value, symbols)
    with unset_fake_temporarily():
        number = relax.const(made.flatten()[0].item(), dtype_name(value.dtype))
    shape = relax.ShapeExpr([symbols.expr(size) for size in value.shape])
    return importer.block_builder.emit(relax.op.broadcast_to(number, shape))

"""Tensors without elements: made anew where they are results, and known where they are all input.

Kernels divide by their sizes, and TVM's rules for reductions do while they are compiled. Where an
operator takes none, or no fewer than some number, the dimensions are bounded so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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


#: Operators that PyTorch refuses along a dimension without elements; along all where none is given.
_ALONG = {f"{op}.default" for op in ("amax", "amin", "argmax", "argmin", "aminmax", "max", "min")}
_ALONG |= {f"{op}.dim" for op in ("max", "min", "median")} | {"median.default"}
#: Others that need some elements, by what they are given.
_NEEDING = {"linalg_vector_norm.default", "topk.default", "select.int", "slice.Tensor"}


def bound(node: fx.Node, symbols: Symbols) -> None:
    """Raise the least sizes of dynamic dimensions to what an operator takes.

    Tracing assumes at least 2 of each, so that no guard tells.
    """
    for size, least in _needs(node):
        symbols.need(size, least)
    value = node.meta["val"]
    for size in value.shape if isinstance(value, torch.Tensor) else ():
        symbols.need(size, 0)


def _needs(node: fx.Node) -> Iterator[tuple[Any, int]]:
    """List sizes that an operator reads, each with the least that it takes."""
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return
    shape, name = list(value.shape), node.target.__name__
    if name not in _ALONG | _NEEDING or not shape:
        return
    given = {a.name: a.default_value for a in node.target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    axes = given.get("dim")
    axes = range(len(shape)) if axes is None or axes == [] else axes
    sizes = [shape[axis] for axis in ([axes] if isinstance(axes, int) else axes)]
    if name in _ALONG:
        yield from ((size, 1) for size in sizes)
    elif name == "linalg_vector_norm.default" and not 0 <= given["ord"] < math.inf:
        yield from ((size, 1) for size in sizes)
    elif name == "topk.default" and isinstance(given["k"], int):
        yield sizes[0], given["k"]
    elif name == "select.int" and isinstance(given["index"], int):
        index = given["index"]
        yield sizes[0], index + 1 if index >= 0 else -index
    elif name == "slice.Tensor":
        yield from _needs_of_slice(node, given, sizes[0])


def _needs_of_slice(node: fx.Node, given: dict[str, Any], size: Any) -> Iterator[tuple[Any, int]]:
    """A slice that came out with a number of elements has that number."""
    length, start = node.meta["val"].shape[given["dim"]], given["start"] or 0
    if not isinstance(length, int) or not isinstance(start, int) or length == 0:
        return
    yield size, -start if start < 0 else start + (length - 1) * given["step"] + 1


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

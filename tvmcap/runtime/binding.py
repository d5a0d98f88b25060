"""From a call's arguments to a list of tensors, and from their shapes to all that it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmcap.base.errors import InputError
from tvmcap.base.signature import DimSpec, Signature, TensorSpec, Tree, evaluate

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What follows from the input shapes of a call; each has its own identity.

    Attributes
    ----------
    dims: the value of each symbolic dimension.
    sizes: these values, in an order that is the same for all plans of a signature.
    shapes, strides: of the outputs, strides in elements.
    input_bytes, output_bytes: size of each tensor.
    zero: some tensor has no elements.
    skip: no output has elements, so that there is nothing to run.
    recipe: how the framework of the call makes the outputs.
    """

    dims: Mapping[str, int]
    sizes: tuple[int, ...]
    shapes: tuple[Shape, ...]
    strides: tuple[Shape, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    zero: bool
    skip: bool
    recipe: tuple[Any, ...] = ()


def make_plan(
    signature: Signature, shapes: Sequence[Shape], itemsize: Callable[[str], int]
) -> Plan:
    """Check input shapes against the signature; raises InputError for the first that does not fit.

    ``itemsize`` tells the bytes of an element of a dtype.
    """
    dims: dict[str, int] = {}
    origin: dict[str, str] = {}
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        _bind(spec, shape, dims, origin)
    for dim in signature.dims:
        if dim.name in dims:
            _check_bounds(dim, dims[dim.name], origin[dim.name])
    outputs = tuple(
        tuple(evaluate(size, dims) for size in spec.shape) for spec in signature.outputs
    )
    empty = [0 in shape for shape in outputs]
    return Plan(
        dims=dims,
        sizes=tuple(dims.values()),
        shapes=outputs,
        strides=tuple(_strides(shape) for shape in outputs),
        input_bytes=_sizes(signature.inputs, shapes, itemsize),
        output_bytes=_sizes(signature.outputs, outputs, itemsize),
        zero=any(empty) or any(0 in shape for shape in shapes),
        skip=all(empty),
    )


def _sizes(
    specs: Sequence[TensorSpec], shapes: Sequence[Shape], itemsize: Callable[[str], int]
) -> tuple[int, ...]:
    return tuple(
        math.prod(shape) * itemsize(spec.dtype) for spec, shape in zip(specs, shapes, strict=True)
    )


def _bind(spec: TensorSpec, shape: Shape, dims: dict[str, int], origin: dict[str, str]) -> None:
    if len(shape) != len(spec.shape):
        raise InputError(
            f"argument {spec.name!r}: expected {len(spec.shape)} dimensions {_text(spec)}, got "
            f"{list(shape)}"
        )
    for axis, (size, got) in enumerate(zip(spec.shape, shape, strict=True)):
        if isinstance(size, int):
            if size != got:
                raise InputError(
                    f"argument {spec.name!r}: expected size {size} in dimension {axis} of "
                    f"{_text(spec)}, got {list(shape)}; "
                    "build with dynamic={...} for a dimension that varies"
                )
        elif dims.setdefault(size, got) != got:
            raise InputError(
                f"argument {spec.name!r}: expected {size} = {dims[size]} (the size that "
                f"{origin[size]} has) in dimension "
                f"{axis} of {_text(spec)}, got {list(shape)}"
            )
        else:
            origin.setdefault(size, f"dimension {axis} of {spec.name!r}")


def _check_bounds(dim: DimSpec, got: int, where: str) -> None:
    if got < dim.min or (dim.max is not None and got > dim.max):
        upper = "" if dim.max is None else f" and at most {dim.max}"
        raise InputError(
            f"{where}: expected {dim.name} of at least {dim.min}{upper}, got {got}; "
            f"build with Dim({dim.name!r}, min=..., max=...) that admits it, unless it is the "
            "code itself that takes no such size, as amax takes no empty dimension"
        )


def _text(spec: TensorSpec) -> str:
    return f"[{', '.join(str(size) for size in spec.shape)}]"


def _strides(shape: Shape) -> Shape:
    """Strides in elements of a compact tensor, as PyTorch has them (without elements too)."""
    return tuple(
        math.prod(max(extent, 1) for extent in shape[axis + 1 :]) for axis in range(len(shape))
    )


def is_plain(signature: Signature) -> bool:
    """Whether the arguments are the inputs, one tensor each, in order."""
    tree = signature.in_tree
    return [item.get("index") for item in tree["items"]] == list(range(len(signature.inputs)))


def flatten_call(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the tensors of a call in the order of ``signature.inputs``.

    Raises InputError for a missing, surplus or unknown argument, a structure other than the
    captured one, and a constant other than the captured one.
    """
    leaves: list[Any] = [None] * len(signature.inputs)
    for item, name, value in zip(
        signature.in_tree["items"],
        signature.arg_names,
        _positional(signature, args, kwargs),
        strict=True,
    ):
        _collect(item, value, name, leaves)
    return leaves


def _positional(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    names, items = signature.arg_names, signature.in_tree["items"]
    expected = f"expected ({', '.join(names)})"
    if len(args) > len(names):
        raise InputError(f"{expected}, {len(names)} arguments, got {len(args)} positional ones")
    for name in kwargs:
        if name not in names:
            raise InputError(f"{expected}, got an argument named {name!r}")
        if name in names[: len(args)]:
            raise InputError(f"{expected}, got {name!r} both by position and by name")
    values = list(args)
    for name, item in list(zip(names, items, strict=True))[len(args) :]:
        if name not in kwargs and (item["kind"] != "const" or item.get("required")):
            raise InputError(f"{expected}, got no {name!r}")
        values.append(kwargs.get(name, item.get("value")))
    return values


def _collect(tree: Tree, value: Any, where: str, leaves: list[Any]) -> None:
    kind = tree["kind"]
    if kind == "leaf":
        leaves[tree["index"]] = value
    elif kind == "const":
        if type(value) is not type(tree["value"]) or value != tree["value"]:
            raise InputError(
                f"argument {where!r}: expected {tree['value']!r}, the value it was built with, "
                f"got {value!r}; "
                "build a library for that value"
            )
    elif kind == "dict":
        if not isinstance(value, Mapping) or set(value) != set(tree["keys"]):
            got = f"the keys {list(value)}" if isinstance(value, Mapping) else type(value).__name__
            raise InputError(
                f"argument {where!r}: expected a dict with the keys {tree['keys']}, got {got}"
            )
        for key, item in zip(tree["keys"], tree["items"], strict=True):
            _collect(item, value[key], f"{where}.{key}", leaves)
    else:
        count = len(tree["items"])
        if not isinstance(value, tuple | list) or len(value) != count:
            got = (
                f"{len(value)} of them" if isinstance(value, tuple | list) else type(value).__name__
            )
            raise InputError(f"argument {where!r}: expected a {kind} of {count}, got {got}")
        for position, (item, part) in enumerate(zip(tree["items"], value, strict=True)):
            _collect(item, part, f"{where}.{position}", leaves)


def flatten_outputs(signature: Signature, out: Any) -> list[Any]:
    """List the tensors of ``out=``, given as the structure that the call returns."""
    leaves: list[Any] = [None] * len(signature.outputs)
    _collect(signature.out_tree, out, "out", leaves)
    return leaves

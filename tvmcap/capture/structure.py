"""Calling conventions: what a function's arguments are named, and how nested values flatten."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmcap.base.errors import CaptureError
from tvmcap.base.signature import Tree

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_CONSTANT_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Call:
    """The arguments of one call in the order of the function's signature.

    Attributes
    ----------
    names: one name an argument.
    values: the example values.
    keyword: whether the function takes that argument by keyword only.
    required: whether a call must give it: it has no default, or the example differs from it.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    keyword: tuple[bool, ...]
    required: tuple[bool, ...]

    def invoke(self, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call ``fn`` with ``values`` in this order."""
        rows = list(zip(self.names, values, self.keyword, strict=True))
        return fn(*(v for _, v, k in rows if not k), **{n: v for n, v, k in rows if k})


def bind(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Match the example arguments with the parameters of ``fn``.

    A default that stands before the last argument given is filled in, so that positions keep their
    meaning.
    Raises CaptureError where the arguments do not fit.
    """
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # builtins
        names = [f"arg{i}" for i in range(len(args))] + list(kwargs)
        keyword = (False,) * len(args) + (True,) * len(kwargs)
        return Call(tuple(names), (*args, *kwargs.values()), keyword, (True,) * len(names))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        raise CaptureError(
            f"the example arguments do not fit {_name(fn)}{signature}: {e}; got {len(args)}"
            " positional and"
            f" {sorted(kwargs)} by keyword. Give args and kwargs as for one call"
        ) from e
    rows: list[tuple[str, Any, bool, bool]] = []
    given = [p for p in signature.parameters if p in bound.arguments]
    last = list(signature.parameters).index(given[-1]) if given else -1
    for name, parameter in list(signature.parameters.items())[: last + 1]:
        value = bound.arguments.get(name, parameter.default)
        if parameter.kind is parameter.VAR_POSITIONAL:
            values = bound.arguments.get(name, ())
            rows += [(f"{name}_{i}", v, False, True) for i, v in enumerate(values)]
        elif parameter.kind is parameter.VAR_KEYWORD:
            rows += [(key, v, True, True) for key, v in bound.arguments.get(name, {}).items()]
        else:
            is_required = not _same_constant(value, parameter.default)
            rows.append((name, value, parameter.kind is parameter.KEYWORD_ONLY, is_required))
    columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True)) or [()] * 4
    return Call(*columns)


def _same_constant(a: Any, b: Any) -> bool:
    return isinstance(a, _CONSTANT_TYPES) and type(a) is type(b) and bool(a == b)


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return ``value`` as a torch tensor that shares its memory, or None."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        try:
            return torch.as_tensor(value)
        except TypeError as e:
            raise CaptureError(f"an example array has no dtype of PyTorch: {e}") from e
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    return None


def describe(value: Any, name: str, leaves: list[tuple[str, torch.Tensor]]) -> Tree:
    """Append the tensors of ``value`` to ``leaves`` and return the structure around them.

    Raises CaptureError for a container or a value that cannot be part of a library's calling
    convention.
    """
    tensor = as_tensor(value)
    if tensor is not None:
        _check_tensor(tensor, name)
        leaves.append((name, tensor))
        return {"kind": "leaf", "index": len(leaves) - 1}
    if isinstance(value, _CONSTANT_TYPES):
        return {"kind": "const", "value": value}
    if isinstance(value, Mapping):
        bad = [k for k in value if not isinstance(k, str | int)]
        if bad:
            raise CaptureError(f"{name}: a dict key is {bad[0]!r}; use strings or integers")
        items = [describe(v, _join(name, k), leaves) for k, v in value.items()]
        return {"kind": "dict", "keys": list(value), "items": items}
    if isinstance(value, tuple | list):
        items = [describe(v, _join(name, i), leaves) for i, v in enumerate(value)]
        return {"kind": "list" if isinstance(value, list) else "tuple", "items": items}
    raise CaptureError(
        f"{name} is a {type(value).__name__}; expected tensors, numbers, strings, None, or"
        " tuples, lists and"
        " dicts of them. Pass the tensors it holds as arguments of their own"
    )


def _check_tensor(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor without plain elements in memory, or with elements that have no kernels."""
    got = "a meta tensor" if tensor.is_meta else None
    if tensor.layout != torch.strided:
        got = f"a tensor of layout {dtype_name(tensor.layout)}"
    elif tensor.is_complex() or tensor.is_quantized or tensor.dtype in _UNSIGNED:
        got = f"a tensor of {dtype_name(tensor.dtype)}"
    if got:
        raise CaptureError(
            f"{name} is {got}; a library's tensors are dense, on a device, and hold floating-point"
            " numbers, int8 to int64, uint8 or bool. Convert it outside the function, complex"
            " numbers with torch.view_as_real"
        )


def replace_tensors(value: Any, take: Callable[[], Any]) -> Any:
    """Copy ``value`` with each tensor, in order, replaced by what ``take`` returns."""
    if as_tensor(value) is not None:
        return take()
    if isinstance(value, Mapping):
        return {key: replace_tensors(v, take) for key, v in value.items()}
    if isinstance(value, tuple | list):
        items = [replace_tensors(v, take) for v in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """Name of a torch dtype as TVM spells it, or of a layout."""
    return str(dtype).removeprefix("torch.")


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _name(fn: object) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)

"""What a Python function refers to outside itself: closure cells, globals, modules it imports."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def names_in(code: types.CodeType) -> set[str]:
    """List the global and attribute names that a code object and those nested in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def referenced(fn: types.FunctionType) -> dict[str, Any]:
    """Map names to what ``fn`` closes over, its globals, and modules it imports when called."""
    out: dict[str, Any] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            out[name] = cell.cell_contents
        except ValueError:  # not yet filled
            out[name] = None
    for name in sorted(names_in(fn.__code__)):
        if name in fn.__globals__:
            out.setdefault(name, fn.__globals__[name])
        elif name in sys.modules:
            out.setdefault(name, sys.modules[name])
    return out


def unwrap(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a callable calls on: owners, bound arguments, references."""
    if isinstance(fn, functools.partial):
        yield from unwrap(fn.func)
        yield from ((f"argument {i}", value) for i, value in enumerate(fn.args))
        yield from fn.keywords.items()
    elif isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield from unwrap(fn.__func__)
    elif isinstance(fn, types.FunctionType):
        yield from referenced(fn).items()


def named_tensors(fn: Any, extra: Mapping[str, Any]) -> dict[int, str]:
    """Map the data pointer of each tensor that ``fn`` or ``extra`` reaches to a name."""
    out: dict[int, str] = {}
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> None:
        if id(value) in seen or depth > 6:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            out.setdefault(value.data_ptr(), name)
        elif isinstance(value, torch.nn.Module):
            for part, tensor in (*value.named_parameters(), *value.named_buffers()):
                out.setdefault(tensor.data_ptr(), f"{name}.{part}" if name else part)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                visit(f"{name}.{i}", item, depth + 1)
        elif isinstance(value, Mapping):
            for key, item in list(value.items()):
                visit(f"{name}.{key}", item, depth + 1)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            for part, item in unwrap(value):
                visit(part, item, depth + 1)
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
            for key, item in list(vars(value).items()):
                visit(f"{name}.{key}", item, depth + 1)

    for key, value in extra.items():
        visit(key, value, 0)
    visit("", fn, 0)
    return out

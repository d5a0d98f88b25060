"""Feeding a hash with any Python object: code by its bytecode, data by its content."""

from __future__ import annotations

import functools
import hashlib
import logging
import struct
import sys
import types
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from tvmcap.capture.references import names_in, referenced

_log = logging.getLogger("tvmcap")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


#: Names by which code reaches values that its bytecode does not name.
_BY_NAME = frozenset(
    {
        *("getattr", "attrgetter", "globals", "locals", "vars", "eval", "exec"),
        *("__import__", "import_module", "environ", "getenv", "open", "read_text", "read_bytes"),
        *("__dict__", "__getattribute__", "__globals__", "__builtins__"),
    }
)


class Walk:
    """Feeds a hash with objects.

    An object met again counts by the order in which it was first met.
    """

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, tuple[int, Any]] = {}

    def add(self, *parts: str | bytes) -> None:
        """Feed parts with their lengths, so that they cannot run into each other."""
        for part in parts:
            data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
            self.hash.update(struct.pack("<q", len(data)))
            self.hash.update(data)

    def visit(self, value: Any) -> None:
        """Feed any object."""
        if isinstance(value, _PLAIN):
            return self.add(type(value).__name__, repr(value))
        if isinstance(value, _TORCH_VALUES):
            return self.add("torch", repr(value))
        if id(value) in self.seen:
            return self.add("again", str(self.seen[id(value)][0]))
        self.seen[id(value)] = (len(self.seen), value)
        if isinstance(value, torch.Tensor):
            self.tensor(value)
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, types.MethodType):
            self.add("method")
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, functools.partial):
            self.add("partial")
            self.visit([value.func, list(value.args), dict(value.keywords)])
        elif isinstance(value, type):
            self.type(value)
        elif isinstance(value, Mapping):
            self.add("mapping", type(value).__qualname__, str(len(value)))
            for key, item in list(value.items()):
                self.visit(key)
                self.visit(item)
        elif isinstance(value, list | tuple):
            self.add(type(value).__qualname__, str(len(value)))
            for item in value:
                self.visit(item)
        elif isinstance(value, set | frozenset) and all(isinstance(item, _PLAIN) for item in value):
            self.add("set", *sorted(repr(item) for item in value))
        else:
            self.instance(value)

    def tensor(self, value: torch.Tensor) -> None:
        """Feed a tensor's dtype, shape, device type and bytes."""
        self.add("tensor", str(value.dtype), str(tuple(value.shape)), value.device.type)
        if value.layout != torch.strided or value.is_meta:
            return self.opaque(value)
        dense = value.detach().cpu().contiguous()
        self.add(
            memoryview(dense.reshape(-1).view(torch.uint8).numpy()).cast("B").tobytes()
            if dense.numel() < 1 << 16
            else _digest(dense)
        )

    def function(self, value: types.FunctionType) -> None:
        """Feed a library's function by name, another by bytecode and references."""
        if self.library(value):
            return
        self.add("function")
        self.code(value.__code__)
        self.visit([list(value.__defaults__ or ()), dict(value.__kwdefaults__ or {})])
        used = names_in(value.__code__)
        for name, item in referenced(value).items():
            self.add(name)
            if isinstance(item, types.ModuleType):
                self.module(item, used)
            else:
                self.visit(item)
        self.visit(dict(vars(value)))

    def module(self, value: types.ModuleType, used: set[str]) -> None:
        """Feed those members of a module that a function may use."""
        if self.library(value):
            return
        for name in sorted(used & set(vars(value))):
            item = vars(value)[name]
            self.add(name)
            if isinstance(item, types.ModuleType):
                self.module(item, used - {name})
            else:
                self.visit(item)

    def code(self, value: types.CodeType) -> None:
        """Feed bytecode and its constants; file names and line numbers do not count.

        Code that reaches values by name at run time never matches.
        """
        if not _BY_NAME.isdisjoint(value.co_names):
            self.opaque(value)
        self.add(
            value.co_code,
            repr((value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)),
        )
        self.add(
            repr(
                (
                    value.co_argcount,
                    value.co_kwonlyargcount,
                    value.co_posonlyargcount,
                    value.co_flags,
                )
            )
        )
        self.add(getattr(value, "co_exceptiontable", b""))
        for constant in value.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant)
            else:
                self.visit(constant)

    def type(self, value: type) -> None:
        """Feed a class: by name where a versioned library has it, else by its members and bases."""
        if self.library(value):
            return
        self.add("class", value.__qualname__)
        for name, item in sorted(vars(value).items()):
            if name in (
                "__dict__",
                "__weakref__",
                "__doc__",
                "__module__",
                "__firstlineno__",
                "__abstractmethods__",
            ):
                continue
            self.add(name)
            if isinstance(item, staticmethod | classmethod):
                item = item.__func__
            elif isinstance(item, property):
                item = [item.fget, item.fset]
            elif type(item).__name__ in ("member_descriptor", "getset_descriptor", "_abc_data"):
                continue
            self.visit(item)
        for base in value.__bases__:
            self.visit(base)

    def instance(self, value: Any) -> None:
        """Feed an instance by its class and attributes."""
        if self.library(value):
            return
        slots = [s for c in type(value).__mro__ for s in _slots(c) if hasattr(value, s)]
        if not hasattr(value, "__dict__") and not slots:
            return self.opaque(value)
        self.add("object")
        self.visit(type(value))
        self.visit({**{s: getattr(value, s) for s in slots}, **getattr(value, "__dict__", {})})

    def library(self, value: Any) -> bool:
        """Feed what a versioned library or the standard one defines by its name alone."""
        is_named = isinstance(value, type | types.ModuleType | types.FunctionType) or callable(
            value
        )
        name = (
            value.__name__
            if isinstance(value, types.ModuleType)
            else getattr(value, "__module__", None)
        )
        if isinstance(value, types.BuiltinFunctionType):
            owner = getattr(value, "__self__", None)
            self.add(
                "builtin",
                str(name),
                value.__qualname__,
                str(getattr(owner, "__name__", type(owner).__name__)),
            )
            return owner is None or isinstance(owner, types.ModuleType | type)
        qualified = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self.add("operator", str(value))
            return str(value).startswith(("aten", "prims"))
        if (
            not (is_named and isinstance(name, str) and isinstance(qualified, str))
            or "<locals>" in qualified
        ):
            return False
        version = _version(name.partition(".")[0])
        if version is None:
            return False
        self.add("library", name, qualified, version)
        return True

    def program(self, value: ExportedProgram) -> None:
        """Feed an exported program: code, signature, bounds, weights."""
        shapes_ = [str(n.meta.get("val")) for n in value.graph.nodes if n.op == "placeholder"]
        self.add(
            "program",
            str(value.graph),
            str(value.graph_signature),
            str(value.range_constraints),
            repr(shapes_),
        )
        self.visit(dict(value.state_dict))
        self.visit({k: v for k, v in value.constants.items() if isinstance(v, torch.Tensor)})

    def opaque(self, value: object) -> None:
        """Feed something unique, so that no key matches."""
        _log.debug("the compile cache cannot read %s; this build is not shared", type(value))
        self.add("opaque", uuid.uuid4().bytes)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (
        (slots,)
        if isinstance(slots, str)
        else tuple(s for s in slots if s not in ("__dict__", "__weakref__"))
    )


@functools.cache
def _version(root: str) -> str | None:
    """Version of a library whose code need not be read, or None for the user's own code."""
    module = sys.modules.get(root)
    if root == "__main__" or module is None:
        return None
    if root in sys.stdlib_module_names:
        return sys.version
    file = getattr(module, "__file__", None) or ""
    version = getattr(module, "__version__", None)
    return (
        str(version) if version and ("site-packages" in file or "dist-packages" in file) else None
    )


def _digest(dense: torch.Tensor) -> bytes:
    return hashlib.sha256(memoryview(dense.reshape(-1).view(torch.uint8).numpy())).digest()

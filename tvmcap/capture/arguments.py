"""Arguments of a call: which stay free, which are frozen, what an exported program says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from tvmcap.base.config import Dim
from tvmcap.base.errors import CaptureError, ConfigError
from tvmcap.capture.shapes import resolve
from tvmcap.capture.structure import Call, as_tensor, bind, describe, replace_tensors


@dataclass(frozen=True)
class BoundCall:
    """A function with its example arguments, some of them frozen.

    Attributes
    ----------
    fn: the user's function.
    call: all arguments.
    kept: positions of the arguments that stay free.
    """

    fn: Callable[..., Any]
    call: Call
    kept: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the free arguments."""
        return tuple(self.call.names[i] for i in self.kept)

    @property
    def values(self) -> tuple[Any, ...]:
        """Example values of the free arguments."""
        return tuple(self.call.values[i] for i in self.kept)

    @property
    def required(self) -> tuple[bool, ...]:
        """Whether a call must give each free argument."""
        return tuple(self.call.required[i] for i in self.kept)

    @property
    def frozen(self) -> dict[str, Any]:
        """Name to value of the frozen arguments."""
        return {
            n: v
            for i, (n, v) in enumerate(zip(self.call.names, self.call.values, strict=True))
            if i not in self.kept
        }

    def invoke(self, values: Sequence[Any]) -> Any:
        """Call the function with ``values`` for the free arguments."""
        merged = list(self.call.values)
        for position, value in zip(self.kept, values, strict=True):
            merged[position] = value
        return self.call.invoke(self.fn, merged)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in PyTorch with the free arguments by position or by name."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        examples = dict(zip(self.names, self.values, strict=True))
        return self.invoke([given.get(name, examples[name]) for name in self.names])

    def examples(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the free example values, positional and by keyword, as torch tensors."""
        rows = [(self.call.names[i], self.call.values[i], self.call.keyword[i]) for i in self.kept]
        return tuple(v for _, v, k in rows if not k), {n: v for n, v, k in rows if k}


def to_torch(value: Any, name: str) -> Any:
    """Copy the structure of ``value`` with numpy and DLPack tensors seen as torch tensors."""
    leaves: list[tuple[str, torch.Tensor]] = []
    describe(value, name, leaves)
    rest = iter([tensor for _, tensor in leaves])
    return replace_tensors(value, lambda: next(rest))


def checked(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any] | None, Mapping[str, Any] | None]:
    """Return the example arguments; ConfigError where they are no sequence or no mapping."""
    if args is not None and not isinstance(args, tuple | list):
        raise ConfigError(
            f"args is a {type(args).__name__}; expected a tuple of the example arguments, such as"
            " args=(x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"kwargs is a {type(kwargs).__name__}; expected a dict of name to example argument"
        )
    return args, kwargs


def freeze(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], constants: Sequence[str]
) -> BoundCall:
    """Bind the example arguments and take out those that ``constants`` names.

    An unknown name is a ConfigError.
    """
    if not callable(fn):
        raise CaptureError(
            f"got a {type(fn).__name__}; give a function, an nn.Module, an ExportedProgram or a"
            " .pt2 path"
        )
    call = bind(fn, args, kwargs)
    for name in constants:
        if name not in call.names:
            near = difflib.get_close_matches(name, call.names, n=1, cutoff=0.4)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"the arguments are: {', '.join(call.names)}"
            )
            raise ConfigError(f"constants: no argument {name!r}; {hint}")
    values = tuple(to_torch(v, n) for n, v in zip(call.names, call.values, strict=True))
    kept = tuple(i for i, name in enumerate(call.names) if name not in constants)
    return BoundCall(fn, replace(call, values=values), kept)


def program_dims(
    program: ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Mapping[Any, Mapping[int, str | Dim]] | None,
) -> dict[str, dict[int, Dim]]:
    """Read an exported program's dynamic dimensions; ``dynamic`` may name and bound them.

    Raises CaptureError for a dimension that the program fixed or made depend on others.
    """
    call = bind(program.module(check_guards=False), args, kwargs)
    leaves: list[tuple[str, torch.Tensor]] = []
    for name, value in zip(call.names, call.values, strict=True):
        describe(value, name, leaves)
    wanted = resolve(dynamic, call.names, leaves)
    values = [
        n.meta["val"]
        for n in program.graph.nodes
        if n.op == "placeholder" and n.name in _user_inputs(program)
    ]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if len(tensors) != len(leaves) or len(leaves) != sum(
        as_tensor(v) is not None for v in tree_leaves((args, kwargs))
    ):
        raise CaptureError(
            f"the exported program takes {len(tensors)} tensors, the example has {len(leaves)}"
        )
    names: dict[str, Dim] = {}
    out: dict[str, dict[int, Dim]] = {}
    for leaf, ((name, _), value) in enumerate(zip(leaves, tensors, strict=True)):
        for axis, size in enumerate(value.shape):
            label = wanted.where.get((leaf, axis))
            if isinstance(size, torch.SymInt):
                dim = _program_dim(
                    program, size, names, wanted.dims[label] if label else None, f"{name}_{axis}"
                )
                out.setdefault(name, {})[axis] = dim
            elif label:
                raise CaptureError(
                    f"{name}.shape[{axis}] is fixed at {size} in the exported program, so it"
                    f" cannot be {label!r}; export"
                    " it again with dynamic_shapes, or give the function itself"
                )
    return out


def _user_inputs(program: ExportedProgram) -> set[str]:
    return {str(name) for name in program.graph_signature.user_inputs}


def _program_dim(
    program: ExportedProgram, size: torch.SymInt, names: dict[str, Dim], dim: Dim | None, name: str
) -> Dim:
    symbol = size.node.expr
    if not symbol.is_symbol:
        raise CaptureError(
            f"{name}: the exported program ties this dimension to others ({symbol}); export it free"
        )
    if str(symbol) not in names:
        bounds = program.range_constraints[symbol]
        low = int(bounds.lower) if bounds.lower.is_finite and int(bounds.lower) > 2 else 1
        high = int(bounds.upper) if bounds.upper.is_finite and int(bounds.upper) < 1 << 40 else None
        label = dim.name if dim else name.replace(".", "_")
        given = dim if dim and dim != Dim(dim.name) else Dim(label, low, high)
        names[str(symbol)] = given
    return names[str(symbol)]

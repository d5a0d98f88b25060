"""The calling convention of a library: what goes in, what comes out, which sizes are free.

A signature is JSON inside the library's manifest, so the runtime needs neither torch nor TVM's
compiler to read it.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tvmcap.base.errors import LibraryError

Size = int | str
"""An extent: a number, a symbolic dimension's name, or (outputs only) arithmetic on such names."""

_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|float8_\w+")

Tree = dict[str, Any]
"""A nested structure of tensors.

``{"kind": "leaf", "index": 0}``, ``{"kind": "tuple" | "list", "items": [...]}``, ``{"kind": "dict",
"keys": [...], "items": [...]}`` or ``{"kind": "const", "value": ...}`` (None, bool, int, float,
str; with ``"required": True`` a call must give that value). ``index`` counts into
``Signature.inputs`` or ``Signature.outputs``.
"""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the calling convention.

    Attributes
    ----------
    name: the argument's name, dotted for nested ones (``"batch.mask"``); outputs are ``"out0"`` ...
    dtype: as in TVM: ``"float32"``, ``"bfloat16"``, ``"int64"``, ``"bool"`` ...
    shape: extents, outermost first.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class DimSpec:
    """A symbolic dimension with its inclusive bounds; ``max`` is None where there is none."""

    name: str
    min: int = 0
    max: int | None = None


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in flattened order, symbolic dimensions, and the two nested structures.

    ``in_tree`` is always a tuple of the positional arguments; ``arg_names`` names them for keyword
    calls.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[DimSpec, ...]
    in_tree: Tree
    out_tree: Tree
    arg_names: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Signature:
        """Read what ``to_json`` wrote.

        Raises LibraryError where a field is missing or of the wrong kind.
        """
        try:
            inputs, outputs = (tuple(map(_spec, data[key])) for key in ("inputs", "outputs"))
            signature = Signature(
                inputs=inputs,
                outputs=outputs,
                dims=tuple(map(_dim, data["dims"])),
                in_tree=_whole_tree(data["in_tree"], len(inputs)),
                out_tree=_whole_tree(data["out_tree"], len(outputs)),
                arg_names=tuple(_typed(name, str) for name in data["arg_names"]),
            )
            if signature.in_tree["kind"] != "tuple" or len(signature.arg_names) != len(
                signature.in_tree["items"]
            ):
                raise ValueError("in_tree is no tuple of the arguments")
            return signature
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise LibraryError(
                f"the signature in this library's manifest is malformed ({e!r}); build it again"
            ) from e


def _typed(value: Any, *types: type) -> Any:
    """Return ``value`` if its type is one of ``types``; else raise TypeError."""
    if type(value) not in types:
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    return value


def typed_size(value: Any) -> Size:
    """Return ``value`` if it can be a size; else raise TypeError or ValueError."""
    size: Size = _typed(value, int, str)
    if isinstance(size, int) and not 0 <= size < 1 << 63:
        raise ValueError(f"a size of {size}")
    return size


def _spec(data: Mapping[str, Any]) -> TensorSpec:
    if not _DTYPE.fullmatch(_typed(data["dtype"], str)):
        raise ValueError(f"there is no dtype {data['dtype']!r}")
    shape = tuple(map(typed_size, _typed(data["shape"], list, tuple)))
    return TensorSpec(_typed(data["name"], str), data["dtype"], shape)


def _dim(data: Mapping[str, Any]) -> DimSpec:
    most = _typed(data["max"], int, type(None))
    return DimSpec(_typed(data["name"], str), _typed(data["min"], int), most)


def _whole_tree(data: Any, count: int) -> Tree:
    """Return a nested structure that holds each of ``count`` tensors once; else raise."""
    found: list[int] = []
    tree = _tree(data, found)
    if sorted(found) != list(range(count)):
        raise ValueError(f"a structure of the tensors {found}, where there are {count}")
    return tree


def _tree(data: Any, found: list[int]) -> Tree:
    """Return a nested structure if it is one, and add its tensors to ``found``; else raise."""
    tree: Tree = _typed(data, dict)
    kind = tree["kind"]
    if kind == "leaf":
        found.append(_typed(tree["index"], int))
    elif kind == "const":
        _typed(tree["value"], bool, int, float, str, type(None))
    elif kind in ("tuple", "list", "dict"):
        for item in _typed(tree["items"], list, tuple):
            _tree(item, found)
        if kind == "dict":
            keys = [_typed(key, str, int) for key in _typed(tree["keys"], list, tuple)]
            if len(set(keys)) != len(tree["items"]):
                raise ValueError("keys and items differ in number")
    else:
        raise ValueError(f"there is no structure of kind {kind!r}")
    return tree


def flatten(tree: Tree, value: Any) -> list[Any]:
    """List the leaves of ``value`` in the order of ``tree``'s indices; constants pass unchecked."""
    leaves: list[tuple[int, Any]] = []
    _collect(tree, value, leaves)
    return [leaf for _, leaf in sorted(leaves, key=lambda pair: pair[0])]


def _collect(tree: Tree, value: Any, leaves: list[tuple[int, Any]]) -> None:
    kind = tree["kind"]
    if kind == "leaf":
        leaves.append((tree["index"], value))
    elif kind == "dict":
        for key, item in zip(tree["keys"], tree["items"], strict=True):
            _collect(item, value[key], leaves)
    elif kind in ("tuple", "list"):
        for item, part in zip(tree["items"], value, strict=True):
            _collect(item, part, leaves)


def unflatten(tree: Tree, leaves: list[Any]) -> Any:
    """Rebuild the nested structure from its leaves."""
    kind = tree["kind"]
    if kind == "leaf":
        return leaves[tree["index"]]
    if kind == "const":
        return tree["value"]
    items = [unflatten(item, leaves) for item in tree["items"]]
    if kind == "dict":
        return dict(zip(tree["keys"], items, strict=True))
    return tuple(items) if kind == "tuple" else items


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def evaluate(size: Size, dims: Mapping[str, int]) -> int:
    """Value of a size such as ``"B*4 + 1"``: ``+ - * // %``, ``min`` and ``max`` of ``dims``.

    Parsed, never executed: a manifest is untrusted. Raises LibraryError for anything else.
    """
    if isinstance(size, int):
        return size
    if size in dims:
        return dims[size]
    try:
        return _computed(size)(dims)
    # no arithmetic, or far too much of it
    except (SyntaxError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError,
            MemoryError) as e:  # fmt: skip
        why = f"{type(e).__name__}: {e}"
        raise LibraryError(
            f"cannot evaluate the size {reprlib.repr(size)} with {dict(dims)}: {why}"
        ) from e


def grows(size: Size) -> bool:
    """Whether a size, as ``evaluate`` reads it, is never smaller where its dimensions are larger.

    False where that cannot be told from how it is written. Extents are taken as not negative.
    """
    try:
        return isinstance(size, int) or _grows(ast.parse(size, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _grows(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and node.value >= 0
    if isinstance(node, ast.Name):
        return True
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Add | ast.Mult):
            return _grows(node.left) and _grows(node.right)
        known = isinstance(node.right, ast.Constant) and _grows(node.right)
        return known and isinstance(node.op, ast.Sub | ast.FloorDiv) and _grows(node.left)
    return isinstance(node, ast.Call) and all(map(_grows, node.args))


@functools.lru_cache(maxsize=4096)  # calls ask for the same sizes again and again
def _computed(size: str) -> Callable[[Mapping[str, int]], int]:
    """Return what computes a size from dims; raises what ``evaluate`` tells."""
    return _function(ast.parse(size, mode="eval").body)


def _function(node: ast.expr) -> Callable[[Mapping[str, int]], int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
        return lambda dims: value
    if isinstance(node, ast.Name):
        return operator.itemgetter(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _function(node.operand)
        return lambda dims: -operand(dims)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        apply, left, right = _ARITHMETIC[type(node.op)], _function(node.left), _function(node.right)
        return lambda dims: apply(left(dims), right(dims))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        choose, args = _CALLS[node.func.id], [_function(arg) for arg in node.args]
        return lambda dims: choose(*[arg(dims) for arg in args])
    raise TypeError(f"{ast.dump(node)} is not arithmetic on sizes")

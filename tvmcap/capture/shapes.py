"""Dynamic dimensions: from the user's names to torch.export's symbols and to Relax variables."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim as TorchDim

from tvmcap.base.config import Dim
from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.signature import evaluate

Leaves = Sequence[tuple[str, torch.Tensor]]

#: Example sizes tried in place of 0, 1 and sizes that coincide; divisible by what code tends to
#: divide by.
_EXAMPLES = (12, 24, 36, 48, 60, 72, 6, 10, 14, 18, 4, 8, 16, 3, 5, 7, 2)


_COMPARE = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Free:
    """The dynamic dimensions of a capture.

    Attributes
    ----------
    dims: name to bounds, in order of first appearance.
    where: (leaf index, axis) to name.
    """

    dims: Mapping[str, Dim]
    where: Mapping[tuple[int, int], str]


def resolve(
    dynamic: Mapping[Any, Mapping[int, str | Dim]] | None, names: Sequence[str], leaves: Leaves
) -> Free:
    """Find the tensors and axes that ``Config.dynamic`` speaks of.

    ``names`` are the arguments' names in order (an integer key counts into them). Raises
    ConfigError for an argument or an axis that does not exist, for bounds that contradict, and for
    example sizes that contradict a shared name.
    """
    dims: dict[str, Dim] = {}
    where: dict[tuple[int, int], str] = {}
    index = {name: i for i, (name, _) in enumerate(leaves)}
    for key, axes in (dynamic or {}).items():
        leaf = _find(key, names, index)
        name, tensor = leaves[leaf]
        if not isinstance(axes, Mapping):
            raise ConfigError(
                f"dynamic[{key!r}] is {axes!r}; give a dict of axis to name, such as {{0: 'B'}}"
            )
        for axis, value in axes.items():
            dim = Dim(value) if isinstance(value, str) else value
            if not isinstance(dim, Dim):
                raise ConfigError(
                    f"dynamic[{key!r}][{axis!r}] is {value!r}; give a name or a tvmcap.Dim"
                )
            if (
                isinstance(axis, bool)
                or not isinstance(axis, int)
                or not -tensor.ndim <= axis < tensor.ndim
            ):
                raise ConfigError(
                    f"dynamic[{key!r}]: axis {axis!r} does not exist; {name} has shape"
                    f" {tuple(tensor.shape)}, so"
                    f" its axes are 0 to {tensor.ndim - 1}"
                )
            dims[dim.name] = _merge(dims.get(dim.name), dim, is_plain=isinstance(value, str))
            where[leaf, axis % tensor.ndim] = dim.name
    free = Free(dims, where)
    _check_examples(free, leaves)
    return free


def _find(key: object, names: Sequence[str], index: Mapping[str, int]) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        if not 0 <= key < len(names):
            raise ConfigError(
                f"dynamic names argument {key}, but there are {len(names)}: {', '.join(names)}"
            )
        key = names[key]
    if key in index:
        return index[str(key)]
    parts = [name for name in index if name.startswith(f"{key}.")]
    if parts:
        raise ConfigError(
            f"dynamic: argument {key!r} holds several tensors; name one of them: {', '.join(parts)}"
        )
    if key in names:
        raise ConfigError(f"dynamic: argument {key!r} is not a tensor")
    near = difflib.get_close_matches(str(key), index, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(index)}"
    raise ConfigError(f"dynamic: no argument {key!r}; {hint}")


def _merge(old: Dim | None, new: Dim, is_plain: bool) -> Dim:
    if old is None or old == Dim(new.name):
        merged = new
    elif is_plain or old == new:
        merged = old
    else:
        raise ConfigError(
            f"dynamic: {new.name!r} has two sets of bounds: {old} and {new}; give one"
        )
    if merged.max is not None and merged.max < 2:
        raise ConfigError(
            f"dynamic: {new.name!r} has max={merged.max}; a dynamic dimension admits at least 2"
        )
    return merged


def _check_examples(free: Free, leaves: Leaves) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for (leaf, axis), name in free.where.items():
        label = f"{leaves[leaf][0]}.shape[{axis}]"
        size, dim = int(leaves[leaf][1].shape[axis]), free.dims[name]
        if name in seen and seen[name][0] != size:
            raise ConfigError(
                f"dynamic: {name!r} is {seen[name][0]} in {seen[name][1]} but {size} in {label}"
                " of the example;"
                " equal names are equal sizes, so use two names or mend the example"
            )
        seen.setdefault(name, (size, label))
        if dim.max is not None and size > dim.max:
            raise ConfigError(
                f"dynamic: {label} is {size} in the example, above the maximum {dim.max} of"
                f" {name!r}"
            )


def example_sizes(free: Free, leaves: Leaves) -> dict[str, int]:
    """Choose sizes to capture with: the example's unless 0, 1 or equal to another extent."""
    fixed = {
        int(size)
        for i, (_, tensor) in enumerate(leaves)
        for axis, size in enumerate(tensor.shape)
        if (i, axis) not in free.where
    }
    given = {name: int(leaves[leaf][1].shape[axis]) for (leaf, axis), name in free.where.items()}
    chosen: dict[str, int] = {}
    for name, size in given.items():
        dim, taken = free.dims[name], fixed | set(chosen.values())
        low, high = max(dim.min, 2), dim.max or 1 << 31
        multiples = [size * k for k in range(1, 8)] if size >= 2 else []
        options = [s for s in (*multiples, *_EXAMPLES, *range(low, low + 64)) if low <= s <= high]
        chosen[name] = next((s for s in options if s not in taken), options[0])
    return chosen


def given_sizes(free: Free, leaves: Leaves) -> dict[str, int]:
    """Return the example's own sizes, but for 0, 1 and sizes below the minimum."""
    chosen = example_sizes(free, leaves)
    for (leaf, axis), name in free.where.items():
        size = int(leaves[leaf][1].shape[axis])
        if size >= max(free.dims[name].min, 2):
            chosen[name] = size
    return chosen


def resize(free: Free, leaves: Leaves, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    """Return stand-ins of the chosen sizes; torch.export merges inputs that share memory."""
    out = []
    for i, (_, tensor) in enumerate(leaves):
        shape = [
            sizes[free.where[i, a]] if (i, a) in free.where else s
            for a, s in enumerate(tensor.shape)
        ]
        out.append(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))
    return tuple(out)


def torch_shapes(free: Free, leaves: Leaves) -> tuple[dict[int, Any], ...]:
    """Return torch.export's ``dynamic_shapes``, one dict a tensor."""
    dims = {name: TorchDim(name, min=d.min, max=d.max) for name, d in free.dims.items()}
    return tuple(
        {a: dims[free.where[i, a]] for a in range(tensor.ndim) if (i, a) in free.where}
        for i, (_, tensor) in enumerate(leaves)
    )


def _minimum(fact: str) -> list[str]:
    """Say from which minimum on a guard holds that some sizes of a dimension break."""
    found = re.search(r"values of (\w+) = (\S+) in .* guard (.+?) (!=|>=|<=|>|<) (.+?)\.?$", fact)
    if not found:
        return []
    name, label, left, sign, right = found.groups()
    sides = [side.replace(label, name).replace("M", "m") for side in (left, right)]
    holds = _COMPARE[sign]
    try:
        broken = [
            n for n in range(2, 4096) if not holds(*(evaluate(side, {name: n}) for side in sides))
        ]
    except LibraryError:
        return []
    if not broken or broken[-1] == 4095:
        return []
    return [f"use {name} = tvmcap.Dim({name!r}, min={broken[-1] + 1}), which admits it"]


def explain_violation(text: str, names: Sequence[str]) -> str:
    """Turn torch.export's "Constraints violated" into what must hold, and the cure."""

    def label(match: re.Match[str]) -> str:
        return f"{names[int(match[1])]}.shape[{match[2]}]"

    body = text.split("The error above occurred")[0]
    body = re.sub(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]", label, body)
    facts = re.findall(r"^\s*- (.*)$", body.split("Suggested fixes:")[0], re.M)
    facts = [re.sub(r" If you're using mark_dynamic.*$", "", fact) for fact in facts]
    cures = [cure for fact in facts for cure in _minimum(fact)]
    for name, value in re.findall(
        r"^\s+(\w+) = (.+)$", body.partition("Suggested fixes:")[2], re.M
    ):
        if value.isdigit():
            cures.append(f"leave {name} out of dynamic (your code fixes it at {value})")
        elif value.isidentifier():
            cures.append(f"use the name {value!r} for {name} too: they must be equal")
        elif value.startswith("Dim(") and not name.startswith("_"):
            cures.append(f"use {name} = tvmcap.{value}")
        elif not value.startswith("Dim("):
            cures.append(
                f"{name} = {value} must hold: pass the tensor with that dimension split, or make"
                " it static"
            )
    listed = "".join(f"\n  - {fact}" for fact in facts[:8]) or f"\n  {body.strip()[:500]}"
    return (
        f"the code does not hold for every size of the dynamic dimensions:{listed}\nWhat to do: "
        + ("; ".join(cures) or "make the dimension static or change the code")
    )

"""Code that reads how its arguments lie in memory: strides, storage offsets, ``as_strided``.

A library takes each argument as a contiguous tensor of its own, so what such code computes must
not follow from any other layout. Reads are rare; only where there is one, the function runs twice
more, without data, on arguments that lie otherwise, and must make the same calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tvmcap.base.errors import CaptureError
from tvmcap.capture import source

_STRIDED = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
_OFFSETS = {"as_strided_scatter": 4}  # where else than fourth the storage offset stands
_ASKED = ("stride", "is_contiguous", "storage_offset")
_PLAIN = (bool, int, float, complex, str, slice, type(None), torch.dtype, torch.memory_format)

_STRIDES = "call .contiguous() on the tensor first"
_OFFSET = "leave the storage offset out, or call .clone() on the tensor first"


class Reads(TorchFunctionMode):  # type: ignore[misc]
    """Notes the calls that the user's code makes of PyTorch while it is entered.

    Attributes
    ----------
    found: name and source line of each call that reads how a tensor lies in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a call, which sees no mode, and note it where it reads a layout."""
        if _name(func) in (*_STRIDED, *_ASKED):
            self.found.append((_name(func), source.here()))
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Lists all calls with their numbers and tensors, but for those that only ask for a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a call and note it."""
        name, kwargs = _name(func), kwargs or {}
        if name in _ASKED:
            return func(*args, **kwargs)
        if name == "contiguous":  # the same values
            result = func(*args, **kwargs)
            self._know(result, self._number(args[0]))
            return result
        given = [self._told(leaf) for leaf in tree_leaves((args, kwargs))]
        self.made.append((name, *given, *(_layout(name, args, kwargs) if name in _STRIDED else ())))
        try:
            result = func(*args, **kwargs)
        except RuntimeError:  # a library, whose tensor is contiguous, has the view
            if name != "view":
                raise
            result = args[0].reshape(*args[1:], **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._number(leaf)
        return result

    def _told(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return "tensor", self._number(leaf)
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__

    def _number(self, tensor: torch.Tensor) -> int:
        return self._know(tensor, len(set(self._numbers.values())))

    def _know(self, tensor: torch.Tensor, number: int) -> int:
        self._alive.append(tensor)  # the id of a tensor that is gone can be another's
        return self._numbers.setdefault(id(tensor), number)


def check(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], found: Sequence[tuple[str, str]]
) -> None:
    """Refuse a function that does something else where its inputs lie otherwise in memory.

    ``found`` are the reads of ``Reads``; without any there is nothing to do. Raises CaptureError.
    """
    if not found:
        return
    plain = _calls(fn, inputs, lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device))
    for lay, advice in ((_turned, _STRIDES), (_shifted, _OFFSET)):
        other = _calls(fn, inputs, lay)
        count = len(other.made)
        if other.made != plain.made[:count]:
            raise CaptureError(_refusal(found, advice))


def _refusal(found: Sequence[tuple[str, str]], advice: str) -> str:
    places = dict.fromkeys(f"{name}{' at ' + line if line else ''}" for name, line in found)
    listed = "".join(f"\n  - {place}" for place in itertools.islice(places, 4))
    return (
        "the result depends on how the arguments lie in memory, and a library takes each as a"
        f" contiguous tensor of its own; the code reads strides or offsets here:{listed}\n"
        f"What to do: {advice}"
    )


def _calls(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> _Calls:
    """Run a function on stand-ins without data; what it refuses of a layout ends the list."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        stand_ins = [lay(tensor) for tensor in inputs]
        calls = _Calls()
        with contextlib.suppress(RuntimeError), calls:
            fn(*stand_ins)
    return calls


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in whose first axis is the innermost, with a gap after each element."""
    back = tuple(reversed(range(tensor.dim())))
    base = torch.empty(
        (*(tensor.shape[axis] for axis in back), 2), dtype=tensor.dtype, device=tensor.device
    )
    return base[..., 0].permute(back)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous stand-in that is not the start of its memory."""
    shape = (2, *tensor.shape)
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)[1]


def _layout(name: str, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
    """Say what a strided call reads: the strides, and the offset where it names a place."""
    tensor = args[0] if args else kwargs["input"]
    last = args[_OFFSETS.get(name, 3) :]
    named = (last[0] if last else kwargs.get("storage_offset")) is not None
    return (tuple(tensor.stride()), tensor.storage_offset() if named else None)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", "")).split(".")[0]

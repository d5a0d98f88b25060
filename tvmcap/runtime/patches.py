"""Where the addresses of a call's tensors stand among the parameters of captured kernels.

A call is captured twice, the second time with every address moved by an amount of its own. A word
of a parameter that moved by the amount of one tensor holds an address in that tensor; anything else
that differs is not understood, and the capture cannot be used with other addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORD = 8
#: Bytes of a CUtensorMap (cuda.h), the descriptor of a tensor for bulk copies.
TENSOR_MAP = 128


@dataclass(frozen=True)
class Kernel:
    """A captured kernel: what identifies it and its launch, and the bytes of each parameter."""

    identity: tuple[int, ...]
    params: tuple[bytes, ...]


@dataclass(frozen=True)
class Slot:
    """One address among a kernel's parameters.

    Attributes
    ----------
    kernel, param, at: which parameter of which kernel, and the byte in it.
    tensor: which tensor of the call; ``offset`` is the distance from its start in bytes.
    is_map: the parameter is a descriptor, whose address the driver replaces.
    """

    kernel: int
    param: int
    at: int
    tensor: int
    offset: int
    is_map: bool


class NotUnderstoodError(Exception):
    """Two captures differ in a way that moved addresses do not explain."""


#: (a descriptor, a new address) -> the descriptor with that address.
Replace = Callable[[bytes, int], bytes]


def learn(
    first: Sequence[Kernel],
    second: Sequence[Kernel],
    addresses: Sequence[int],
    moved: Sequence[int],
    replace: Replace,
) -> list[Slot]:
    """Find every address in ``first``, given that ``second`` was captured with ``moved`` ones.

    Raises NotUnderstoodError where the captures do not match.
    """
    if [k.identity for k in first] != [k.identity for k in second]:
        raise NotUnderstoodError("the kernels launched depend on the addresses")
    by_distance = {new - old: i for i, (old, new) in enumerate(zip(addresses, moved, strict=True))}
    slots = []
    for number, (before, after) in enumerate(zip(first, second, strict=True)):
        for param, (old, new) in enumerate(zip(before.params, after.params, strict=True)):
            if old == new:
                continue
            find = _find_map if len(old) == TENSOR_MAP else _find_words
            for at, tensor, offset in find(old, new, addresses, by_distance, replace):
                is_map = find is _find_map
                slots.append(Slot(number, param, at, tensor, offset, is_map))
    return slots


def _find_words(
    old: bytes, new: bytes, addresses: Sequence[int], by_distance: dict[int, int], _: Replace
) -> list[tuple[int, int, int]]:
    found = []
    for at in range(0, len(old), WORD):
        was, now = (int.from_bytes(data[at : at + WORD], "little") for data in (old, new))
        if was == now:
            continue
        tensor = by_distance.get(now - was)
        if tensor is None or len(old) - at < WORD:
            raise NotUnderstoodError("a parameter depends on the addresses in an unknown way")
        found.append((at, tensor, was - addresses[tensor]))
    return found


def _find_map(
    old: bytes, new: bytes, addresses: Sequence[int], by_distance: dict[int, int], replace: Replace
) -> list[tuple[int, int, int]]:
    """Find the tensor of a descriptor: the driver's own replacement must give ``new``."""
    was, now = (int.from_bytes(data[:WORD], "little") for data in (old, new))
    tensor = by_distance.get(now - was)
    if tensor is None or replace(old, now) != new:
        raise NotUnderstoodError("a tensor map depends on the addresses in an unknown way")
    return [(0, tensor, was - addresses[tensor])]

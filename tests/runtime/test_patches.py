"""Addresses among the parameters of kernels are found by moving them, or it is said why not."""

from __future__ import annotations

import random

import pytest

from tvmcap.runtime.patches import TENSOR_MAP, Kernel, NotUnderstoodError, Slot, learn

ADDRESSES = [0x7F0000001000, 0x7F0000002000, 0x7F0000001000]
MOVED = [a + 4096 * (i + 1) for i, a in enumerate(ADDRESSES)]
OTHER = b"\x11" * (TENSOR_MAP - 8)


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def replace(tensor_map: bytes, address: int) -> bytes:
    return word(address) + tensor_map[8:]


def kernels(a: list[int], identity: int = 1) -> list[Kernel]:
    """One with pointers, a pointer into a tensor and a struct; one with a tensor map."""
    struct = b"\x05" * 8 + word(a[2]) + b"\x07\x00\x00\x00"
    return [
        Kernel((identity, 2), (word(a[0]), word(a[1] + 640), b"\x03\x00\x00\x00", struct)),
        Kernel((3,), (word(a[1]) + OTHER, word(0x123456789))),
    ]


def test_pointers_offsets_structs_and_tensor_maps() -> None:
    slots = learn(kernels(ADDRESSES), kernels(MOVED), ADDRESSES, MOVED, replace)
    assert slots == [
        Slot(0, 0, 0, 0, 0, False),
        Slot(0, 1, 0, 1, 640, False),
        Slot(0, 3, 8, 2, 0, False),
        Slot(1, 0, 0, 1, 0, True),
    ]


def test_random_parameters_are_rebuilt_from_the_slots() -> None:
    draw = random.Random(7)
    for _ in range(50):
        base = [draw.randrange(1 << 40, 1 << 47) & ~15 for _ in range(4)]
        moved = [a + 4096 * (i + 1) for i, a in enumerate(base)]
        later = [draw.randrange(1 << 40, 1 << 47) & ~15 for _ in base]
        plan = [[(draw.randrange(4), 16 * draw.randrange(9)) for _ in range(3)] for _ in range(3)]

        def at(a: list[int], plan: list[list[tuple[int, int]]] = plan) -> list[Kernel]:
            return [Kernel((i,), tuple(word(a[t] + o) for t, o in k)) for i, k in enumerate(plan)]

        want = at(later)
        params = [list(k.params) for k in at(base)]
        for slot in learn(at(base), at(moved), base, moved, replace):
            params[slot.kernel][slot.param] = word(later[slot.tensor] + slot.offset)
        assert [tuple(p) for p in params] == [k.params for k in want]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (lambda: kernels(MOVED, identity=9), "depend on the addresses"),
        (lambda: kernels(MOVED)[:1], "depend on the addresses"),
        (lambda: kernels([a + 8 for a in MOVED]), "unknown way"),
    ],
)
def test_what_moved_addresses_do_not_explain(second, why: str) -> None:
    with pytest.raises(NotUnderstoodError, match=why):
        learn(kernels(ADDRESSES), second(), ADDRESSES, MOVED, replace)


def test_a_tensor_map_that_hides_more_of_the_address() -> None:
    first, second = kernels(ADDRESSES), kernels(MOVED)
    changed = second[1].params[0][:-1] + b"\x12"
    second[1] = Kernel(second[1].identity, (changed, second[1].params[1]))
    with pytest.raises(NotUnderstoodError, match="tensor map"):
        learn(first, second, ADDRESSES, MOVED, replace)

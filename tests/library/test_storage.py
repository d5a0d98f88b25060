"""Storage: never two tensors that are alive together in one; sizes and their symbolic factors."""

from __future__ import annotations

import random

import pytest
from tvm import tirx

from tvmcap.base.signature import evaluate
from tvmcap.library.storage import Slot, assign, split_bytes, unit_text


@pytest.mark.parametrize("seed", range(20))
def test_no_two_live_tensors_share_storage(seed) -> None:
    draw = random.Random(seed)
    units = [(), (tirx.Var("B", "int64"),)]
    slots = []
    for _ in range(draw.randint(1, 30)):
        start = draw.randint(0, 20)
        slots.append(
            Slot(draw.randint(1, 3000), draw.choice(units), start, start + draw.randint(0, 6))
        )
    storages = assign(slots)
    for i, storage in enumerate(storages):
        mine = [s for s in slots if s.storage == i]
        assert mine == sorted(storage.slots, key=slots.index)
        assert storage.size == max(s.size for s in mine)
        assert len({str(s.unit) for s in mine}) == 1
        for a in mine:
            assert all(a is b or a.end < b.start or b.end < a.start for b in mine)
    for unit in units:
        own = [s for s in slots if s.unit == unit]
        total = sum(s.size for s in storages if s.unit == unit)
        assert total <= sum(s.size for s in own)
        assert total >= max(
            (sum(s.size for s in own if s.start <= t <= s.end) for t in range(30)), default=0
        )


def test_split_bytes() -> None:
    b, t = tirx.Var("B", "int64"), tirx.Var("T", "int64")
    assert split_bytes((3, 5), "float32") == (60, ())
    assert split_bytes((16, 5), "float32") == (320, ())
    assert split_bytes((), "float16") == (2, ())
    size, unit = split_bytes((b, 8, t, 4), "bfloat16")
    assert size == 64 and [u.name for u in unit] == ["B", "T"]
    assert evaluate(unit_text(unit), {"B": 3, "T": 5}) == 15
    size, unit = split_bytes((b * 4, 32), "float32")
    assert size == 512 and unit == (b,)
    size, unit = split_bytes((tirx.max(b + 1, t // 2), tirx.floormod(t, 3) - b), "int8")
    assert size == 1 and evaluate(unit_text(unit), {"B": 2, "T": 8}) == 4 * (2 - 2)
    assert evaluate(unit_text(unit), {"B": 1, "T": 8}) == 4 * (2 - 1)

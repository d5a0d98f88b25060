"""A library whose manifest was edited, its checksum made to fit: our errors, and no crash."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tvmcap
from tvmcap.base import manifest
from tvmcap.base.errors import TvmcapError

ABSENT = object()
ODD: tuple[Any, ...] = (
    *(ABSENT, None, True, 0, -1, 7, 1 << 31, 1 << 63, 10**30, 1.5),
    *("", "B", "1/0", "B*1000000", "__import__('os')", "float64", "bogus", "../x"),
    *([], {}, [1], [None], {"kind": "leaf", "index": 5}, {"kind": "const"}),
)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of nested JSON."""
    if at:
        yield at
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield from places(data[key], (*at, key))


def edited(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    data = part = copy.deepcopy(data)
    for key in at[:-1]:
        part = part[key]
    if value is ABSENT:
        del part[at[-1]]
    else:
        part[at[-1]] = value
    return data


def use(path: Path) -> None:
    lib = tvmcap.load(path)
    try:
        x, w = np.ones((3, 8), np.float32), np.ones((8, 8), np.float32)
        lib(x, w)
        lib.bind("x", x)
        lib.bind("w", w)
        lib.run()
    finally:
        lib.close()


def test_any_field_may_hold_anything(chain: Path, tmp_path: Path) -> None:
    whole, path = chain.read_bytes(), tmp_path / "edited.so"
    size = manifest._FOOTER.size
    _, json_size, elf_size, _ = manifest._FOOTER.unpack(whole[-size:])
    elf, told = whole[:elf_size], json.loads(whole[elf_size : elf_size + json_size])
    edits = [(at, value) for at in places(told) for value in ODD]
    refused = 0
    for at, value in random.Random().sample(edits, 400):
        text = json.dumps(edited(told, at, value)).encode()
        digest = hashlib.sha256(elf + text).digest()
        footer = manifest._FOOTER.pack(manifest.MAGIC, len(text), elf_size, digest)
        path.unlink(missing_ok=True)
        path.write_bytes(elf + text + footer)
        try:
            use(path)
        except TvmcapError:
            refused += 1
        except Exception as e:
            raise AssertionError(f"{at} = {value!r}") from e
    assert refused > 100

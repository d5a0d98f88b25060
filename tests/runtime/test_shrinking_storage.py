"""Storages that are larger where a bounded dimension is smaller: the arena fits every call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tvmcap
from tests import libs

Program = Callable[[torch.Tensor], torch.Tensor]
MOST = 62


def rest(x: torch.Tensor) -> torch.Tensor:
    """Return what the rows that are missing to 64 give: two products with an intermediate each."""
    return _products(x, 64 - x.shape[0])


def quotient(x: torch.Tensor) -> torch.Tensor:
    """Return the same for 1000 rows over those of ``x``."""
    return _products(x, 1000 // x.shape[0])


def remainder(x: torch.Tensor) -> torch.Tensor:
    """Return the same for a number of rows that rises and falls."""
    return _products(x, x.shape[0] % 9 + 2)


def _products(x: torch.Tensor, rows: int) -> torch.Tensor:
    filled = x.new_zeros(rows, 4) + x.sum(0)
    return torch.tanh(filled @ torch.ones(4, 8)) @ torch.ones(8, 4)


@pytest.mark.parametrize("fn", [rest, quotient, remainder])
def test_every_size_has_its_memory(fn: Program) -> None:
    dims = {"x": {0: tvmcap.Dim("B", min=2, max=MOST)}}
    lib = libs.quick(fn, torch.rand(9, 4), dynamic=dims)
    for rows in (MOST, 4, 60, 17, 2, 3, MOST):
        x = libs.values(rows, 4) / 8
        torch.testing.assert_close(lib(x), fn(x))
        arena = lib.executor._threads.here.arena
        held = zip(arena.storages, arena.needs({"B": rows}), strict=True)
        assert all(storage.shape[0] >= need for storage, need in held)
    assert lib.manifest.peak_bytes is None

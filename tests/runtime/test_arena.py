"""The arena: made once for the largest batch, or grown and counted, and what kernels write to."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmcap
from tests.runtime.conftest import three_layers
from tvmcap.base.errors import LibraryError
from tvmcap.runtime import arena
from tvmcap.runtime.executor import Executor
from tvmcap.runtime.loader import empty

Layers = Callable[[int | None], Path]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the storages that arenas make from now on."""
    storages: list[Any] = []

    def make(*args: Any) -> Any:
        storages.append(empty(*args))
        return storages[-1]

    monkeypatch.setattr(arena, "empty", make)
    return storages


def test_bounded_sizes_are_planned_at_load(layers: Layers) -> None:
    run = Executor(layers(64))
    assert run.counts.arena_bytes == 64 * 8 * 4 * 2  # two intermediates
    w = torch.rand(8, 8)
    for rows in (1, 64, 5, 64):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(run(x, w), three_layers(x, w))
    assert run.counts.growths == 0


def test_without_bounds_it_grows_and_counts(layers: Layers) -> None:
    run, w = Executor(layers(None)), torch.rand(8, 8)
    seen = []
    for rows in (4, 3, 4, 5, 8, 9, 100, 1, 150, 400):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(run(x, w), three_layers(x, w))
        seen.append((run.counts.arena_bytes // 64, run.counts.growths))
    assert seen == [
        *[(4, 0)] * 3,
        *[(8, 1)] * 2,
        (16, 2),
        *[(100, 3)] * 2,
        (200, 4),
        (400, 5),
    ]


@pytest.mark.parametrize("most", [64, None])
def test_random_sizes_share_storages_once_the_largest_was_seen(
    layers: Layers, made: list[Any], most: int | None
) -> None:
    draw, w = random.Random(5), torch.rand(8, 8)
    run = Executor(layers(most))
    held = run._threads.here.arena
    sets = {n: (torch.rand(n, 8), torch.empty(n, 8)) for n in (64, *range(1, 33))}
    run(sets[64][0], w, out=sets[64][1])
    assert len(made) == 2
    for _ in range(300):
        x, out = sets[draw.choice(list(sets))]
        run(x, w, out=out)
        assert held.tail[-3:-1] == held.storages and held.tail[-1] == 0
    torch.testing.assert_close(out, three_layers(x, w))
    assert [id(s) for s in held.storages] == [id(s) for s in made]
    if most is None:
        run(torch.rand(65, 8), w)
        assert len(made) == 4 and [id(s) for s in held.storages] == [id(s) for s in made[2:]]


def test_kernels_write_their_intermediates_to_the_storages(layers: Layers, made: list[Any]) -> None:
    run, x, w = Executor(layers(64)), torch.rand(5, 8), torch.rand(8, 8)
    held = [torch.from_dlpack(storage) for storage in made]
    for storage in held:
        storage.fill_(255)
    first = torch.relu(x @ w)
    torch.testing.assert_close(run(x, w), three_layers(x, w))
    found = [storage[: first.nbytes].view(torch.float32).view(5, 8) for storage in held]
    torch.testing.assert_close(found, [first, torch.relu(first @ w)])
    assert all((storage[first.nbytes :] == 255).all() for storage in held)


def test_main_still_allocates_for_callers_of_the_runtime_alone(layers: Layers) -> None:
    run = Executor(layers(64))
    vm = run._library.new_vm()
    x, w, out = torch.rand(5, 8), torch.rand(8, 8), torch.empty(5, 8)
    vm["main"](x, w, out)
    torch.testing.assert_close(out, three_layers(x, w))
    assert run.trace(x, w).intermediate_bytes == 2 * 5 * 8 * 4


@pytest.mark.parametrize("shared", [True, False])
def test_every_thread_has_its_own(layers: Layers, shared: bool) -> None:
    """Of one library, and of one that it loaded itself from the same file."""
    one, w = Executor(layers(64)), torch.rand(8, 8)
    wrong: list[int] = []
    places: list[int] = []
    waiting = threading.Barrier(4)

    def work(seed: int) -> None:
        run = one if shared else Executor(layers(64))
        places.extend(storage.data_ptr() for storage in run._threads.here.arena.storages)
        waiting.wait(20)
        make = torch.Generator().manual_seed(seed)
        for rows in torch.randint(1, 65, (50,), generator=make).tolist():
            x = torch.rand(rows, 8, generator=make)
            if not torch.allclose(run(x, w), three_layers(x, w)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(set(places)) == len(places) == 8


def test_no_memory_is_said_with_the_sizes(tmp_path: Path) -> None:
    huge = {"x": {0: tvmcap.Dim("B", min=1, max=1 << 50)}}
    args = torch.rand(4, 8), torch.rand(8, 8)
    with pytest.raises(LibraryError, match=r"no memory for intermediates.*'B': 1125899906842624"):
        tvmcap.build(three_layers, args, target="llvm", tune="none", verify=False, dynamic=huge)(
            *args
        )

"""The arena: made once for the largest batch, or grown and counted; calls allocate nothing else."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

import tvmcap
from tests.runtime.conftest import three_layers
from tvmcap.base.errors import LibraryError
from tvmcap.runtime.executor import Executor

Layers = Callable[[int | None], Path]


def allocations(run: Executor, call: Callable[[], Any]) -> int:
    """Count what the virtual machine allocates in ``call``."""
    seen: list[str] = []

    def observe(function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        seen.extend([symbol] * (before and symbol == "vm.builtin.alloc_storage"))
        return 0

    machine = run._threads.here.arena.vm
    machine["set_instrument"](tvm_ffi.convert(observe))
    try:
        call()
    finally:
        machine["set_instrument"](None)
    return len(seen)


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


def test_random_sizes_allocate_nothing_once_the_largest_was_seen(layers: Layers) -> None:
    draw, w = random.Random(5), torch.rand(8, 8)
    for most in (64, None):
        run = Executor(layers(most))
        sets = {n: (torch.rand(n, 8), torch.empty(n, 8)) for n in (64, *range(1, 33))}

        def some(run: Executor = run, sets: Any = sets) -> None:
            for _ in range(300):
                x, out = sets[draw.choice(list(sets))]
                run(x, w, out=out)

        run(sets[64][0], w, out=sets[64][1])
        assert allocations(run, some) == 0
        assert run.counts.growths == 0


def test_main_still_allocates_for_callers_of_the_runtime_alone(layers: Layers) -> None:
    run = Executor(layers(64))
    vm = run._library.new_vm()
    x, w, out = torch.rand(5, 8), torch.rand(8, 8), torch.empty(5, 8)
    vm["main"](x, w, out)
    torch.testing.assert_close(out, three_layers(x, w))
    assert run.trace(x, w).intermediate_bytes == 2 * 5 * 8 * 4


def test_every_thread_has_its_own(layers: Layers) -> None:
    run, w = Executor(layers(64)), torch.rand(8, 8)
    wrong: list[int] = []

    def work(seed: int) -> None:
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
    assert not wrong


def test_no_memory_is_said_with_the_sizes(tmp_path: Path) -> None:
    huge = {"x": {0: tvmcap.Dim("B", min=1, max=1 << 50)}}
    args = torch.rand(4, 8), torch.rand(8, 8)
    with pytest.raises(LibraryError, match=r"no memory for intermediates.*'B': 1125899906842624"):
        tvmcap.build(three_layers, args, target="llvm", tune="none", verify=False, dynamic=huge)(
            *args
        )

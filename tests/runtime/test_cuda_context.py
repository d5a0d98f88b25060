"""The context of a thread that calls a GPU's library, on a CPU's code and CUDA that is none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.fake_cuda import FakeCuda
from tvmcap.runtime import checker
from tvmcap.runtime.buckets import Buckets
from tvmcap.runtime.context import CudaContext
from tvmcap.runtime.executor import Executor
from tvmcap.runtime.graphs import Graphs

Layers = Callable[[int | None], Path]


class Ordering(FakeCuda):
    """Writes down which streams wait for which."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def order(self, before: int, after: int) -> None:
        self.log.append((before, after))


def on_gpu(path: Path) -> tuple[Executor, Any, Ordering]:
    """Return an executor whose calling thread has a ``CudaContext``, that, and its CUDA."""
    run, cuda = Executor(path), Ordering()
    machine = SimpleNamespace(
        cuda=cuda, library=run._library, vm=run._library.new_vm(), lock=threading.RLock()
    )
    context: Any = CudaContext(machine, run.manifest)  # type: ignore[arg-type]
    context._stream, context._captures = (lambda _: 0), (lambda: False)
    run._threads.here = context
    run._contexts._all.add(context)
    return run, context, cuda


def with_graphs(context: Any, cuda: FakeCuda) -> Any:
    context.graphs = Graphs(cuda, cuda.record, 10**6)  # type: ignore[arg-type]
    return context.graphs


def test_what_a_caller_captures_keeps_its_arena(layers: Layers, w: torch.Tensor) -> None:
    run, context, _ = on_gpu(layers(None))
    context._stream, context._captures = (lambda _: 1), (lambda: True)
    run(torch.rand(4, 8), w)
    captured = context.arena.storages
    for _ in range(3):
        run(torch.rand(4, 8), w)
    context._captures = lambda: False
    run(torch.rand(400, 8), w)
    assert context.arena.storages is not captured
    assert len(context._lent) == 1 and context._lent[0] is captured
    run.close()
    assert not context._lent


def test_calls_on_other_streams_wait_for_what_they_share(layers: Layers, w: torch.Tensor) -> None:
    run, context, cuda = on_gpu(layers(64))
    for stream in (1, 1, 2, 2, 1):
        context._stream = lambda _, stream=stream: stream
        run(torch.rand(3, 8), w)
    assert cuda.log == [(1, 2), (2, 1)]


def test_the_slots_of_a_bucket_are_written_after_the_last_call(
    chain: Path, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, context, cuda = on_gpu(chain)  # without intermediates: only the slots are shared
    run._buckets, run._quick = Buckets(run.signature, (4, 16)), False
    whole = run._buckets.call
    monkeypatch.setattr(
        run._buckets, "call", lambda *args: (cuda.log.append("slots"), whole(*args))[1]
    )
    for stream in (1, 2, 2, 1):
        context._stream = lambda _, stream=stream: stream
        x = torch.rand(3, 8)
        torch.testing.assert_close(run(x, w), x @ w @ w)
    assert cuda.log == ["slots", (1, 2), "slots", "slots", (2, 1), "slots"]


def test_many_sizes_need_no_more_captures_than_buckets(
    chain: Path, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "_PLANS_KEPT", 8)
    run, context, cuda = on_gpu(chain)
    graphs = with_graphs(context, cuda)
    run._buckets, run._quick = Buckets(run.signature, (64, 128)), False
    run._buckets._compared = {64, 128}  # the replays compute nothing to compare
    draw = random.Random()
    for _ in range(200):
        run(torch.rand(draw.randint(1, 128), 8), w)
    assert graphs.captures == 2 and graphs.replays >= 190


def test_sizes_that_cannot_be_recorded_are_not_remembered_for_ever(
    chain: Path, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmcap.runtime.graphs._SEEN_KEPT", 8)
    run, context, cuda = on_gpu(chain)
    graphs = with_graphs(context, cuda)
    cuda.refuse = "no memory"
    for rows in range(1, 20):
        for _ in range(3):
            x = torch.rand(rows, 8)
            torch.testing.assert_close(run(x, w), x @ w @ w)
    assert len(graphs) == 8 and graphs.fallbacks["no memory"] == 38


def test_closing_waits_for_a_replay_of_another_thread(chain: Path, w: torch.Tensor) -> None:
    run, context, cuda = on_gpu(chain)
    with_graphs(context, cuda)
    x, launch, alive = torch.rand(3, 8), cuda.launch_raw, []

    def close_meanwhile(replay: int, stream: int) -> int:
        closing = threading.Thread(target=run.close)
        closing.start()
        closing.join()
        alive.append(replay in cuda.executables)
        return launch(replay, stream)

    for _ in range(2):
        run(x, w)
    context.graphs._launch = close_meanwhile
    run(x, w)
    assert alive == [True]
    assert not cuda.executables and context.graphs is None


def test_a_watched_call_holds_the_lock_of_the_virtual_machine(
    layers: Layers, w: torch.Tensor
) -> None:
    run, context, _ = on_gpu(layers(64))
    free: list[bool] = []

    def look() -> None:
        free.append(context._lock.acquire(blocking=False))
        if free[-1]:
            context._lock.release()

    def from_another_thread(name: str = "") -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    with run.watched(from_another_thread, from_another_thread):
        from_another_thread()
        assert free == [True]
        run(torch.rand(4, 8), w)
        assert len(free) > 1 and not any(free[1:])
        from_another_thread()
    assert free[-1]

"""Timing by CUDA graphs against a runtime that only counts: what is captured, replayed, freed."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest

from tvmcap.kernel import graph_timing


class Runtime:
    """Stands in for the CUDA runtime; every call of the kernel takes ``us`` microseconds."""

    def __init__(self, us: float, fail: str = "") -> None:
        self.us, self.fail = us, fail
        self.now, self.graph, self.capturing = 0.0, 0, False
        self.done: Counter[str] = Counter()
        self.times: dict[int, float] = {}

    def kernel(self, *_: Any) -> None:
        if self.capturing:
            self.graph += 1
        else:
            self.now += self.us

    def __call__(self, name: str, *args: Any) -> None:
        self.done[name] += 1
        if name == self.fail:
            raise graph_timing.CudaError(name)
        if name in ("cudaStreamCreateWithFlags", "cudaEventCreate", "cudaGraphInstantiate"):
            args[0]._obj.value = 1000 + self.done.total()
        elif name == "cudaStreamBeginCapture":
            self.capturing = True
        elif name == "cudaStreamEndCapture":
            self.capturing, args[1]._obj.value = False, 7
        elif name == "cudaGraphLaunch":
            self.now += self.us * self.graph
        elif name == "cudaEventRecord":
            self.times[args[0].value] = self.now
        elif name == "cudaEventElapsedTime":
            args[0]._obj.value = 1e-3 * (self.times[args[2].value] - self.times[args[1].value])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        graph_timing.tvm_ffi, "use_raw_stream", lambda *_: contextlib.nullcontext(), raising=True
    )

    def call(us: float, sets: int, limit: float | None = None, fail: str = "") -> Any:
        runtime = Runtime(us, fail)
        monkeypatch.setattr(graph_timing, "_Runtime", lambda: runtime)
        try:
            found = graph_timing.time_graph(
                runtime.kernel, [[i] for i in range(sets)], None, 0.03, limit
            )
        except graph_timing.CudaError:
            found = []
        return runtime, found

    return call


@pytest.mark.parametrize(("us", "sets"), [(2.0, 1), (6.0, 19), (30.0, 6), (1500.0, 1), (400.0, 64)])
def test_samples_are_of_whole_turns_through_the_sets(run: Any, us: float, sets: int) -> None:
    runtime, found = run(us, sets)
    assert found and all(abs(t - us) < 1e-3 * us for t in found)
    assert runtime.graph % sets == 0 and runtime.graph >= 4 and 7 <= len(found) <= 30
    assert runtime.graph <= max(2 * sets, 64)
    assert len(found) == 30 or sum(found) * runtime.graph >= 2e4  # microseconds


@pytest.mark.parametrize(("us", "hot"), [(10.0, False), (1500.0, True), (90.0, True)])
def test_heavy_calls_are_timed_once_the_clocks_have_settled(run: Any, us: float, hot: bool) -> None:
    runtime, found = run(us, 2)
    before = runtime.now - sum(found) * runtime.graph  # microseconds
    assert (before >= 6e4) == hot and before <= 12e4


def test_samples_taken_while_the_clocks_changed_are_taken_again() -> None:
    rounds = [[91.0] * 20 + [107.0] * 10, [100.0] * 10 + [107.0] * 20, [106.0] * 15 + [107.0] * 15]
    left = iter(rounds)
    assert graph_timing._steady(lambda: next(left)) == rounds[2]
    left = iter([rounds[2], rounds[0]])
    assert graph_timing._steady(lambda: next(left)) == rounds[2]
    left = iter([*rounds[:2], rounds[0], rounds[2]])
    assert graph_timing._steady(lambda: next(left)) == rounds[0]


def test_a_slow_candidate_gets_few_samples(run: Any) -> None:
    runtime, found = run(5000.0, 6, limit=20.0)
    assert len(found) == 3 and runtime.graph == 2
    assert len(run(60.0, 6, limit=20.0)[1]) >= 7


@pytest.mark.parametrize("fail", ["", "cudaStreamEndCapture", "cudaEventSynchronize"])
def test_everything_is_freed(run: Any, fail: str) -> None:
    done = run(10.0, 3, fail=fail)[0].done
    assert done["cudaEventCreate"] == done["cudaEventDestroy"] > 0
    assert done["cudaStreamDestroy"] == 1
    assert done["cudaGraphExecDestroy"] == done["cudaGraphInstantiate"]

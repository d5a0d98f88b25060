"""Timing takes turns, rotates inputs and reports the spread."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tvmcap.base.timing import measure, rotated, summarize


def test_summary_is_the_median_and_nearest_rank_percentiles():
    values = [5.0, 1.0, 2.0, 4.0, 3.0, 10.0, 9.0, 8.0, 7.0, 6.0, 100.0]
    s = summarize(values)
    assert (s.median, s.p10, s.p90) == (6.0, 2.0, 10.0)
    assert s.samples == tuple(values)
    assert summarize(values[:2]).median == 3.0


def test_calls_take_turns_over_all_inputs():
    seen = {"a": [], "b": []}
    order = []

    def call(name):
        def run(i):
            seen[name].append(i)
            order.append(name)

        return run

    result = measure({"a": call("a"), "b": call("b")}, [(0,), (1,), (2,)], samples=5, budget_s=0.2)
    assert set(result) == {"a", "b"} and len(result["a"].samples) == 5
    assert all(set(calls) == {0, 1, 2} for calls in seen.values())
    turns = [x for i, x in enumerate(order) if i == 0 or order[i - 1] != x]
    assert len(turns) >= 6


def test_rotated_clones_nested_tensors_until_the_bytes_are_there():
    args = (torch.ones(1000), {"m": np.ones(250, np.float32)}, 3)
    sets = rotated(args, at_least=20_000)
    assert len(sets) == 4 and sets[0][0] is args[0]
    assert sets[1][0].data_ptr() != args[0].data_ptr() and sets[1][1]["m"] is not args[1]["m"]
    assert torch.equal(sets[3][0], args[0]) and sets[2][2] == 3
    assert len(rotated(args, at_least=1 << 30, most=5)) == 5


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        measure({"a": lambda: None}, device="tpu")


def test_graphs_are_timed_while_the_device_is_busy(monkeypatch):
    """The clock starts between two replays, so that launching the first is not counted."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, stop):
            return 3.0

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fake = {
        "Event": Event,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "graph": lambda g: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.append("replay")),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    times = measure({"a": lambda: None}, device="cuda", graph=True, samples=5)
    assert len(log) % 5 == 0 and log == ["replay", "event", "replay", "event", "wait"] * (
        len(log) // 5
    )
    assert times["a"].median == pytest.approx(3e3 / 16)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_cuda_events_and_graph_replay(graph):
    x = torch.randn(1024, 1024, device="cuda")
    result = measure({"mm": lambda a: a @ a}, rotated((x,)), device="cuda", graph=graph)
    assert 1 < result["mm"].median < 1e5

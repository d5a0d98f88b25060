"""Recorded calls: when they are made, what they are launched with, when they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import libs
from tests.runtime.fake_cuda import FakeCuda
from tvmcap.base.errors import LibraryError
from tvmcap.runtime.binding import Plan, make_plan
from tvmcap.runtime.executor import Executor
from tvmcap.runtime.graphs import Graphs
from tvmcap.runtime.recording import moved_by


def plan(rows: int) -> Plan:
    return make_plan(libs.chain_signature(), ((rows, 8), (8, 8)), lambda dtype: 4)


def tensors(rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.rand(rows, 8), torch.rand(8, 8)], [torch.empty(rows, 8)]


def call(graphs: Graphs, of: Plan, given: Any, stream: int = 7) -> bool:
    values, targets = given
    places = tuple(t.data_ptr() for t in (*values, *targets))
    return graphs.replay(of, places, values, targets, stream)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def graphs(cuda: FakeCuda) -> Graphs:
    return Graphs(cuda, cuda.record, 350)  # type: ignore[arg-type]


def test_the_second_call_records_and_every_later_one_replays(
    graphs: Graphs, cuda: FakeCuda
) -> None:
    of, given = plan(4), tensors(4)
    assert [call(graphs, of, given) for _ in range(4)] == [False, True, True, True]
    places = tuple(t.data_ptr() for t in (*given[0], *given[1]))
    assert cuda.launched == [(1, places, 7)] * 3
    assert (graphs.captures, graphs.replays, graphs.updates) == (1, 3, 0)


def test_launches_hold_the_addresses_of_their_call(graphs: Graphs, cuda: FakeCuda) -> None:
    graphs._limit = 10_000
    of, sets = plan(4), [tensors(4) for _ in range(5)]
    for stream, given in enumerate([sets[0], *sets, *reversed(sets), *sets]):
        if call(graphs, of, given, stream):
            values, targets = given
            assert cuda.launched[-1][1:] == (
                tuple(t.data_ptr() for t in (*values, *targets)),
                stream,
            )
    assert len(cuda.launched) == 15 and graphs.captures == 1
    # each further set once; then sets 3, 2 and 1 come back, and the first was never moved to
    assert graphs.updates == 5 and graphs.duplicates == 4 and len(cuda.executables) == 5
    graphs.clear()
    assert not cuda.executables and graphs.nbytes == 0


def test_addresses_that_come_back_get_few_executables(
    graphs: Graphs, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmcap.runtime.graphs._DUPLICATES", 3)
    graphs._limit = 10_000
    of, sets = plan(4), [tensors(4) for _ in range(6)]
    for given in [sets[0], *(4 * sets)]:
        call(graphs, of, given)
        values, targets = given
        places = tuple(t.data_ptr() for t in (*values, *targets))
        assert not cuda.launched or cuda.launched[-1][1] == places
    assert len(cuda.launched) == 24 and len(cuda.executables) == 3
    assert graphs.nbytes == 300


@pytest.mark.parametrize("before", [(0, 0), (0, 0, 1, 2)], ids=["moved", "duplicate"])
def test_an_executable_whose_update_fails_is_not_used_again(
    graphs: Graphs, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, before: tuple[int, ...]
) -> None:
    of, sets = plan(4), [tensors(4) for _ in range(3)]
    for i in before:
        call(graphs, of, sets[i])

    def fails(*_: object) -> None:
        raise LibraryError("cuGraphExecKernelNodeSetParams returned 1")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "update", fails)
        with pytest.raises(LibraryError, match="SetParams"):
            call(graphs, of, sets[1])
    assert len(cuda.executables) == len(before) // 4
    for values, targets in sets:
        assert call(graphs, of, (values, targets))
        assert cuda.launched[-1][1] == tuple(t.data_ptr() for t in (*values, *targets))
    graphs.clear()
    assert not cuda.executables and graphs.nbytes == 0


def test_without_memory_for_one_more_executable_the_first_is_moved(
    graphs: Graphs, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, sets = plan(4), [tensors(4) for _ in range(2)]
    call(graphs, of, sets[0])

    def no_memory(*_: object) -> None:
        raise LibraryError("cudaGraphInstantiate failed: out of memory")

    call(graphs, of, sets[0])
    monkeypatch.setattr(cuda, "instantiate", no_memory)
    for values, targets in 3 * sets:
        assert call(graphs, of, (values, targets))
        assert cuda.launched[-1][1] == tuple(t.data_ptr() for t in (*values, *targets))
    assert graphs.duplicates == 0 and len(cuda.executables) == 1 and cuda._streams == 0
    cuda.executables.clear()
    graphs._entries[of.sizes].replays.clear()  # as after an update that failed
    assert not call(graphs, of, sets[0])
    assert dict(graphs.fallbacks) == {"cudaGraphInstantiate failed: out of memory": 1}


def test_no_executable_is_added_past_the_limit(graphs: Graphs, cuda: FakeCuda) -> None:
    of, sets = plan(4), [tensors(4) for _ in range(6)]
    for given in [sets[0], *(3 * sets)]:
        call(graphs, of, given)
    assert graphs.nbytes == 100 * len(cuda.executables) == 400


def test_one_tensor_for_two_arguments(graphs: Graphs, cuda: FakeCuda) -> None:
    of, (_, targets) = plan(8), tensors(8)
    same, apart = torch.rand(8, 8), torch.rand(8, 8)
    for values in ([same, same], [same, same], [same, apart], [apart, same]):
        call(graphs, of, (values, targets))
        if cuda.launched:
            assert cuda.launched[-1][1][:2] == tuple(v.data_ptr() for v in values)
    assert len(cuda.launched) == 3


def test_the_least_recently_used_go_first(graphs: Graphs, cuda: FakeCuda) -> None:
    plans = {rows: (plan(rows), tensors(rows)) for rows in (1, 2, 3, 4)}
    for rows in (1, 2, 3):
        call(graphs, *plans[rows])
        call(graphs, *plans[rows])
    call(graphs, *plans[1])
    call(graphs, *plans[4])
    call(graphs, *plans[4])
    assert graphs.evictions == 1 and graphs.nbytes == 300 and len(graphs) == 3
    assert call(graphs, *plans[1]) and not call(graphs, *plans[2])


def test_what_cannot_be_recorded_runs_otherwise_and_says_why(
    graphs: Graphs, cuda: FakeCuda
) -> None:
    of, given = plan(4), tensors(4)
    cuda.refuse = "operation not permitted when stream is capturing"
    assert not any(call(graphs, of, given) for _ in range(4))
    assert dict(graphs.fallbacks) == {cuda.refuse: 3}
    assert graphs.captures == 0 and cuda._streams == 0


def test_what_cannot_be_updated_serves_its_own_addresses(graphs: Graphs, cuda: FakeCuda) -> None:
    of, first, other = plan(4), tensors(4), tensors(4)
    cuda.fixed = True
    assert [call(graphs, of, t) for t in (first, first, other, first)] == [False, True, False, True]
    [(reason, times)] = graphs.fallbacks.items()
    assert "other addresses cannot be used" in reason and "copies or fills" in reason
    assert times == 1


def test_a_launch_that_fails_is_an_error(graphs: Graphs, cuda: FakeCuda) -> None:
    of, given = plan(4), tensors(4)
    call(graphs, of, given)
    cuda.fails = 2
    with pytest.raises(RuntimeError, match="cudaGraphLaunch: 2"):
        call(graphs, of, given)


def test_clearing_frees_every_graph(graphs: Graphs, cuda: FakeCuda) -> None:
    for rows in (1, 2):
        of, given = plan(rows), tensors(rows)
        call(graphs, of, given)
        call(graphs, of, given)
    probes = len(cuda.destroyed)
    graphs.clear()
    assert len(cuda.destroyed) == probes + 2 and graphs.nbytes == 0 and len(graphs) == 0


def test_a_moved_tensor_claims_another_address_and_frees_nothing() -> None:
    import tvm_ffi

    from tvmcap.runtime.loader import ffi

    ffi()
    x = torch.rand(4, 8)
    for _ in range(3):
        moved = moved_by(tvm_ffi.from_dlpack(x), 8192)
        assert moved.data_ptr() == x.data_ptr() + 8192
        assert tuple(moved.shape) == (4, 8) and str(moved.dtype) == "float32"
        del moved
    assert x.sum() > 0


def test_a_library_for_the_cpu_has_no_graphs(run: Executor) -> None:
    with pytest.raises(LibraryError, match=r"'cuda'.*'llvm'"):
        run.use_graphs()

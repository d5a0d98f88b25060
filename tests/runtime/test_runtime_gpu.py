"""Replay on a GPU: right at every address, on every stream, from every thread, and refused well."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmcap
from examples import models

pytestmark = pytest.mark.gpu
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def built(case: str, folder: Path, most: int | None) -> Path:
    torch.manual_seed(0)
    fn, args, _ = models.CASES[case]()
    if isinstance(fn, torch.nn.Module):
        fn = fn.bfloat16()
    dynamic = {"x": {0: tvmcap.Dim("B", min=1, max=most)}}
    args = tuple(a.bfloat16() for a in args)
    options = {"target": "cuda", "tune": "none", "verify": False, "dynamic": dynamic}
    lib = tvmcap.build(fn, args, **options)
    path: Path = lib.export(folder / f"{case}-{most}.so")
    return path


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("block", tmp_path_factory.mktemp("block"), 256)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("mlp", tmp_path_factory.mktemp("mlp"), 256)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("mlp", tmp_path_factory.mktemp("growing"), None)


def inputs(rows: int, count: int = 1) -> list[Any]:
    make = torch.Generator(device="cuda").manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device="cuda").bfloat16()

    w, b = draw(1024, 4096) / 32, draw(4096)
    return [(draw(rows, 1024), w, b) for _ in range(count)]


def keeps_memory(work: Callable[[], object]) -> bool:
    """Whether ``work`` leaves as much memory free on the device as it found, once in many times.

    The figure is that of the whole device, which other processes change too, now and then; what
    loses memory loses some each time.
    """
    for _ in range(20):
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        work()
        gc.collect()
        torch.cuda.synchronize()
        if torch.cuda.mem_get_info()[0] == before:
            return True
    return False


def replayed(path: Path, **options: Any) -> Any:
    lib = tvmcap.load(path)
    lib.use_graphs(**options)
    return lib


@pytest.mark.parametrize("rows", [1, 16, 33, 200])
def test_replayed_calls_are_right_at_changing_addresses(block: Path, rows: int) -> None:
    lib = replayed(block)
    sets = inputs(rows, 6)
    outs = [torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda") for _ in sets]
    for _ in range(3):
        for (x, w, b), out in zip(sets, outs, strict=True):
            out.zero_()
            assert lib(x, w.clone(), b, out=out) is out
            torch.testing.assert_close(out, models.gelu_tanh(x, w, b), **CLOSE)
    counts = lib.counts
    assert counts.captures == 1 and not counts.fallbacks, counts
    assert counts.replays == 17 and counts.updates >= 5 and counts.duplicates >= 4, counts


def test_new_outputs_and_mixed_sizes(block: Path) -> None:
    lib = replayed(block)
    kept = []
    for rows in (4, 64, 16, 4, 16, 64, 4, 64, 16, 16):
        [(x, w, b)] = inputs(rows)
        kept.append((lib(x, w, b), models.gelu_tanh(x, w, b)))
    for got, want in kept:
        torch.testing.assert_close(got, want, **CLOSE)
    assert lib.counts.captures == 3 and not lib.counts.fallbacks, lib.counts


def test_several_kernels_with_an_arena(mlp: Path) -> None:
    lib, plain = replayed(mlp), tvmcap.load(mlp)
    assert lib.counts.arena_bytes > 0
    for rows in (5, 5, 256, 256, 5, 256):
        x = torch.randn(rows, 256, device="cuda").bfloat16()
        torch.testing.assert_close(lib(x), plain(x), rtol=0, atol=0)
    assert lib.counts.captures == 2 and lib.counts.replays == 4, lib.counts


def test_an_arena_that_grows_drops_what_was_recorded_on_it(growing: Path) -> None:
    lib = replayed(growing)
    for rows in (4, 4, 4, 500, 4, 4, 500, 500):
        x = torch.randn(rows, 256, device="cuda").bfloat16()
        torch.testing.assert_close(lib(x), tvmcap.load(growing)(x), rtol=0, atol=0)
    assert lib.counts.growths == 1, lib.counts


def test_bound_tensors_are_read_where_they_lie(block: Path) -> None:
    lib = replayed(block)
    [(x, w, b)] = inputs(16)
    for name, tensor in (("x", x), ("w", w), ("b", b)):
        lib.bind(name, tensor)
    for i in range(5):
        x.copy_(torch.randn_like(x))
        lib.run()
        torch.testing.assert_close(lib.output(), models.gelu_tanh(x, w, b), **CLOSE)
        assert lib.counts.replays == max(0, i), lib.counts


def test_streams_and_threads(mlp: Path) -> None:
    lib = replayed(mlp)
    wrong = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        for i in range(30):
            with torch.cuda.stream(stream if i % 3 else torch.cuda.default_stream()):
                x = torch.full((8 + seed, 256), 0.01 * (i + seed), device="cuda").bfloat16()
                got = lib(x)
                if not torch.equal(got, plain(x)):
                    wrong.append((seed, i))

    plain = tvmcap.load(mlp)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not wrong


def test_under_a_capture_of_the_callers_it_is_recorded_as_it_is(block: Path) -> None:
    lib = replayed(block)
    [(x, w, b)] = inputs(16)
    out = torch.empty(16, 4096, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        lib(x, w, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lib(x, w, b, out=out)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, models.gelu_tanh(x, w, b), **CLOSE)


def test_buckets_bound_the_number_of_captures(block: Path) -> None:
    lib = replayed(block, buckets=(8, 64, 256))
    for rows in (1, 7, 8, 9, 64, 65, 255, 256, 3, 60, 100, 5):
        [(x, w, b)] = inputs(rows)
        torch.testing.assert_close(lib(x, w, b), models.gelu_tanh(x, w, b), **CLOSE)
    assert lib.counts.captures == 3, lib.counts


def test_the_limit_of_bytes_evicts(block: Path) -> None:
    lib = replayed(block, limit_bytes=1)
    for rows in (4, 4, 8, 8, 4, 4):
        [(x, w, b)] = inputs(rows)
        torch.testing.assert_close(lib(x, w, b), models.gelu_tanh(x, w, b), **CLOSE)
    assert lib.counts.graphs == 1 and lib.counts.evictions == 2, lib.counts


def test_steady_calls_allocate_nothing(block: Path) -> None:
    lib = replayed(block)
    sets = {rows: inputs(rows)[0] for rows in (4, 16, 64)}
    outs = {m: torch.empty(m, 4096, dtype=torch.bfloat16, device="cuda") for m in sets}

    def calls(count: int = 100) -> None:
        for rows in (4, 16, 64) * count:
            lib(*sets[rows], out=outs[rows])

    calls(3)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert keeps_memory(calls)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_loading_and_closing_leaves_no_memory(mlp: Path) -> None:
    x = torch.randn(8, 256, device="cuda").bfloat16()

    def cycles(count: int = 30) -> None:
        for _ in range(count):
            lib = replayed(mlp)
            for _ in range(3):
                lib(x)
            lib.close()
            with pytest.raises(tvmcap.errors.LibraryError, match="closed"):
                lib(x)

    cycles(5)
    assert keeps_memory(cycles)


def _child(lib: Any, results: Any) -> None:
    try:
        lib(torch.zeros(1))
    except Exception as e:
        results.put(f"{type(e).__name__}: {e}")


def test_a_fork_after_load_is_refused(block: Path) -> None:
    lib = tvmcap.load(block)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=_child, args=(lib, results))
    child.start()
    assert "spawn" in results.get(timeout=60)
    child.join()


def test_no_memory_for_the_arena_is_said(growing: Path) -> None:
    lib = tvmcap.load(growing)
    x = torch.zeros(200_000, 256, dtype=torch.bfloat16, device="cuda")
    out, filler = torch.empty_like(x), []
    try:
        for size in (1 << 33, 1 << 28, 1 << 24):
            try:
                while True:
                    filler.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        with pytest.raises(tvmcap.errors.LibraryError, match="no memory for intermediates"):
            lib(x, out=out)
    finally:
        filler.clear()
        torch.cuda.empty_cache()
    torch.testing.assert_close(lib(x[:64]), tvmcap.load(growing)(x[:64]))

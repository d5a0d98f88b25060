"""Closing, forking, and calls that look like the last ones."""

from __future__ import annotations

import collections
import gc
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tvmcap
from tests import libs
from tests.runtime.conftest import three_layers
from tvmcap.base.errors import InputError, LibraryError

Layers = Callable[[int | None], Path]


def test_after_close_every_use_is_refused(layers: Layers, w: torch.Tensor) -> None:
    lib, x = tvmcap.load(layers(64)), torch.rand(3, 8)
    out = torch.empty(3, 8)
    for name, tensor in (("x", x), ("w", w)):
        lib.bind(name, tensor)
    lib.run()
    for _ in range(3):
        lib(x, w, out=out)
    said: list[str] = []

    def other() -> None:
        try:
            lib(x, w)
        except LibraryError as e:
            said.append(str(e))

    lib.close()
    lib.close()
    uses = (
        lambda: lib(x, w),
        lambda: lib(x, w, out=out),
        lib.run,
        lib.use_graphs,
        lambda: lib.executor.trace(x, w),
    )
    for use in uses:
        with pytest.raises(LibraryError, match=r"layers64\.so: this library was closed; load it"):
            use()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "closed" in said[0]
    again = tvmcap.load(layers(64))
    torch.testing.assert_close(again(x, w), three_layers(x, w))


def test_closing_or_dropping_a_library_frees_its_arena(layers: Layers, w: torch.Tensor) -> None:
    for close in (True, False):
        lib = tvmcap.load(layers(64))
        lib(torch.rand(3, 8), w)
        context = weakref.ref(lib.executor._threads.here)
        arena = weakref.ref(lib.executor._threads.here.arena)
        if close:
            lib.close()
            assert arena().storages == ()
        del lib
        gc.collect()
        assert context() is None and arena() is None


def test_closing_frees_weights_and_tensors_of_every_thread(tmp_path: Path) -> None:
    weights = {"w": np.arange(8, dtype=np.float32), "b": np.full(3, 4, np.float32)}
    lib = tvmcap.load(libs.write_scale(tmp_path / "beside.so", weights))
    bound, done, closed = [], threading.Event(), threading.Event()
    said: list[str] = []

    def work() -> None:
        x = torch.ones(2, 8)
        lib.bind(lib.signature.arg_names[0], x)
        lib.run()
        bound.append(weakref.ref(lib.output()))
        del x
        done.set()
        closed.wait(10)
        for use in (lib.run, lib.output):
            try:
                use()
            except LibraryError as e:
                said.append(str(e))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("beside.so")

    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(10)
    lib(torch.ones(3, 8))
    gc.collect()
    assert mapped()
    lib.close()
    gc.collect()
    left = mapped(), bound[0]()
    closed.set()
    thread.join()
    assert left == (0, None)
    assert len(said) == 2 and all("closed; load it again" in text for text in said)


def test_a_thread_that_never_called_may_close(layers: Layers, w: torch.Tensor) -> None:
    lib, x = tvmcap.load(layers(64)), torch.rand(3, 8)
    lib(x, w)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lib.close).result()
        for use in (lambda: lib(x, w), lib.run, lambda: lib.counts):
            with pytest.raises(LibraryError, match="closed; load it again"):
                pool.submit(use).result()
    with pytest.raises(LibraryError, match="closed; load it again"):
        lib(x, w)
    assert lib.executor.arena_bytes == 0


@pytest.mark.parametrize(("at", "rows"), [("fit", 3), ("_allocate", 50)])
def test_a_call_during_which_the_library_is_closed(
    layers: Layers, w: torch.Tensor, at: str, rows: int
) -> None:
    for out in (None, torch.empty(rows, 8)):
        lib, x = tvmcap.load(layers(None)), torch.rand(3, 8)
        for _ in range(3):
            lib(x, w, out=None if out is None else out[:3])
        x = torch.rand(rows, 8)
        context = lib.executor._threads.here
        step = getattr(context.arena, at)

        def closing(*args: object, lib: Any = lib, step: Any = step) -> Any:
            thread = threading.Thread(target=lib.close)
            thread.start()
            thread.join()
            return step(*args)

        setattr(context.arena, at, closing)
        with pytest.raises(LibraryError, match="closed; load it again"):
            lib(x, w, out=out)


def test_a_context_made_while_the_library_is_closed_goes_with_it(
    layers: Layers, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = tvmcap.load(layers(64))
    contexts, made = lib.executor._contexts, []
    refuse = contexts.refuse

    def late(why: str) -> None:
        made.append(contexts.new(lib.executor._threads))
        refuse(why)

    monkeypatch.setattr(contexts, "refuse", late)
    lib.close()
    assert made[0].arena.storages == () and made[0].arena.vm is None


def test_contexts_are_listed_while_other_threads_make_theirs(layers: Layers) -> None:
    class Context:
        arena = types.SimpleNamespace(nbytes=0)

    contexts = tvmcap.load(layers(64)).executor._contexts
    own, kept = contexts.arena_bytes, collections.deque(maxlen=100)
    every = sys.getswitchinterval()

    def make() -> None:
        for _ in range(30_000):
            kept.append(Context())
            contexts._all.add(kept[-1])

    maker = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    try:
        maker.start()
        while maker.is_alive():
            assert contexts.arena_bytes == own
    finally:
        sys.setswitchinterval(every)
        maker.join()


def test_a_pool_of_threads_ends_with_its_caller(layers: Layers, w: torch.Tensor) -> None:
    lib, x = tvmcap.load(layers(64)), torch.rand(64, 8)
    lib(x, w)

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    for _ in range(5):
        thread = threading.Thread(target=lib, args=(x, w))
        thread.start()
        thread.join()
    until = time.monotonic() + 20
    while count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert count() <= before


def test_loads_and_calls_keep_memory_flat(layers: Layers, w: torch.Tensor) -> None:
    x = torch.rand(64, 8)

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def cycles(count: int) -> None:
        for _ in range(count):
            lib = tvmcap.load(layers(64))
            for _ in range(20):
                lib(x, w)
            lib.close()

    cycles(40)
    before = resident()
    cycles(60)
    assert resident() - before < 2 << 20


def test_libraries_on_a_gpu_are_closed_before_the_interpreter_ends(
    layers: Layers, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvmcap.runtime import threads

    lib, x = tvmcap.load(layers(64)), torch.rand(3, 8)
    monkeypatch.setattr(threads, "_on_gpu", weakref.WeakSet([lib.executor._contexts]))
    lib(x, w)
    assert lib.executor.arena_bytes > 0
    threads._free_at_exit()
    assert lib.executor.arena_bytes == 0
    with pytest.raises(LibraryError, match="interpreter ends"):
        lib(x, w)


def repeated(lib: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Call until the call is known at a glance."""
    out = torch.empty(len(x), 8)
    for _ in range(4):
        lib(x, w, out=out)
    assert lib.executor._threads.here.seen
    return out


def test_a_known_call_notices_what_changed(layers: Layers) -> None:
    lib, x, w = tvmcap.load(layers(64)), torch.rand(8, 8), torch.rand(8, 8)
    out = repeated(lib, x, w)
    x.t_()  # in place: the same object, address and shape, other strides
    torch.testing.assert_close(lib(x, w, out=out), three_layers(x.contiguous(), w))
    w.data = w.double()
    with pytest.raises(InputError, match="float32"):
        lib(x, w, out=out)
    w.data = torch.rand(8, 8)
    torch.testing.assert_close(lib(x, w, out=out), three_layers(x, w))
    with pytest.raises(InputError, match="float32"):
        lib(x.contiguous(), w, out=out.double())
    wanted = repeated(lib, x.contiguous(), w).requires_grad_()
    with pytest.raises(InputError, match="require grad"):
        lib(x.contiguous(), w, out=wanted)


def test_a_known_call_still_checks_addresses(layers: Layers, w: torch.Tensor) -> None:
    lib, x = tvmcap.load(layers(64)), torch.rand(8, 8)
    repeated(lib, x, w)
    with pytest.raises(InputError, match="memory of its own"):
        lib(x, w, out=x)
    with pytest.raises(InputError, match="aligned"):
        lib(x, w, out=torch.empty(65)[1:].view(8, 8))
    out = torch.empty(8, 8)
    before = lib.counts.copies
    for _ in range(3):
        y = torch.rand(65)[1:].view(8, 8)
        torch.testing.assert_close(lib(y, w, out=out), three_layers(y, w))
    assert lib.counts.copies == before + 3
    torch.testing.assert_close(lib(x, w, out=out), three_layers(x, w))


def test_a_known_call_follows_its_arguments(layers: Layers) -> None:
    lib = tvmcap.load(layers(64))
    for _ in range(3):
        for rows in (1, 8, 64, 8):
            x, w = torch.rand(rows, 8), torch.rand(8, 8)
            out = torch.empty(rows, 8)
            assert lib(x, w, out=out) is out
            torch.testing.assert_close(out, three_layers(x, w))
    for wrong in ((x,), (x, w, w), (x, "w"), ("x", w)):
        with pytest.raises(InputError):
            lib(*wrong, out=out)

"""What an instrumented call sees: kernels by name, memory alive at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import libs
from tests.runtime.conftest import three_layers
from tvmcap.base.errors import InputError, LibraryError
from tvmcap.base.signature import TensorSpec
from tvmcap.library import export
from tvmcap.runtime.executor import Executor

Layers = Callable[[int | None], Path]


def long_chain_module() -> Any:
    """Five matmuls in a row, each through memory of its own, as before any planning."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Long:
        @T.prim_func(s_tir=True, private=True)
        def matmul(
            x: T.Buffer((T.int64(16), T.int64(8)), "float32"),
            w: T.Buffer((T.int64(8), T.int64(8)), "float32"),
            o: T.Buffer((T.int64(16), T.int64(8)), "float32"),
        ):
            T.func_attr({"tirx.noalias": True})
            for i, j, k in T.grid(16, 8, 8):
                with T.sblock("matmul"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        o[vi, vj] = T.float32(0)
                    o[vi, vj] = o[vi, vj] + x[vi, vk] * w[vk, vj]

        @R.function(pure=False)
        def main(
            x: R.Tensor((16, 8), "float32"),
            w: R.Tensor((8, 8), "float32"),
            out: R.Tensor((16, 8), "float32"),
        ) -> R.Tuple():
            cls = Long
            a = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _ = cls.matmul(x, w, a)
            b = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _1 = cls.matmul(a, w, b)
            c = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _2 = cls.matmul(b, w, c)
            d = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _3 = cls.matmul(c, w, d)
            _4 = cls.matmul(d, w, out)
            return R.tuple()

    return Long


def write_long_chain(path: Path) -> Path:
    """Write the library of five matmuls to ``path``, without memory planning."""
    signature = libs.chain_signature()
    inputs = (TensorSpec("x", "float32", (16, 8)), signature.inputs[1])
    outputs = (TensorSpec("out0", "float32", (16, 8)),)
    signature = replace(signature, inputs=inputs, outputs=outputs, dims=())
    executable = libs.compile_module(long_chain_module(), plan=False)
    export.write(executable, path, libs.manifest_for(signature))
    return path


def test_kernels_and_memory_of_a_call(
    run: Executor, nested: Executor, x: torch.Tensor, w: torch.Tensor
) -> None:
    assert run.kernel_launches(x, w) == ("matmul", "matmul")
    assert run.trace(x, w).intermediate_bytes == x.nbytes
    assert run.peak_bytes(x.numpy(), w.numpy()) == 2 * x.nbytes
    assert run.kernel_launches(x[:0], w) == ()
    assert nested.kernel_launches({"x": x, "y": x}) == ("add", "columns", "stack")
    assert nested.peak_bytes({"x": x, "y": x}) == x.nbytes + 32 + 2 * x.nbytes
    torch.testing.assert_close(run(x, w), x @ w @ w)  # an instrument is left behind nowhere


def test_memory_that_is_released_does_not_count(folder: Path) -> None:
    run = Executor(write_long_chain(folder / "long.so"))
    x, w = torch.rand(16, 8), torch.rand(8, 8)
    trace = run.trace(x, w)
    assert trace.kernels == ("matmul",) * 5
    assert trace.intermediate_bytes == 2 * x.nbytes
    torch.testing.assert_close(run(x, w), x @ w @ w @ w @ w @ w)


class Seen:
    """What an executor shows of the calls within ``watched``."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def of(self, run: Executor) -> Any:
        """Watch the calls of ``run``."""
        return run.watched(
            lambda name: self.events.append(("before", name)),
            lambda name: self.events.append(("after", name)),
        )

    def kernels(self) -> list[str]:
        """Return the kernels in order, each of which ends before the next."""
        assert self.events[::2] == [("before", name) for _, name in self.events[1::2]]
        assert all(when == "after" for when, _ in self.events[1::2])
        return [name for _, name in self.events[::2]]


@pytest.mark.parametrize("most", [64, None])
def test_watched_calls_show_each_kernel_and_later_ones_are_native_again(
    layers: Layers, w: torch.Tensor, most: int | None
) -> None:
    run, seen = Executor(layers(most)), Seen()
    arena = run._threads.here.arena
    native = arena.entry
    for rows in (5, 5, 40):  # without a bound the arena grows within
        x = torch.rand(rows, 8)
        with seen.of(run):
            assert arena.entry is not native
            torch.testing.assert_close(run(x, w), three_layers(x, w))
        assert arena.entry is native
        torch.testing.assert_close(run(x, w), three_layers(x, w))
    x = torch.rand(40, 8)
    assert seen.kernels() == [*run.kernel_launches(x, w)] * 3 and len(seen.events) == 18
    assert run.counts.growths == (most is None)
    assert all(storage.shape[0] >= x.nbytes for storage in arena.storages)


def test_a_call_that_fails_while_watched_leaves_nothing_behind(
    layers: Layers, w: torch.Tensor
) -> None:
    run, seen, x = Executor(layers(64)), Seen(), torch.rand(5, 8)
    native = run._threads.here.arena.entry
    with pytest.raises(InputError), seen.of(run):
        run(torch.rand(5, 9), w)
    with pytest.raises(ValueError, match="of the watcher"), run.watched(refuse, refuse):
        raise ValueError("of the watcher")
    assert run._threads.here.arena.entry is native
    torch.testing.assert_close(run(x, w), three_layers(x, w))
    assert seen.events == []


def refuse(name: str) -> None:
    raise AssertionError(name)


def test_a_library_may_be_closed_while_it_is_watched(layers: Layers, w: torch.Tensor) -> None:
    run = Executor(layers(64))
    with Seen().of(run):
        run(torch.rand(5, 8), w)
        run.close()
    with pytest.raises(LibraryError, match="closed"):
        run(torch.rand(5, 8), w)
    with pytest.raises(LibraryError, match="closed"):
        run.watched(refuse, refuse)


def test_other_threads_are_not_watched(layers: Layers, w: torch.Tensor) -> None:
    run, x, results = Executor(layers(64)), torch.rand(5, 8), []
    with run.watched(refuse, refuse):
        thread = threading.Thread(target=lambda: results.append(run(x, w)))
        thread.start()
        thread.join()
    torch.testing.assert_close(results, [three_layers(x, w)])


def test_a_library_without_a_host_function_can_be_watched(
    run: Executor, x: torch.Tensor, w: torch.Tensor
) -> None:
    seen = Seen()
    with seen.of(run):
        torch.testing.assert_close(run(x, w), x @ w @ w)
    torch.testing.assert_close(run(x, w), x @ w @ w)
    assert seen.kernels() == ["matmul", "matmul"]


def test_within_another_the_inner_one_sees_and_then_the_outer_again(
    layers: Layers, w: torch.Tensor
) -> None:
    run, outer, inner = Executor(layers(64)), Seen(), Seen()
    native, x = run._threads.here.arena.entry, torch.rand(5, 8)
    with outer.of(run):
        with inner.of(run):
            run(x, w)
        assert outer.events == []
        run(x, w)
        torch.testing.assert_close(run(x, w), three_layers(x, w))
    assert outer.kernels() == inner.kernels() * 2 and inner.kernels()
    assert run._threads.here.arena.entry is native


class Stop(BaseException):
    """What no library raises."""


@pytest.mark.parametrize("error", [KeyError("mine"), InputError("mine"), Stop("mine")])
@pytest.mark.parametrize("when", [0, 1])
def test_what_a_callback_raises_comes_out_of_the_call(
    layers: Layers, w: torch.Tensor, error: BaseException, when: int
) -> None:
    def stop(name: str) -> None:
        raise error

    run, seen, x = Executor(layers(64)), Seen(), torch.rand(5, 8)
    callbacks = [lambda name: None] * 2
    callbacks[when] = stop
    with run.watched(*callbacks):
        with pytest.raises(type(error)) as caught:
            run(x, w)
        assert caught.value is error
        with seen.of(run):
            torch.testing.assert_close(run(x, w), three_layers(x, w))
    torch.testing.assert_close(run(x, w), three_layers(x, w))
    assert seen.kernels()

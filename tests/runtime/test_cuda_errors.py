"""What CUDA says of a failed call is told once, by our error, and waits for nobody else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch

from tests.runtime.conftest import three_layers
from tests.runtime.fake_cuda import FakeRuntime
from tvmcap.base import cudart
from tvmcap.base.errors import LibraryError
from tvmcap.runtime import loader
from tvmcap.runtime.cuda_graph import CaptureError, Cuda
from tvmcap.runtime.executor import Executor

Layers = Callable[[int | None], Path]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(cudart, "loaded", lambda: fake)
    return fake


def failing(runtime: FakeRuntime) -> Any:
    """Return what fails as TVM does where the device has no memory left."""

    def fail(*_: Any) -> NoReturn:
        runtime.fail()
        raise RuntimeError("CUDA: out of memory")

    return fail


def without_memory(runtime: FakeRuntime) -> Any:
    """Return what stands for tvm_ffi on a device that has no memory left."""
    return SimpleNamespace(get_global_func=lambda _: failing(runtime), dtype=loader.ffi().dtype)


def test_no_memory_for_the_arena(
    layers: Layers, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, w = Executor(layers(None)), torch.rand(8, 8)
    with monkeypatch.context() as patch, pytest.raises(LibraryError, match="no memory for inter"):
        device = without_memory(runtime)
        patch.setattr(loader, "ffi", lambda: device)
        run(torch.rand(5, 8), w)
    assert runtime.pending == 0
    x = torch.rand(4, 8)
    torch.testing.assert_close(run(x, w), three_layers(x, w))


def test_a_kernel_that_fails(layers: Layers, runtime: FakeRuntime) -> None:
    run, w = Executor(layers(64)), torch.rand(8, 8)
    run._threads.here.arena.entry = failing(runtime)
    with pytest.raises(LibraryError, match="no memory on"):
        run(torch.rand(5, 8), w)
    assert runtime.pending == 0


def test_no_memory_for_a_tensor(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    allocate = without_memory(runtime)
    monkeypatch.setattr(loader, "ffi", lambda: allocate)
    with pytest.raises(LibraryError, match=r"no memory on cuda:0 for a tensor of float32\[3, 4\]"):
        loader.empty((3, 4), "float32", "cuda:0")
    assert runtime.pending == 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> Cuda:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: MagicMock())
    found = Cuda(loader.ffi().device("cuda", 0))
    found._runtime = runtime
    return found


@pytest.mark.parametrize("name", ["cudaGraphInstantiate", "cudaGraphUpload", "cudaMemGetInfo"])
def test_a_graph_that_cannot_be_made(cuda: Cuda, runtime: FakeRuntime, name: str) -> None:
    runtime.failing = {name}
    with pytest.raises(LibraryError, match=f"{name} failed: out of memory"):
        cuda.instantiate(ctypes.c_void_p(1), ctypes.c_void_p(1), 1)
    assert runtime.pending == 0 and runtime.executables == 0


def test_a_call_that_cannot_be_captured(cuda: Cuda, runtime: FakeRuntime) -> None:
    runtime.failing = {"cudaStreamEndCapture"}
    with pytest.raises(CaptureError, match="cannot be captured: CUDA: out of memory"):
        cuda.capture(ctypes.c_void_p(1), failing(runtime))
    assert runtime.pending == 0

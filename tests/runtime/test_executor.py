"""Calling a library: the same kind out as in, zero-copy, nested, from several threads."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi

from tests.runtime.kinds import KINDS, from_tvm
from tvmcap.base.errors import InputError, LibraryError
from tvmcap.runtime.executor import Executor


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 128, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_comes_out(run: Executor, kind: str, batch: int) -> None:
    convert, result_type, back = KINDS[kind]
    x, w = torch.rand(batch, 8), torch.rand(8, 8)
    y = run(convert(x), convert(w))
    assert isinstance(y, result_type)
    torch.testing.assert_close(back(y), x @ w @ w)


def test_results_are_new_and_stay(run: Executor, w: torch.Tensor) -> None:
    inputs = [torch.rand(64, 8) for _ in range(20)]
    results = [run(x, w) for x in inputs]
    gc.collect()
    for x, y in zip(inputs, results, strict=True):
        torch.testing.assert_close(y, x @ w @ w)
    assert len({y.data_ptr() for y in results}) == len(results)


@pytest.mark.parametrize("size", [1, 40, 300])
def test_results_are_aligned(run: Executor, size: int) -> None:
    x, w = np.random.default_rng(0).random((size, 8), np.float32), np.eye(8, dtype=np.float32)
    assert run(x, w).ctypes.data % 16 == 0
    assert run(torch.from_numpy(x), torch.from_numpy(w)).data_ptr() % 16 == 0
    if size > 32:
        assert run(x, w).ctypes.data % 64 == 0
    assert run(x, w).flags.writeable


def test_no_copies_are_made_without_need(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    before = run.copies
    run(x, w)
    run(x.numpy(), w.numpy())
    run(torch.rand(20, 8)[4:9], w)  # contiguous, at a multiple of 16 bytes
    run(torch.nn.Parameter(x), w)
    assert run.copies == before


def test_strided_and_misaligned_inputs_are_copied_and_counted(
    chain: Path, w: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    run = Executor(chain)
    cases = [
        torch.rand(8, 5).t(),
        torch.rand(10, 8)[::2],
        torch.rand(5, 9)[:, :8],
        torch.rand(41)[1:].view(5, 8),
        torch.rand(1, 8).expand(5, 8),
        torch.rand(5, 8).flip(0),
    ]
    with caplog.at_level(logging.INFO, "tvmcap"):
        for count, x in enumerate(cases[:5], 1):
            torch.testing.assert_close(run(x, w), x @ w @ w)
            assert run.copies == count
        torch.testing.assert_close(run(cases[5], w), cases[5] @ w @ w)
        for count, x in enumerate(cases[:5], 6):
            y = run(x.numpy(), w.numpy())
            np.testing.assert_allclose(y, (x @ w @ w).numpy(), rtol=1e-5)
            assert run.copies == count
    assert len(caplog.records) == 1 and "'x' is not contiguous" in caplog.text


def test_copies_of_large_arrays_live_until_the_call_ends(run: Executor, w: torch.Tensor) -> None:
    draw = np.random.default_rng(0)
    for x in (
        draw.random((8, 4000), np.float32).T,
        draw.random((4000, 8), np.float32)[::-1],
        draw.random(4000 * 8 + 1, np.float32)[1:].reshape(4000, 8),
    ):
        for _ in range(5):
            got = run(x, w.numpy())
            np.testing.assert_allclose(got, x @ w.numpy() @ w.numpy(), rtol=1e-4)


def test_every_misalignment_works(run: Executor, w: torch.Tensor) -> None:
    memory = np.zeros(5 * 8 * 4 + 64, np.uint8)
    for offset in range(0, 33):
        x = memory[offset : offset + 160].view(np.float32).reshape(5, 8)
        x[...] = np.random.default_rng(offset).random((5, 8))
        np.testing.assert_allclose(run(x, w.numpy()), x @ w.numpy() @ w.numpy(), rtol=1e-5)


def test_a_misaligned_dlpack_object(run: Executor, w: torch.Tensor) -> None:
    x = torch.rand(41)[1:].view(5, 8)
    y = run(tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(w))
    torch.testing.assert_close(from_tvm(y), x @ w @ w)
    with pytest.raises(InputError, match="contiguous"):
        run(tvm_ffi.from_dlpack(torch.rand(8, 5).t()), tvm_ffi.from_dlpack(w))


def test_size_one_dimensions_of_any_stride(run: Executor, w: torch.Tensor) -> None:
    x = torch.rand(4, 100)[2:3, :8]
    torch.testing.assert_close(run(x, w), x @ w @ w)
    np.testing.assert_allclose(run(x.numpy(), w.numpy()), (x @ w @ w).numpy(), rtol=1e-5)


def test_read_only_arrays(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    before = run.copies
    np.testing.assert_allclose(run(frozen, w.numpy()), (x @ w @ w).numpy(), rtol=1e-5)
    assert run.copies == before


def test_arrays_of_a_subclass_and_of_files(
    run: Executor, x: torch.Tensor, w: torch.Tensor, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_allclose(run(mapped, w.numpy()), (x @ w @ w).numpy(), rtol=1e-5)
    with pytest.raises(InputError, match="masked"):
        run(np.ma.masked_array(x.numpy(), mask=x.numpy() > 0.5), w.numpy())
    with pytest.raises(InputError, match=r"expected float32, got >f4"):
        run(x.numpy().astype(">f4"), w.numpy())


def test_bfloat16(half: Path) -> None:
    run = Executor(half)
    x, w = torch.rand(5, 8).bfloat16(), torch.rand(8, 8).bfloat16()
    y = run(x, w)
    torch.testing.assert_close(y.float(), x.float() @ w.float() @ w.float(), rtol=0.05, atol=0.05)
    arrays = [t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for t in (x, w)]
    z = run(*arrays)
    assert z.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(z.view(np.int16), y.view(torch.int16).numpy())
    out = np.empty((5, 8), ml_dtypes.bfloat16)
    assert run(*arrays, out=out) is out
    np.testing.assert_array_equal(out.view(np.int16), z.view(np.int16))


def test_mixed_kinds_follow_the_first(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    assert type(run(x, w.numpy())) is torch.Tensor
    assert type(run(x.numpy(), w)) is np.ndarray
    assert isinstance(run(tvm_ffi.from_dlpack(x), w), tvm_ffi.Tensor)
    np.testing.assert_allclose(run(x.numpy(), w), (x @ w @ w).numpy(), rtol=1e-5)


def test_gradients_are_detached(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    y = run(x.clone().requires_grad_(), torch.nn.Parameter(w))
    assert not y.requires_grad
    torch.testing.assert_close(y, x @ w @ w)


def test_lazily_negated_tensors(run: Executor, w: torch.Tensor) -> None:
    x = torch.imag(torch.complex(torch.rand(1, 8), torch.rand(1, 8)).conj())
    assert x.is_neg()
    torch.testing.assert_close(run(x, w), x @ w @ w)
    negated = torch._neg_view(torch.rand(5, 8))
    assert negated.is_neg() and negated.is_contiguous()
    torch.testing.assert_close(run(negated, w), negated @ w @ w)


def test_inference_mode_and_default_device(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(run(x, w), x @ w @ w)
    with torch.device("meta"):
        assert run(x, w).device.type == "cpu"


def test_nan_and_infinity_pass_through(run: Executor, w: torch.Tensor) -> None:
    x = torch.rand(3, 8)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
    torch.testing.assert_close(run(x, w), x @ w @ w, equal_nan=True)


@pytest.mark.parametrize("batch", [0, 1, 6])
@pytest.mark.parametrize("kind", ["torch", "numpy", "tvm_ffi"])
def test_nested_structures(nested: Executor, batch: int, kind: str) -> None:
    convert, result_type, back = KINDS[kind]
    x, y = torch.rand(batch, 8), torch.rand(batch, 8)
    data = {"y": convert(y), "x": convert(x)}
    for result in (nested(data), nested(data, 2), nested(data=data), nested(scale=2, data=data)):
        assert list(result) == ["sum", "parts"] and isinstance(result["parts"], tuple)
        assert isinstance(result["sum"], result_type)
        torch.testing.assert_close(back(result["sum"]), x + y)
        torch.testing.assert_close(back(result["parts"][0]), x.sum(0))
        torch.testing.assert_close(back(result["parts"][1]), torch.cat([x, y]))


def test_results_into_a_nested_out(nested: Executor) -> None:
    x, y = torch.rand(3, 8), torch.rand(3, 8)
    out = {"sum": torch.empty(3, 8), "parts": (torch.empty(8), torch.empty(6, 8))}
    result = nested({"x": x, "y": y}, out=out)
    assert result["sum"] is out["sum"]
    torch.testing.assert_close(out["parts"][1], torch.cat([x, y]))
    with pytest.raises(InputError, match=r"out\.parts.*expected a tuple of 2"):
        nested({"x": x, "y": y}, out={"sum": torch.empty(3, 8), "parts": ()})
    with pytest.raises(InputError, match="expected a dict"):
        nested({"x": x, "y": y}, out=torch.empty(3, 8))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"expected \(data, scale\), got no 'data'"),
        ((1, 2, 3), {}, "got 3 positional"),
        (({},), {}, r"expected a dict with the keys \['x', 'y'\], got the keys \[\]"),
        ((3,), {}, "expected a dict with the keys .* got int"),
        (({"x": 1, "y": 2}, 3), {}, "'scale': expected 2, the value it was built with, got 3"),
        (({"x": 1, "y": 2}, 2.0), {}, "expected 2, .* got 2.0"),
        (({"x": 1, "y": 2},), {"size": 3}, "got an argument named 'size'"),
        (({"x": 1, "y": 2},), {"data": 3}, "'data' both by position and by name"),
        (({"x": 1, "y": 2},), {}, r"'data\.x': expected a tensor .* got int"),
    ],
)
def test_wrong_structures(nested: Executor, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        nested(*args, **kwargs)


def test_several_threads_at_once(run: Executor) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for batch in range(1, 120):
                x, w = (
                    torch.rand(batch, 8, generator=generator),
                    torch.rand(8, 8, generator=generator),
                )
                torch.testing.assert_close(run(x, w), x @ w @ w)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_more_shapes_than_are_remembered(run: Executor, w: torch.Tensor) -> None:
    for batch in range(1500):
        assert run(torch.ones(batch, 8), w).shape == (batch, 8)
    assert len(run._checker.plans) <= 1024


def test_a_kernel_that_fails_is_named(chain: Path, x: torch.Tensor, w: torch.Tensor) -> None:
    run = Executor(chain)

    def broken(*_: Any) -> None:
        raise RuntimeError("storage allocation failure")

    run._threads.here.run = broken  # type: ignore[method-assign]
    with pytest.raises(
        LibraryError,
        match=r"chain\.so: a kernel .* \(sizes \{'B': 5\}\).*storage allocation failure",
    ):
        run(x, w)

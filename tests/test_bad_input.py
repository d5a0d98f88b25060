"""What users pass to a library: right behaviour, or an error that says where and what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tvmcap
from tests.libs import quick
from tvmcap.base.config import Dim
from tvmcap.base.errors import (
    DamagedLibraryError,
    InputError,
)

K, N = 32, 48


@pytest.fixture
def block(blocks: Any) -> Any:
    """The block in float32, and its PyTorch code."""
    torch.manual_seed(5)
    fn, lib = blocks("tanh", torch.float32)
    return lib, fn


@pytest.fixture
def wb() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    return torch.randn(K, N) / 6, torch.randn(N)


@pytest.fixture(scope="module")
def bounded() -> Any:
    """``x + y`` for 2 to 8 rows, the same of both."""
    dim = Dim("B", min=2, max=8)
    return quick(
        lambda x, y: x + y,
        torch.zeros(4, 3),
        torch.zeros(4, 3),
        dynamic={"x": {0: dim}, "y": {0: dim}},
    )


def test_wrong_dtype(block: Any, wb: Any) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        with pytest.raises(
            InputError, match=r"'x': expected torch\.float32, got torch\.\w+; convert it with \.to"
        ):
            block[0](torch.zeros(3, K, dtype=dtype), *wb)


def test_wrong_rank(block: Any, wb: Any) -> None:
    for shape in ((K,), (2, 3, K), ()):
        with pytest.raises(InputError, match=r"'x': expected 2 dimensions"):
            block[0](torch.zeros(shape), *wb)


def test_wrong_device(block: Any, wb: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"'x': expected a tensor on cpu, got one on meta; move it with \.to\('cpu'\)",
    ):
        block[0](torch.zeros(3, K, device="meta"), *wb)


@pytest.mark.gpu
def test_a_gpu_tensor_for_a_cpu_library(block: Any, wb: Any) -> None:
    with pytest.raises(InputError, match=r"expected a tensor on cpu, got one on cuda:0"):
        block[0](torch.zeros(3, K).cuda(), *wb)


def test_no_tensor(block: Any, wb: Any) -> None:
    for wrong in ([[1.0] * K], 3.0, None, "x"):
        with pytest.raises(InputError, match="x"):
            block[0](wrong, *wb)


def test_arguments_missing_surplus_and_unknown(block: Any, wb: Any) -> None:
    x = torch.zeros(3, K)
    with pytest.raises(InputError, match="got no 'b'"):
        block[0](x, wb[0])
    with pytest.raises(InputError, match="3 arguments, got 4"):
        block[0](x, *wb, x)
    with pytest.raises(InputError, match="named 'bias'"):
        block[0](x, wb[0], bias=wb[1])


def test_fixed_size(block: Any, wb: Any) -> None:
    with pytest.raises(InputError, match=rf"'x': expected size {K} in dimension 1 .*dynamic="):
        block[0](torch.zeros(3, K + 1), *wb)


@pytest.mark.parametrize("rows", [0, 1, 9, 1000])
def test_out_of_bounds(bounded: Any, rows: int) -> None:
    x = torch.zeros(rows, 3)
    with pytest.raises(InputError, match=rf"{rows}"):
        bounded(x, x)
    for rows in (2, 8):
        assert bounded(torch.ones(rows, 3), torch.ones(rows, 3)).sum() == 6 * rows


def test_unequal_sizes_for_one_symbol(bounded: Any) -> None:
    with pytest.raises(InputError, match=r"(?s)'y'.*B"):
        bounded(torch.zeros(3, 3), torch.zeros(4, 3))


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
def test_slices_at_any_address(block: Any, wb: Any, offset: int) -> None:
    """A misaligned slice is copied and the result is right; an aligned one is not copied."""
    lib, fn = block
    whole = torch.randn(7 * K + 64)
    x = whole[offset : offset + 7 * K].view(7, K)
    assert x.data_ptr() % 16 != 0 or offset % 4 == 0
    torch.testing.assert_close(lib(x, *wb), fn(x, *wb))
    rows = torch.randn(20, K)[offset:]
    copies = lib.executor.copies
    torch.testing.assert_close(lib(rows, *wb), fn(rows, *wb))
    assert lib.executor.copies == copies  # rows of 128 bytes: a slice of the batch stays aligned
    w = torch.randn(K * N + 9)[offset : offset + K * N].view(K, N) / 6
    torch.testing.assert_close(lib(rows, w, wb[1]), fn(rows, w, wb[1]))


def test_not_contiguous(block: Any, wb: Any, caplog: pytest.LogCaptureFixture) -> None:
    lib, fn = block
    before = lib.executor.copies
    for x in (
        torch.randn(K, 6).t(),
        torch.randn(6, 2 * K)[:, ::2],
        torch.randn(1, K).expand(6, K),
        torch.randn(12, K)[::2],
    ):
        torch.testing.assert_close(lib(x, *wb), fn(x, *wb))
    assert lib.executor.copies == before + 4
    assert "inputs copied so far" in lib.explain()


def test_nan_and_inf_pass_through(block: Any, wb: Any) -> None:
    lib, fn = block
    x = torch.randn(5, K)
    x[0, 3], x[1, 0], x[2, 5] = math.nan, math.inf, -math.inf
    torch.testing.assert_close(lib(x, *wb), fn(x, *wb), equal_nan=True)


def test_nan_and_inf_through_elementwise_and_reductions() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.relu(),
            torch.sigmoid(x),
            x.exp(),
            torch.softmax(x, 1),
            x.amax(1),
            F.gelu(x, approximate="tanh"),
            torch.tanh(x),
            x.clamp(-1, 1),
            *x.max(1),
            *x.min(-1),
            x.argmax(1),
        )

    lib = quick(fn, torch.zeros(3, 4), dynamic={"x": {0: "B"}})
    x = torch.randn(6, 4)
    x[0, 1], x[1, 2], x[2, 0] = math.nan, math.inf, -math.inf
    x[3, :] = math.inf
    x[4, :] = -math.inf
    for got, wanted in zip(lib(x), fn(x), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=2e-6, atol=2e-6)


def test_a_batch_of_none(block: Any, wb: Any) -> None:
    lib, fn = block
    x = torch.zeros(0, K)
    got = lib(x, *wb)
    assert got.shape == fn(x, *wb).shape == (0, N) and got.dtype == torch.float32
    out = torch.empty(0, N)
    assert lib(x, *wb, out=out) is out


def test_a_batch_of_none_with_a_result_that_is_not_empty() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(0), x.exp()

    lib = quick(fn, torch.zeros(3, 4), dynamic={"x": {0: "B"}})
    for got, wanted in zip(lib(torch.zeros(0, 4)), fn(torch.zeros(0, 4)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("out", "say"),
    [
        (torch.empty(3, N + 1), "shape"),
        (torch.empty(3, N, dtype=torch.float64), "float32"),
        (torch.empty(N, 3).t(), "contiguous"),
        (torch.empty(3 * N + 1)[1:].view(3, N), "aligned"),
        ([1.0], "torch.Tensor"),
    ],
    ids=["shape", "dtype", "strides", "address", "list"],
)
def test_out_that_does_not_fit(block: Any, wb: Any, out: Any, say: str) -> None:
    with pytest.raises(InputError, match=say):
        block[0](torch.zeros(3, K), *wb, out=out)


def test_out_that_is_an_argument() -> None:
    lib = quick(lambda x: x + 1, torch.zeros(4, 4))
    x = torch.zeros(4, 4)
    with pytest.raises(InputError, match="memory of its own"):
        lib(x, out=x)


def test_a_truncated_library(block: Any, tmp_path: Path) -> None:
    path = Path(block[0].export(tmp_path / "block.so"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DamagedLibraryError, match=r"block\.so.*(export|build|copy)"):
        tvmcap.load(path)

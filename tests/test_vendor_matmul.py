"""``vendor_matmul``: matmuls are torch's own, counted as untuned, and the library says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmcap
from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.manifest import read_manifest

BARE = (lambda x, w: x @ w), (torch.randn(7, 12), torch.randn(12, 9))


def build(fn: Any, args: Any, **options: Any) -> Any:
    target = options.pop("target", "llvm")
    return tvmcap.build(fn, args, target=target, vendor_matmul=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bare_matmul_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    lib = build(BARE[0], [a.to(dtype) for a in BARE[1]], dynamic={"x": {0: "B"}})
    for rows in (1, 7, 130):
        x, w = torch.randn(rows, 12).to(dtype), torch.randn(12, 9).to(dtype)
        assert torch.equal(lib(x, w), x @ w)
    assert lib(torch.randn(0, 12).to(dtype), torch.randn(12, 9).to(dtype)).shape == (0, 9)


def test_numpy_arrays() -> None:
    lib = build(*BARE, dynamic={"x": {0: "B"}})
    x = np.random.default_rng(0).standard_normal((3, 12), dtype=np.float32)
    w = np.random.default_rng(1).standard_normal((12, 9), dtype=np.float32)
    np.testing.assert_array_equal(lib(x, w), (torch.from_numpy(x) @ torch.from_numpy(w)).numpy())


def test_it_counts_as_untuned_and_explain_says_so() -> None:
    lib = build(lambda x, w: F.gelu(x @ w), (torch.randn(4, 8), torch.randn(8, 6)))
    text = lib.explain()
    assert "torch_matmul: vendor:torch" in text
    assert "left to torch's kernel by vendor_matmul" in text
    assert "tasks tuned; 1 left to torch" in text
    assert lib.manifest.kernels_per_call == 2, "the epilogue is a kernel of its own"
    assert not any(task["tuned"] for task in lib.manifest.coverage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_with_frozen_transposed_and_batched_operands(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.second(torch.relu(self.first(x)))
            return torch.softmax(y @ y.mT, -1)

    net = Net().to(dtype).eval()
    lib = build(net, (torch.randn(2, 5, 8).to(dtype),), dynamic={"x": {1: "T"}})
    assert lib.manifest.verified
    x = torch.randn(2, 11, 8).to(dtype)
    torch.testing.assert_close(lib(x), net(x), rtol=2e-2, atol=2e-2)


def test_the_file_needs_torch_and_says_what_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(*BARE).export(tmp_path / "bare.so")
    assert read_manifest(path).needs == ("torch",)
    x, w = BARE[1]
    assert torch.equal(tvmcap.load(path)(x, w), x @ w)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find(name, *a)
    )
    with pytest.raises(LibraryError, match=r"pip install torch, or build .*without vendor_matmul"):
        tvmcap.load(path)


def test_cross_compiled_for_a_gpu() -> None:
    args = [a.bfloat16() for a in BARE[1]]
    lib = build(lambda x, w: torch.relu(x @ w), args, target="cuda:sm_80", verify=False)
    assert lib.manifest.needs == ("torch",) and lib.manifest.kernels_per_call == 2


def test_without_the_option_nothing_is_left() -> None:
    lib = tvmcap.build(*BARE, target="llvm")
    assert lib.manifest.needs == () and "vendor" not in lib.explain()
    with pytest.raises(ConfigError, match="vendor_matmul: expected True or False"):
        tvmcap.build(*BARE, vendor_matmul="yes")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu(dtype: torch.dtype) -> None:
    x, w = (torch.randn(s, device="cuda").to(dtype) for s in ((256, 512), (512, 384)))
    lib = build(BARE[0], (x, w), target="cuda", dynamic={"x": {0: "B"}})
    assert torch.equal(lib(x, w), x @ w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.randn(1000, 512, device="cuda").to(dtype)
        got = lib(y, w)
    side.synchronize()
    assert torch.equal(got, y @ w)

"""End to end on the CPU: a user's models, in every dtype, at sizes nobody compiled for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi
from torch import nn

import tvmcap
from examples import models
from tests.libs import B, quick, values
from tvmcap import pipeline
from tvmcap.base.errors import CaptureError, ConfigError

WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def weights(
    dtype: torch.dtype = torch.float32, k: int = 32, n: int = 48
) -> tuple[torch.Tensor, torch.Tensor]:
    return (values(k, n) / k**0.5).to(dtype), values(n, dtype=dtype)


def close(got: torch.Tensor, fn: Any, *args: torch.Tensor) -> None:
    """Hold the largest error against float64 to twice eager's own plus one ulp."""
    dtype = args[0].dtype
    with torch.no_grad():
        eager = fn(*args)
        wide = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
        wanted = wide(*(a.double() for a in args))
    assert got.shape == eager.shape and got.dtype == eager.dtype
    ulp = torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1)
    budget = 2 * (eager.double() - wanted).abs().max() + ulp if wanted.numel() else 0
    assert not wanted.numel() or (got.double() - wanted).abs().max() <= budget


def small(
    name: str, dtype: torch.dtype
) -> tuple[nn.Module, list[tuple[int, ...]], dict[str, dict[int, str]]]:
    """A model with its example's shape first, then others."""
    torch.manual_seed(3)
    model, shapes, dynamic = {
        "mlp": lambda: (models.MLP(16, 4), [(4, 16), (1, 16), (19, 16)], B),
        "norm_mlp": lambda: (models.NormMLP(16), [(4, 16), (1, 16), (19, 16)], B),
        "convnet": lambda: (models.ConvNet(4), [(3, 3, 8, 8), (1, 3, 8, 8), (5, 3, 8, 8)], B),
        "attention": lambda: (
            models.SelfAttention(16, 2),
            [(3, 5, 16), (1, 1, 16), (2, 9, 16)],
            {"x": {0: "B", 1: "T"}},
        ),
    }[name]()
    return model.eval().to(dtype), shapes, dynamic


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("mlp", "norm_mlp", "convnet", "attention")),
        *((name, torch.bfloat16) for name in ("mlp", "attention")),  # others: test_cpu_models
    ],
)
def test_models(name: str, dtype: torch.dtype) -> None:
    model, shapes, dynamic = small(name, dtype)
    lib = tvmcap.build(
        model,
        (values(*shapes[0], dtype=dtype),),
        dynamic=dynamic,
        target="llvm",
        tune="none",
        verify=False,
    )
    for shape in shapes:
        x = values(*shape, dtype=dtype, seed=1)
        close(lib(x), model, x)
    assert set(lib.manifest.frozen) >= {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("cls", [nn.GRU, nn.LSTM])
def test_recurrent_layers(cls: type[nn.Module]) -> None:
    torch.manual_seed(3)
    layers = cls(6, 5, 2, dropout=0.5, batch_first=True).eval()
    lib = quick(layers, values(3, 2, 6), verify=True)
    assert lib.manifest.verified
    x = values(3, 2, 6, seed=1)
    torch.testing.assert_close(lib(x), layers(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_prefix_sums(dtype: torch.dtype) -> None:
    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.cumsum(-1), x.cumsum(0)

    lib = quick(sums, (values(4, 37) * 3).to(dtype), dynamic=B)
    for rows in (1, 9):
        x = (values(rows, 37, seed=1) * 3).to(dtype)
        torch.testing.assert_close(lib(x), sums(x))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("form", ["erf", "tanh"])
def test_block(blocks: Any, form: str, dtype: torch.dtype) -> None:
    fn, lib = blocks(form, dtype)
    w, b = weights(dtype)
    for rows in (1, 2, 7, 64, 131):
        x = values(rows, 32, dtype=dtype, seed=rows)
        close(lib(x, w, b), fn, x, w, b)
    assert lib.manifest.kernels_per_call == 1
    assert len(lib.executor.kernel_launches(values(3, 32, dtype=dtype), w, b)) == 1


@pytest.mark.parametrize(
    ("convert", "kind"),
    [(torch.Tensor.numpy, np.ndarray), (tvm_ffi.from_dlpack, tvm_ffi.Tensor)],
    ids=["numpy", "dlpack"],
)
def test_the_kind_that_goes_in_comes_out(blocks: Any, convert: Any, kind: type) -> None:
    fn, lib = blocks("tanh", torch.float32)
    w, b = weights()
    x = values(6, 32)
    got = lib(*map(convert, (x, w, b)))
    assert isinstance(got, kind)
    close(torch.from_dlpack(got), fn, x, w, b)


def test_fresh_results_and_out(blocks: Any) -> None:
    fn, lib = blocks("tanh", torch.float32)
    w, b = weights()
    x = values(6, 32)
    first, second = lib(x, w, b), lib(x + 1, w, b)
    assert first.data_ptr() != second.data_ptr()
    close(first, fn, x, w, b)
    mine = torch.full((6, 48), float("nan"))
    assert lib(x, w, b, out=mine) is mine
    close(mine, fn, x, w, b)
    assert lib(w=w, b=b, x=x).equal(mine)


def test_examples_may_be_numpy() -> None:
    lib = tvmcap.build(
        lambda x: x.relu() - 1, (values(3, 4).numpy(),), target="llvm", dynamic=B, verify=False
    )
    x = values(5, 4)
    assert torch.equal(lib(x), x.relu() - 1)


def nested(data: dict[str, Any], scale: float = 1.0) -> Any:
    x, (y, z) = data["x"], data["pair"]
    total = x @ y
    return {"total": total * scale, "rest": (z.exp(), [total, x]), "none": None}


def test_nested_inputs_and_outputs() -> None:
    data = {"x": values(3, 4), "pair": (values(4, 2), values(5))}
    lib = tvmcap.build(
        nested,
        (data,),
        {"scale": 2.0},
        dynamic={"data.x": {0: "B"}},
        target="llvm",
        tune="none",
        verify=False,
    )
    for rows in (3, 7):
        data = {"x": values(rows, 4, seed=2), "pair": (values(4, 2, seed=2), values(5, seed=2))}
        got, wanted = lib(data, scale=2.0), nested(data, scale=2.0)
        assert got["none"] is None and set(got) == set(wanted)
        assert isinstance(got["rest"], tuple) and isinstance(got["rest"][1], list)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    results = [got["total"], got["rest"][0], *got["rest"][1], data["x"]]
    assert len({t.data_ptr() for t in results}) == len(results)


def test_exported_program_and_file(tmp_path: Path) -> None:
    model, shapes, _ = small("mlp", torch.float32)
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(model, (values(*shapes[0]),), dynamic_shapes=({0: batch},))
    lib = tvmcap.build(program, target="llvm", tune="none", verify=False)
    assert lib.signature.dims[0].max == 64
    torch.export.save(program, tmp_path / "mlp.pt2")
    other = tvmcap.build(tmp_path / "mlp.pt2", target="llvm", tune="none", verify=False)
    for rows in (1, 33):
        x = values(rows, 16)
        close(lib(x), model, x)
        close(other(x), model, x)


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "bad.pt2").write_bytes(b"nonsense")
    for path in (tmp_path / "bad.pt2", tmp_path / "none.pt2"):
        with pytest.raises(CaptureError, match=r"\.pt2"):
            tvmcap.build(path, target="llvm")


def test_constants_are_frozen_and_packed(blocks: Any) -> None:
    fn, _ = blocks("tanh", torch.float32)
    w, b = weights()
    lib = tvmcap.build(
        fn,
        (values(4, 32), w, b),
        constants=("w", "b"),
        dynamic=B,
        target="llvm",
        tune="none",
        verify=False,
    )
    assert lib.signature.arg_names == ("x",) and lib.manifest.frozen == ("w", "b")
    assert "frozen at build" in lib.explain()
    for rows in (1, 9):
        x = values(rows, 32, seed=4)
        close(lib(x), lambda x: fn(x, w.to(x.dtype), b.to(x.dtype)), x)
    before = lib(x)
    w += 1
    assert torch.equal(lib(x), before)  # a later change is not seen


def test_constants_that_are_no_arguments() -> None:
    with pytest.raises(ConfigError, match="weight"):
        tvmcap.build(lambda x: x + 1, (values(2),), constants=("weight",), target="llvm")


def test_everything_frozen() -> None:
    x = values(2, 3)
    lib = tvmcap.build(lambda x: (x + 1, x.sum()), (x,), constants=("x",), target="llvm")
    got = lib()
    torch.testing.assert_close(got, (x + 1, x.sum()))
    assert lib()[0].data_ptr() != got[0].data_ptr()


@pytest.mark.parametrize(
    "disable", [*((name,) for name in pipeline.OPTIONAL), pipeline.OPTIONAL], ids=str
)
def test_without_passes_still_right(disable: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 8)).eval()
    x = values(4, 12)
    lib = tvmcap.build(
        model,
        (x,),
        disable=disable,
        dynamic={0: {0: "B"}},
        target="llvm",
        tune="none",
        verify=False,
    )
    for rows in (1, 11):
        x = values(rows, 12, seed=3)
        close(lib(x), model, x)

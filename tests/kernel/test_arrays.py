"""Arguments that stay on a device: drawn by seed, restored, and compared as numpy would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm_ffi

from tvmcap.kernel import arrays, check

DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"]


def spec(dtype: str, *shape: int) -> dict[str, object]:
    return {"shape": list(shape), "dtype": dtype}


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_by_seed(dtype: str) -> None:
    one, same, other = (
        arrays.DeviceArrays([spec(dtype, 40, 8)], seed, "cpu").drawn[0] for seed in (5, 5, 6)
    )
    assert one.dtype == getattr(torch, dtype) and one.shape == (40, 8)
    assert torch.equal(one, same) and not torch.equal(one, other)
    (host,) = check.random_inputs([spec(dtype, 400, 8)], 5)
    device = arrays.DeviceArrays([spec(dtype, 400, 8)], 5, "cpu").drawn[0].double()
    wide = host.astype("float64")
    assert abs(device.std() - wide.std()) < 0.1 * wide.std() and device.max() <= 4 * wide.max()


def test_what_a_candidate_wrote_is_restored_and_the_rest_shared() -> None:
    data = arrays.DeviceArrays([spec("float32", 4), spec("float32", 4)], 0, "cpu")
    first = data.sets(3, [1])
    torch.from_dlpack(first[2][1]).zero_()
    torch.from_dlpack(first[2][0]).fill_(7)
    again = data.sets(3, [1])
    assert len(again) == 3 and isinstance(again[0][0], tvm_ffi.Tensor)
    assert torch.equal(torch.from_dlpack(again[2][1]), data.drawn[1])
    assert torch.equal(torch.from_dlpack(again[2][0]), torch.full((4,), 7.0))
    assert not torch.equal(torch.from_dlpack(again[0][0]), torch.full((4,), 7.0))


def change(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return values with one kind of damage; "" and "rounded" are none."""
    new = values.clone()
    flat = new.view(-1)
    if kind == "one wrong":
        flat[5] = flat[5] + 3
    elif kind == "nan":
        flat[7] = torch.nan
    elif kind == "infinite":
        flat[9] = -torch.inf
    elif kind == "no nan":
        flat[0] = 1
    elif kind == "other sign":
        flat[1] = -flat[1]
    elif kind == "rounded":
        flat *= 1 + torch.finfo(values.dtype).eps
    return new


def holding(data: arrays.DeviceArrays, values: torch.Tensor) -> list[tvm_ffi.Tensor]:
    """Return a set whose one argument a candidate has written so."""
    (tensors,) = data.sets(1, [0])
    torch.from_dlpack(tensors[0]).copy_(values)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "kind", ["", "rounded", "one wrong", "nan", "infinite", "no nan", "other sign"]
)
def test_compares_as_numpy_does(dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK", 64)
    make = torch.Generator().manual_seed(sum(map(ord, dtype + kind)))
    right = torch.randn(20, 30, generator=make).to(getattr(torch, dtype))
    right[0, :2] = torch.tensor([torch.nan, torch.inf])
    got = change(right, kind)
    data = arrays.DeviceArrays([spec(dtype, 20, 30)], 0, "cpu")
    data.expect({0: right.float().numpy()})
    found = data.mismatch(holding(data, got))
    wanted = check.mismatch(got.float().numpy(), right.float().numpy(), dtype)
    assert (found is None) == (wanted is None) == (kind in ("", "rounded"))
    if wanted is not None:
        assert found == f"output 0: {wanted}"


def test_integers_agree_exactly() -> None:
    data = arrays.DeviceArrays([spec("int32", 6)], 0, "cpu")
    data.expect({0: np.arange(6, dtype="int32")})
    assert data.mismatch(holding(data, torch.arange(6, dtype=torch.int32))) is None
    wrong = data.mismatch(holding(data, torch.ones(6, dtype=torch.int32)))
    assert wrong == "output 0: 5 of 6 integers differ"


def test_only_the_youngest_are_kept() -> None:
    kept = arrays.Kept(100)
    for name in "abc":
        kept.put(name, name, 40)  # type: ignore[arg-type]
        kept.get("a")
    assert list(kept.found) == ["c", "a"]
    kept.put("large", "large", 1000)  # type: ignore[arg-type]
    assert list(kept.found) == ["large"]
    kept.drop("large")
    assert kept.get("large") is None


def test_copies_fill_the_cache_unless_small() -> None:
    assert arrays.copies(1000, 64_000, 8) == 1
    assert arrays.copies(10_000, 64_000, 8) == 7
    assert arrays.copies(1_001, 64_000, 8) == 8
    assert arrays.copies(1 << 30, 64_000, 8) == 1
    assert arrays.copies(5, 0, 1) == 1


@pytest.mark.gpu
def test_a_wrong_candidate_spares_the_next() -> None:
    """Another computation with the same arguments is found wrong, and the right one is timed."""
    from tests.schedules.products import TARGET, product
    from tvmcap.kernel import measure, spaces, tasks

    func = product(n=256, k=128).with_attr("global_symbol", "block")
    task = tasks.make_task(func, TARGET, spaces.find)
    text = task.template.knobs_to_json(task.template.default(task.problem, TARGET))
    good = measure.Candidate("good", func, task.template, text)
    other = measure.Candidate("other", product(n=256, k=128, gelu=False), task.template, text)
    with measure.Measurer(TARGET, workers=2) as measurer:
        work = measure.Workload(task, {task.vars[0].name: 300}, seed=3)
        results = list(measurer.measure(work, [good, other, good]))
    assert [r.cause for r in results] == [None, "wrong result", None]
    assert 1 < (results[0].median_us or 0) < 100 and results[0].samples >= 7


@pytest.mark.parametrize("kind", [arrays.HostArrays, arrays.DeviceArrays])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_what_no_candidate_may_write_to_is_watched(kind, dtype: str) -> None:
    import ctypes

    import tvm

    device = tvm.cpu(0) if kind is arrays.HostArrays else "cpu"
    specs = [spec(dtype, 3, 5), spec(dtype, 7), spec(dtype, 0, 4)]
    for argument, offset, said in (
        (0, -1, "before the memory of argument 0"),
        (1, 7, "after the memory of argument 1"),
        (0, 4, "to the memory of argument 0"),
        (1, 4, None),  # the output
    ):
        data = kind(specs, 3, device)
        first, second = data.sets(2, [1])
        assert first[1].shape == (7,) and str(first[1].dtype) == dtype
        data.unharmed(first)
        at = torch.from_dlpack(first[argument])
        address = at.data_ptr() + offset * at.element_size()
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 0x41
        data.unharmed(second)
        if said is None:
            data.unharmed(first)
            continue
        with pytest.raises(arrays.HarmError, match=said):
            data.unharmed(first)

"""Random inputs for a kernel, its reference outputs, and whether two outputs agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm

from tvmcap.kernel.features import new_schedule

#: Largest error of one element, over its own size plus the output's root mean square. Sums in
#: another order differ by a few units in the last place of the largest term; a wrong tile or a
#: missing term differs by a whole part.
_TOLERANCE = {"float64": 1e-8, "float32": 2e-3, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
_TOLERANCE_OTHER_FLOAT = 0.15


def precision(arg: dict[str, Any]) -> str:
    """Return what an argument's values are computed in: its dtype, or "tf32" where that is less."""
    return str(arg.get("precision", arg["dtype"]))


def random_inputs(args: list[dict[str, Any]], seed: int) -> list[Any]:
    """Draw an array for each ``{"shape", "dtype"}``: normal floats, small integers (indices)."""
    rng = np.random.default_rng(seed)
    return [_draw(arg, rng) for arg in args]


def _draw(arg: dict[str, Any], rng: np.random.Generator) -> Any:
    dtype, shape = arg["dtype"], arg["shape"]
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("int8", "uint8"):
        return rng.integers(
            np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True
        )
    if "float" not in dtype:
        return rng.integers(0, 2, shape).astype(dtype)
    return _cast(rng.standard_normal(shape, dtype=np.float32), dtype)


def _cast(values: Any, dtype: str) -> Any:
    if dtype in ("float16", "float32", "float64"):
        return values.astype(dtype)
    import ml_dtypes

    return values.astype(getattr(ml_dtypes, dtype))


def to_device(values: list[Any], device: Any) -> list[Any]:
    """Copy inputs to fresh tensors."""
    return [tvm.runtime.tensor(v, device) for v in values]


def to_numpy(tensor: Any) -> Any:
    """Copy a tensor to numpy, floats narrower than 32 bits as float32 (exact)."""
    values = tensor.numpy()
    return (
        values.astype(np.float32)
        if values.dtype.kind not in "biu" and values.dtype.itemsize < 4
        else values
    )


def mismatch(got: Any, expected: Any, dtype: str) -> str | None:
    """Describe an error beyond what the order of summation explains, or return None."""
    if got.dtype.kind in "biu":
        wrong = int(np.count_nonzero(got != expected))
        return f"{wrong} of {got.size} integers differ" if wrong else None
    if not np.array_equal(np.isnan(got), np.isnan(expected)):
        return "NaNs are in other places"
    finite = np.isfinite(expected)
    infinite = np.isinf(expected)
    if not (
        np.array_equal(np.isinf(got), infinite)
        and np.array_equal(got[infinite], expected[infinite])
    ):
        return "infinities are in other places"
    if not finite.any():
        return None
    got, expected = got[finite].astype(np.float64), expected[finite].astype(np.float64)
    scale = float(np.sqrt(np.mean(expected**2))) or 1.0
    return beyond(float(np.max(np.abs(got - expected) / (np.abs(expected) + scale))), dtype)


def beyond(error: float, dtype: str) -> str | None:
    """Describe a relative error that is more than the dtype's rounding explains, or return None."""
    limit = _TOLERANCE.get(dtype, _TOLERANCE_OTHER_FLOAT)
    return None if error <= limit else f"relative error {error:.3g}, at most {limit:g} expected"


def plain_schedule(func: Any, target: Any) -> Any:
    """Return the function as written, but with loops in an order and on threads that end soon.

    On a CPU reductions move outside the innermost spatial loop and the outermost one runs in
    parallel; on a GPU the spatial loops are bound to threads. Both are transformations that TVM
    itself proves.
    """
    sch = new_schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        try:
            _plain_block(sch, block, target.kind.name != "llvm")
        except tvm.s_tir.ScheduleError:
            continue
    return sch.mod["main"]


def _plain_block(sch: Any, block: Any, on_gpu: bool) -> None:
    kinds = [int(v.iter_type) for v in sch.get(block).iter_vars]
    loops = sch.get_loops(block)
    if len(kinds) != len(loops):
        return
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == 0]
    reduction = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == 2]
    if not spatial or len(spatial) + len(reduction) != len(loops):
        return
    if on_gpu:
        if reduction:
            sch.reorder(*spatial, *reduction)
        blocks, threads = sch.split(sch.fuse(*spatial), [None, 256])
        sch.bind(blocks, "blockIdx.x")
        sch.bind(threads, "threadIdx.x")
        return
    if reduction:
        sch.reorder(*spatial[:-1], *reduction, spatial[-1])
    if len(spatial) > 1:
        sch.parallel(sch.fuse(*spatial[:-1]))

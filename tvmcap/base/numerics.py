"""Comparison of a result with a higher-precision reference, and the error budget that decides.

The budget: every element of ours may differ from the reference by at most ``2 x`` eager's own
largest error against the same reference, plus one ulp of the output's dtype at that element's
reference value. A second rule catches what a wide
dynamic range would hide: relative to the largest value of its own slice along dimension 0, no
element may be off by more than 16 times what eager is anywhere. NaN and Inf must stand where the
reference, or eager, has them. Integers and bools must equal the reference or eager exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Explicit mantissa bits, exponent of the smallest normal number, largest finite value.
_FLOATS = {
    "float64": (52, -1022, float(np.finfo(np.float64).max)),
    "float32": (23, -126, float(np.finfo(np.float32).max)),
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, float.fromhex("0x1.fep127")),
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
}
EAGER_FACTOR = 2.0
SLICE_FACTOR = 16.0
_CHUNK = 1 << 21
_MIN_SLICE = 8
_TELLING = 1e-3


@dataclass(frozen=True)
class Comparison:
    """One output against its reference.

    Attributes
    ----------
    name, dtype, shape: the output; ``dtype`` gives the ulp.
    max_abs: largest absolute error.
    max_rel, max_ulps: largest relative error and error in ulps, where the reference is at least a
        thousandth of the largest value of its slice (below, both only measure cancellation).
    index: the element that breaks the budget most, else the one with the largest absolute error.
    got, want: values there.
    eager_abs: eager's own largest absolute error.
    budget: what the element at ``index`` may differ by.
    bad: elements outside the budget, those with a misplaced NaN or Inf included.
    misplaced: elements that are NaN or Inf where they should not be, or the reverse.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulps: float = 0.0
    index: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    eager_abs: float = 0.0
    budget: float = 0.0
    bad: int = 0
    misplaced: int = 0

    @property
    def ok(self) -> bool:
        """Whether every element is within the budget."""
        return self.bad == 0

    @property
    def title(self) -> str:
        """The output, and what is said of it first."""
        return self.name

    @property
    def rule(self) -> str:
        """What the budget is, in words."""
        return "twice eager's own largest error plus one ulp"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; NaN and Inf become strings."""
        data = {**asdict(self), "ok": self.ok}
        return {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in data.items()
        }

    def __str__(self) -> str:
        """Say the errors, and where they exceed the budget."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        text = (
            f"{self.title} ({self.dtype} {shape}): max abs {self.max_abs:.3g}, "
            f"max rel {self.max_rel:.3g}, {self.max_ulps:.3g} ulp; eager {self.eager_abs:.3g}"
        )
        if self.ok:
            return f"{text}; within the budget {self.budget:.3g}"
        where = f"[{', '.join(map(str, self.index))}]"
        kind = f", {self.misplaced} NaN or Inf out of place" if self.misplaced else ""
        return (
            f"{text}; {self.bad} of {math.prod(self.shape)} elements outside the budget{kind}; "
            f"worst at {where}: got {self.got:.9g}, want {self.want:.9g} within {self.budget:.3g}"
        )


def to_numpy(value: Any) -> Array:
    """Copy a torch, TVM or numpy tensor to the host; bfloat16 and float8 widen to float32."""
    if isinstance(value, np.ndarray):
        return (
            value.astype(np.float32)
            if value.dtype.name in _FLOATS and value.dtype.kind == "V"
            else value
        )
    if hasattr(value, "detach"):
        value = value.detach()
        if str(value.dtype) in ("torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2"):
            value = value.float()
        return np.asarray(value.cpu().numpy())
    if hasattr(value, "numpy"):
        return np.asarray(value.numpy())
    if hasattr(value, "__dlpack__") and not np.isscalar(value):
        return np.from_dlpack(value)
    return np.asarray(value)


def dtype_name(value: Any) -> str:
    """Name of a tensor's dtype as TVM writes it, such as ``"bfloat16"``."""
    return str(value.dtype).removeprefix("torch.")


def ulp(values: Array, dtype: str) -> Array:
    """Distance from each |value| to the next larger number of ``dtype``.

    float32 and bfloat16 never go below their smallest normal number, because kernels may flush
    subnormals to zero.
    """
    bits, lowest, _ = _FLOATS[dtype]
    exponent = np.frexp(np.abs(values, dtype=np.float64))[1].astype(np.int64) - 1
    exponent = np.where(values == 0, lowest, np.maximum(exponent, lowest))
    unit = np.ldexp(1.0, (exponent - bits).astype(np.int32))
    return np.maximum(unit, 2.0**lowest) if dtype in ("float32", "bfloat16") else unit


def compare(
    got: Any,
    reference: Any,
    eager: Any = None,
    *,
    name: str = "output",
    dtype: str | None = None,
    others: Sequence[Any] = (),
) -> Comparison:
    """Hold ``got`` to the budget that ``reference`` and ``eager`` give.

    Without ``eager`` its error counts as 0. ``others`` is what eager gives when it rounds
    otherwise: the largest error of all counts. All are tensors of one shape. ``dtype`` is the
    output's; by default that of ``got``. A shape that differs breaks the budget at every element.
    """
    dtype = dtype or dtype_name(got)
    ours, ref = to_numpy(got), to_numpy(reference)
    base = ref if eager is None else to_numpy(eager)
    if ours.shape != ref.shape or base.shape != ref.shape:
        detail = f"{name}: shape {ours.shape}, expected {ref.shape}"
        return Comparison(detail, dtype, ours.shape, max_abs=math.inf, bad=max(ref.size, 1))
    result = Comparison(name, dtype, tuple(ref.shape))
    if ref.size == 0:
        return result
    if dtype not in _FLOATS:
        return _compare_exact(result, ours, ref, base)
    return _compare_float(result, ours, ref, [base, *map(to_numpy, others)])


def _compare_exact(result: Comparison, ours: Array, ref: Array, base: Array) -> Comparison:
    wrong = (ours != ref) & (ours != base)
    error = np.abs(ours.astype(np.float64) - ref.astype(np.float64)) * wrong
    at = np.unravel_index(int(np.argmax(error)), ref.shape)
    worst = float(error[at])
    return replace(
        result,
        max_abs=worst,
        bad=int(wrong.sum()),
        index=tuple(map(int, at)),
        got=float(ours[at]),
        want=float(ref[at]),
    )


@dataclass
class _Block:
    """Some slices along dimension 0 as [slices, elements]; ``want`` is what each should be."""

    ours: Array
    want: Array
    base: Array
    measured: Array
    base_measured: Array
    misplaced: Array
    unit: Array
    peak: Array


def _eager_errors(
    ours: Array, ref: Array, bases: Sequence[Array], dtype: str
) -> tuple[float, float]:
    """Return eager's largest error, and the largest over the peak of its slice."""
    largest = over_peak = 0.0
    for base in bases:
        for _, b in _blocks(ours, ref, base, dtype):
            error = np.where(b.base_measured, np.abs(b.base - b.want), 0.0)
            largest = max(largest, float(error.max()))
            peak = np.where(b.peak > 0, b.peak, math.inf)
            over_peak = max(over_peak, float((error.max(axis=1, keepdims=True) / peak).max()))
    return largest, over_peak


def _compare_float(
    result: Comparison, ours: Array, ref: Array, bases: Sequence[Array]
) -> Comparison:
    base = bases[0]
    eager_abs, eager_slice = _eager_errors(ours, ref, bases, result.dtype)
    result = replace(result, eager_abs=eager_abs)
    worst = (False, -math.inf)
    for start, b in _blocks(ours, ref, base, result.dtype):
        error = np.where(b.measured, np.abs(b.ours - b.want), 0.0)
        budget = EAGER_FACTOR * eager_abs + b.unit
        if b.ours.shape[1] >= _MIN_SLICE:
            strict = SLICE_FACTOR * eager_slice * b.peak + ulp(b.peak, result.dtype)
            budget = np.minimum(budget, np.where(b.peak > 0, strict, math.inf))
        excess = np.where(b.misplaced, math.inf, error - budget)
        bad = excess > 0
        result = _merge(result, b, error, int(bad.sum()))
        at = int(np.argmax(excess if bad.any() else np.where(b.measured, error, -1.0)))
        rank = (bool(bad.any()), float((excess if bad.any() else error).flat[at]))
        if rank > worst:
            worst = rank
            index = np.unravel_index(start + at, ref.shape)
            result = replace(
                result,
                index=tuple(map(int, index)),
                got=float(b.ours.flat[at]),
                want=float(b.want.flat[at]),
                budget=float(budget.flat[at]),
            )
    return result


def _merge(result: Comparison, b: _Block, error: Array, bad: int) -> Comparison:
    size = np.abs(b.want, where=b.measured, out=np.zeros_like(b.want))
    telling = (size >= _TELLING * b.peak) & (size > 0)
    rel = error / np.where(telling, size, math.inf)
    ulps = np.where(telling, error / b.unit, 0.0)
    return replace(
        result,
        max_abs=max(result.max_abs, float(error.max())),
        max_rel=max(result.max_rel, float(rel.max())),
        max_ulps=max(result.max_ulps, float(ulps.max())),
        bad=result.bad + bad,
        misplaced=result.misplaced + int(b.misplaced.sum()),
    )


def _blocks(ours: Array, ref: Array, base: Array, dtype: str) -> Iterator[tuple[int, _Block]]:
    """Walk whole slices of dimension 0 in float64, with the flat offset of each block."""
    rows = ref.shape[0] if ref.ndim else 1
    width = ref.size // rows
    step = max(1, _CHUNK // width)
    flat = [np.ascontiguousarray(a).reshape(rows, width) for a in (ours, ref, base)]
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, rows, step):
            y, r, e = (a[start : start + step].astype(np.float64) for a in flat)
            yield start * width, _block(y, r, e, dtype)


def _block(y: Array, r: Array, e: Array, dtype: str) -> _Block:
    bits, _, largest = _FLOATS[dtype]
    overflow = largest + largest * 2.0 ** -(bits + 2)
    rounded = np.where(np.abs(r) >= overflow, np.copysign(np.inf, r), r)
    y_ok, r_ok, e_ok = (np.isfinite(a) for a in (y, rounded, e))
    misplaced = ~(_same_kind(y, rounded) | _same_kind(y, e))
    # Where the reference overflows or is NaN and eager is finite, eager's value is the one to meet.
    want = np.where(r_ok, r, np.where(e_ok, e, rounded))
    finite = np.isfinite(want)
    peak = np.where(finite, np.abs(want), 0.0).max(axis=1, keepdims=True)
    unit = ulp(np.where(finite, want, 0.0), dtype)
    return _Block(y, want, e, y_ok & finite, e_ok & finite, misplaced, unit, peak)


def _same_kind(a: Array, b: Array) -> Array:
    nan = np.isnan(a) & np.isnan(b)
    finite = np.isfinite(a) & np.isfinite(b)
    return np.asarray(nan | finite | ((a == b) & ~finite))

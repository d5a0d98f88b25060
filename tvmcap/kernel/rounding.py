"""Roundings inside kernels of a GPU: none twice, and each in one instruction."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvmcap.base.codegen import compute_capability

_HALF = ("float16", "bfloat16")
#: The upper half of a float32 is its bfloat16. Rounding one value alone is left to the unit of
#: special functions, at a quarter of the rate, and the result has to be shifted.
_ROUND = (
    "__forceinline__ __device__ float tvmcap_round_bf16(float x)"
    '{ unsigned word; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x), "f"(0.0f));'
    " return __uint_as_float(word); }"
)
_FIRST_PAIRS = 80  # sm_80, whose instruction rounds two values


@tirx.transform.prim_func_pass(opt_level=0)
def single_roundings(func: Any, mod: Any, context: Any) -> Any:
    """Ensures a float32 rounded to 16 bits and widened again is rounded once, in one instruction.

    Registers that only ever hold such values count as rounded.
    """
    target = func.attrs.get("target") if func.attrs else None
    if target is None or target.kind.name != "cuda":
        return func
    pairs = compute_capability(target) >= _FIRST_PAIRS
    rounded = _rounded_registers(func.body)

    def once(cast: Any) -> Any:
        half = _rounding(cast)
        if half is None:
            return cast
        value = cast.value.value
        source = value.source if isinstance(value, tvm.ir.TensorLoad) else None
        if source is not None and rounded.get(source) == half:
            return value
        if half != "bfloat16" or not pairs:
            return cast
        return T.cuda.func_call(
            "tvmcap_round_bf16", value, source_code=_ROUND, return_type="float32"
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Cast, once)))


def _rounding(value: Any) -> str | None:
    """Name the 16-bit type that a float32 expression is rounded to, as the last thing."""
    inner = value.value if isinstance(value, tirx.Cast) else None
    if inner is None or str(value.ty) != "float32" or not isinstance(inner, tirx.Cast):
        return None
    half = str(inner.ty)
    return half if half in _HALF and str(inner.value.ty) == "float32" else None


def _rounded_registers(body: Any) -> dict[Any, str]:
    """Return the float32 buffers of a thread that only hold values rounded to one 16-bit type."""
    kinds: dict[Any, set[str | None]] = {}

    def see(store: Any) -> None:
        buffer = store.buffer
        if str(buffer.scope()) == "local" and str(buffer.dtype) == "float32":
            kinds.setdefault(buffer, set()).add(_rounding(store.value))

    tvm_ffi.structural_walk(body, (tirx.BufferStore, see))
    return {b: k for b, (k, *more) in kinds.items() if k is not None and not more}

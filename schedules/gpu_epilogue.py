"""Epilogues inside TIRx kernels: access through flat views, quick forms of slow functions."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

_HALF = ("float16", "bfloat16")
_TANH = tvm.ir.Op.get("tirx.tanh")
_QUICK_TANH = (
    "__forceinline__ __device__ float tvmcap_tanh(float x)"
    "{ return 1.0f - __fdividef(2.0f, __expf(2.0f * x) + 1.0f); }"
)


def position(gemm: Any, row: Any, col: Any) -> list[Any]:
    """Index into an output: the flat row split into the leading dimensions, then the column."""
    row, lead = T.Cast("int64", row), []
    for extent in reversed(gemm.row_dims[1:]):
        extent = tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
        lead.append(tirx.floormod(row, extent))
        row = tirx.floordiv(row, extent)
    return [row, *reversed(lead), T.Cast("int64", col)]


class Views:
    """One-dimensional views of what the epilogue reads and writes, declared inside a kernel.

    LowerTIRx loses track of some parameters that are addressed by their own indices.
    """

    def __init__(self, gemm: Any) -> None:
        self.epilogue = gemm.fused.epilogue
        self.flat: dict[Any, Any] = {}

    def declare(self) -> None:
        """Declare them; to be called where the kernel's body starts."""
        for buffer in dict.fromkeys([*self.epilogue.reads, *self.epilogue.outputs]):
            self.flat[buffer] = flatten(buffer)

    def load(self, buffer: Any, at: list[Any]) -> Any:
        """Read a parameter through its view; the kernel's own variables as they are."""
        if buffer not in self.flat:
            return tirx.BufferLoad(buffer, at)
        return tirx.BufferLoad(self.flat[buffer], [_offset(buffer, at)])

    def values(self, accumulated: Any, at: list[Any]) -> list[Any]:
        """Return each output's value where the accumulator holds ``accumulated``."""
        binds, values = self.epilogue.stores(accumulated, at, self.load)
        results = []
        for buffer, result in values:
            for bind in reversed(binds):
                result = tirx.Let(bind.var, bind.value, result)
            results.append(quick(result) if str(buffer.dtype) in _HALF else result)
        return results

    def store(self, accumulated: Any, at: list[Any]) -> None:
        """Write every output."""
        for buffer, result in zip(self.epilogue.outputs, self.values(accumulated, at), strict=True):
            T.buffer_store(self.flat[buffer], result, [_offset(buffer, at)])


def quick(value: Any) -> Any:
    """Replace tanh by a form of two special-function instructions, for results of 16 bits.

    Its absolute error is 2e-7 (of __expf and __fdividef, CUDA C++ Programming Guide, "Mathematical
    functions"); tanhf, exact to one ulp, takes several times as long.
    """

    def replace(call: Any) -> Any:
        if call.op.same_as(_TANH) and str(call.ty) == "float32":
            return T.cuda.func_call(
                "tvmcap_tanh", *call.args, source_code=_QUICK_TANH, return_type="float32"
            )
        return call

    return tvm_ffi.structural_map(value, (tvm.ir.Call, replace))


def flatten(buffer: Any) -> Any:
    """Declare a one-dimensional view of a contiguous buffer."""
    size: Any = 1
    for extent in buffer.shape:
        size = size * extent
    return T.decl_buffer((size,), str(buffer.dtype), data=buffer.data)


def _offset(buffer: Any, at: list[Any]) -> Any:
    offset: Any = 0
    for extent, index in zip(buffer.shape, at, strict=True):
        offset = offset * extent + index
    return offset

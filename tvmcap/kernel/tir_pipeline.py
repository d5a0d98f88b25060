"""The pipelines that lower kernels: TVM's own, with what they lack."""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm.tirx import PrimFunc
from tvm.tirx.compilation_pipeline import register_tir_pipeline, tirx_pipeline

from tvmcap.kernel.rounding import single_roundings

LOOPS, TIRX = "tvmcap_loops", "tvmcap_tirx"
"""What ``tir_pipeline=`` of TVM's compilers takes for loops that a schedule made, and for TIRx."""
_ONE_ALLOCATION = "tirx.merge_static_smem"


def name_for(func: Any) -> str:
    """Name the pipeline of a kernel."""
    return LOOPS if (func.attrs or {}).get("s_tir", False) else TIRX


def _tirx_parts() -> tuple[Any, Any, Any]:
    """Return the passes of a module, and of host and device functions once they are apart."""
    stock, finish_host, finish_device = tirx_pipeline()
    return tvm.transform.Sequential([single_roundings, stock]), finish_host, finish_device


def _loop_parts() -> tuple[Any, Any, Any]:
    """Return the same for loops that a schedule made."""
    from tvm.s_tir.pipeline import default_s_tir_pipeline

    stock, finish_host, finish_device = default_s_tir_pipeline()

    @tvm.transform.module_pass(opt_level=0)
    def lower(mod: tvm.IRModule, context: Any) -> tvm.IRModule:
        """Lower kernels on tensor cores with one shared allocation, which fails for others."""
        cores = {g: f for g, f in mod.functions.items() if uses_fragments(f)}
        others = {g: f for g, f in mod.functions.items() if g not in cores}
        done = dict(stock(tvm.IRModule(others, attrs=mod.attrs)).functions.items())
        if cores:
            config = {**dict(context.config), _ONE_ALLOCATION: True}
            with tvm.transform.PassContext(opt_level=context.opt_level, config=config):
                done.update(stock(tvm.IRModule(cores)).functions.items())
        return tvm.IRModule(done, attrs=mod.attrs)

    def finish_on_host() -> Any:
        return tvm.transform.Sequential([unbound_comparisons, finish_host()])

    def finish_on_device() -> Any:
        return tvm.transform.Sequential([finish_device(), printable_numbers])

    return lower, finish_on_host, finish_on_device


register_tir_pipeline(LOOPS, _loop_parts)
register_tir_pipeline(TIRX, _tirx_parts)


@tvm.tirx.transform.prim_func_pass(opt_level=0)
def unbound_comparisons(func: Any, mod: Any, context: Any) -> Any:
    """Ensures no variable is bound to comparisons of index vectors, whose range TVM fails to find.

    Sharing of common subexpressions binds them; LLVM shares them again.
    """
    values: dict[Any, Any] = {}

    def put(var: Any) -> Any:
        return values.get(var, var)

    def note(bind: Any) -> Any:
        if not _compares_indices(bind.value):
            return bind
        values[bind.var] = bind.value
        return tvm.tirx.Evaluate(tvm.tirx.IntImm("int32", 0))

    body = tvm_ffi.structural_map(func.body, [(tvm.tirx.Var, put), (tvm.tirx.Bind, note)])
    return func.with_body(body) if values else func


def _compares_indices(value: Any) -> bool:
    """Whether a value holds a comparison of vectors and reads no memory, which may change."""
    vectors: list[bool] = []
    reads: list[Any] = []
    visits = [(_COMPARISONS, lambda e: vectors.append("x" in str(e.ty))), (_READS, reads.append)]
    tvm_ffi.structural_walk(value, visits)
    return any(vectors) and not reads


_COMPARISONS = tuple(getattr(tvm.tirx, kind) for kind in ("EQ", "NE", "LT", "LE", "GT", "GE"))
_READS = (tvm.ir.TensorLoad, tvm.ir.Call)


@tvm.tirx.transform.prim_func_pass(opt_level=0)
def printable_numbers(func: Any, mod: Any, context: Any) -> Any:
    """Ensures infinities of 16 bits are made of float32 ones, whose names CUDA's compiler knows."""

    def widen(number: Any) -> Any:
        dtype = str(number.ty)
        if dtype not in ("bfloat16", "float16") or math.isfinite(number.value):
            return number
        return tvm.tirx.Cast(dtype, tvm.tirx.FloatImm("float32", number.value))

    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.tirx.FloatImm, widen)))


def uses_fragments(func: Any) -> bool:
    """Whether a PrimFunc holds wmma fragments."""
    found: list[Any] = []
    if isinstance(func, PrimFunc):
        tvm_ffi.structural_walk(
            func.body, (tvm.s_tir.SBlock, lambda block: found.extend(block.alloc_buffers))
        )
    return any(str(buffer.scope()).startswith("wmma.") for buffer in found)

"""Fused products for the GPU templates, and the CUDA source of what they lower to."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.base import codegen
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.graph.layout import matmul_nt

TARGET = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})


def product(
    rows="B",
    n=128,
    k=64,
    dtype="bfloat16",
    layout="kn",
    gelu=True,
    batch=(),
    out=None,
    target=TARGET,
    lead=(),
    residual=False,
):
    """Return the PrimFunc of ``gelu(x @ w + b) + r`` with a float32 accumulator.

    ``lead`` are dimensions of x before its rows that w does not have; strings are symbolic.
    """
    builder = relax.BlockBuilder()
    extents = [tirx.Var(e, "int64") if isinstance(e, str) else e for e in (*batch, *lead, rows)]
    shared = extents[: len(batch)]
    x = relax.Var("x", relax.TensorType((*extents, k), dtype))
    w = relax.Var("w", relax.TensorType((*shared, *((k, n) if layout == "kn" else (n, k))), dtype))
    b = relax.Var("b", relax.TensorType((n,), dtype))
    r = relax.Var("r", relax.TensorType((*extents, n), dtype))
    with builder.function("main", [x, w, b, r] if residual else [x, w, b]):
        with builder.dataflow():
            if layout == "nk":
                y = builder.emit_te(matmul_nt("float32"), x, w, primfunc_name_hint="matmul")
            else:
                y = builder.emit(relax.op.matmul(x, w, out_dtype="float32"))
            y = builder.emit(relax.op.add(y, builder.emit(relax.op.astype(b, "float32"))))
            y = builder.emit(relax.op.nn.gelu_tanh(y)) if gelu else y
            if residual:
                y = builder.emit(relax.op.add(y, builder.emit(relax.op.astype(r, "float32"))))
            y = builder.emit_output(relax.op.astype(y, out or dtype))
        builder.emit_func_output(y)
    with target:
        mod = fuse(legalize(builder.get()))
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func


def source_of(kernel: Any) -> str:
    """Compile a kernel to CUDA source, which needs no GPU."""
    with TARGET:
        done = tvm.compile(
            tvm.IRModule({"gemm": kernel.with_attr("global_symbol", "gemm")}),
            target=TARGET,
            tir_pipeline="tirx",
        )
    return str(done.mod.imports[0].inspect_source())

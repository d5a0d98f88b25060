"""Fused products for the GPU templates, and the CUDA source of what they lower to."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.base import codegen
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.graph.layout import matmul
from tvmcap.kernel import tir_pipeline
from tvmcap.schedules.gemm_match import ALLOW_TF32

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
    a_layout="mk",
    shared=(),
    tf32=False,
):
    """Return the PrimFunc of ``gelu(x @ w + b) + r`` with a float32 accumulator.

    ``lead`` are dimensions of x before its rows that w does not have, ``shared`` names operands
    ("a", "b") without the batch. Extents that are strings are symbolic, such as "T" or "8*T".
    ``tf32`` allows it.
    """
    builder = relax.BlockBuilder()
    sizes: dict[str, Any] = {}
    rows, n, k = (_extent(e, sizes) for e in (rows, n, k))
    batch, lead = ([_extent(e, sizes) for e in es] for es in (batch, lead))
    left = [] if "a" in shared else batch
    right = [] if "b" in shared or not batch else [*batch, *[1] * len(lead)]
    extents = [*batch, *lead, rows]
    matrix = [*lead, rows, k] if a_layout == "mk" else [*lead, k, rows]
    x = relax.Var("x", relax.TensorType([*left, *matrix], dtype))
    w = relax.Var("w", relax.TensorType([*right, *((k, n) if layout == "kn" else (n, k))], dtype))
    b = relax.Var("b", relax.TensorType([n], dtype))
    r = relax.Var("r", relax.TensorType([*extents, n], dtype))
    with builder.function("main", [x, w, b, r] if residual else [x, w, b]):
        with builder.dataflow():
            if (a_layout, layout) != ("mk", "kn"):
                expression = matmul("float32", a_layout, layout)
                y = builder.emit_te(expression, x, w, primfunc_name_hint="matmul")
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
    return func.with_attr(ALLOW_TF32, True) if tf32 else func


def _extent(extent: Any, sizes: dict[str, Any]) -> Any:
    if not isinstance(extent, str):
        return extent
    *factor, name = extent.split("*")
    var = sizes.setdefault(name, tirx.Var(name, "int64"))
    return int(factor[0]) * var if factor else var


def source_of(kernel: Any, target: Any = TARGET) -> str:
    """Compile a kernel to CUDA source, which needs no GPU."""
    with target:
        done = tvm.compile(
            tvm.IRModule({"gemm": kernel.with_attr("global_symbol", "gemm")}),
            target=target,
            tir_pipeline=tir_pipeline.TIRX,
        )
    return str(done.mod.imports[0].inspect_source())

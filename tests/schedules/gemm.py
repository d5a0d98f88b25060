"""What the tests of the CPU GEMM share: one fused PrimFunc, lowered, compiled and run."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmcap.kernel.intrinsics import expand
from tvmcap.schedules import cpu_gemm
from tvmcap.schedules.cpu_target import pack_width
from tvmcap.schedules.gemm_match import packed_matmul

CPU = tvm.get_global_func("target.llvm_get_system_cpu")()
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": CPU, "num-cores": 2})
FUSE = (
    relax.transform.LegalizeOps,
    relax.transform.AnnotateTIROpPattern,
    relax.transform.FoldConstant,
    relax.transform.FuseOps,
    relax.transform.FuseTIR,
    relax.transform.DeadCodeElimination,
)


def fuse(mod, target=TARGET):
    """Return a Relax module whose main only calls fused kernels."""
    with target:
        return tvm.transform.Sequential([p() for p in FUSE])(mod)


def kernels(inputs, build, target=TARGET):
    """Return the PrimFuncs made of ``build(block_builder, *vars)``."""
    bb = relax.BlockBuilder()
    args = [
        relax.Var(f"x{i}", relax.TensorType(shape, dtype))
        for i, (shape, dtype) in enumerate(inputs)
    ]
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(build(bb, *args))
        bb.emit_func_output(out)
    return [f for f in fuse(bb.get(), target).functions.values() if isinstance(f, tirx.PrimFunc)]


def fused(inputs, build, target=TARGET):
    """Return the one PrimFunc made of ``build(block_builder, *vars)``."""
    (func,) = kernels(inputs, build, target)
    return func


def lower(func, target=TARGET, **knobs):
    """Match, choose the default knobs (changed by ``knobs``) and lower."""
    problem = cpu_gemm.match(func, target)
    assert problem is not None
    chosen = dataclasses.replace(cpu_gemm.default(problem, target), **knobs)
    return expand(cpu_gemm.lower(func, problem, chosen, target))


def compiled(func, target=TARGET):
    """Compile for this machine."""
    return tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target)[
        "main"
    ]


def misaligned(array):
    """Return a tensor with the array's values at an address that is 16 but not 32 bytes aligned."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return tvm_ffi.from_dlpack(view)


def random(*shape, seed=0):
    """Return normal float32 values."""
    rng = np.random.default_rng(zlib.crc32(repr((shape, seed)).encode()))
    return rng.standard_normal(shape, dtype=np.float32)


def run(kernel, arrays, shape, dtype="float32", sizes=()):
    """Run on misaligned copies, sizes before the output."""
    out = misaligned(np.full(shape, np.nan, dtype))
    kernel(*(misaligned(a) for a in arrays), *sizes, out)
    return out.numpy()


def gelu(x):
    """GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def packed_block(n, k, lead=(), dtype="float32"):
    """Return fused gelu(x @ w + b) on a packed weight, x of shape (B, *lead, k)."""
    width = pack_width(dtype, TARGET)
    rows = tirx.Var("B", "int64")

    def build(bb, x, w, b):
        y = bb.emit(bb.call_te(packed_matmul, x, w, n, primfunc_attrs={"op_pattern": 4}))
        return bb.emit(relax.op.nn.gelu_tanh(bb.emit(relax.op.add(y, b))))

    return fused(
        [((rows, *lead, k), dtype), ((-(-n // width), k, width), dtype), ((n,), dtype)], build
    )

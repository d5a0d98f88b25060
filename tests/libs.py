"""Small libraries for the tests of export, loading and calling, in the form lowering makes."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import DimSpec, Signature, TensorSpec

LEAF: dict[str, Any] = {"kind": "leaf", "index": 0}
VERSIONS = {
    "tvmcap": "0",
    "tvm": version("apache-tvm"),
    "tvm_ffi": version("apache-tvm-ffi"),
    "torch": None,
}
HIDDEN, WIDTH = 8, 8
B = {"x": {0: "B"}}


def values(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    """Return normal numbers as a torch tensor, float32 by default."""
    import torch

    make = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=make).to(dtype or torch.float32)


def quick(fn: Any, *args: Any, **options: Any) -> Any:
    """Build for this CPU, untuned and not verified unless ``options`` say otherwise."""
    import tvmcap

    return tvmcap.build(fn, args, **{"target": "llvm", "tune": "none", "verify": False, **options})


def leaves(count: int) -> dict[str, Any]:
    """Return the structure of a tuple of tensors."""
    return {"kind": "tuple", "items": [{"kind": "leaf", "index": i} for i in range(count)]}


def chain_signature(
    dtype: str = "float32", minimum: int = 0, maximum: int | None = None
) -> Signature:
    """Return the signature of ``chain``: ``out[B, 8] = x[B, 8] @ w[8, 8] @ w``."""
    return Signature(
        inputs=(TensorSpec("x", dtype, ("B", HIDDEN)), TensorSpec("w", dtype, (HIDDEN, WIDTH))),
        outputs=(TensorSpec("out0", dtype, ("B", WIDTH)),),
        dims=(DimSpec("B", minimum, maximum),),
        in_tree=leaves(2),
        out_tree=LEAF,
        arg_names=("x", "w"),
    )


def manifest_for(signature: Signature, **fields: Any) -> Manifest:
    """Return a manifest for this machine."""
    return replace(
        Manifest(versions=VERSIONS, target={"kind": "llvm"}, signature=signature), **fields
    )


def compile_module(module: Any, plan: bool = True) -> Any:
    """Compile a module with main in destination-passing form to a VM executable for this CPU."""
    import tvm
    from tvm import relax
    from tvm.relax.backend.cpu_generic import pipeline

    target = tvm.target.Target({"kind": "llvm"})
    passes = pipeline.finalize_passes(target)[0 if plan else 1 :]  # the first plans memory
    return relax.build(module, target=target, relax_pipeline=tvm.transform.Sequential(passes))


def chain_module(dtype: str = "float32", parallel: bool = True) -> Any:
    """Two matmuls in a row through one intermediate."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True, private=True)
        def matmul(xh: T.handle, w: T.Buffer((T.int64(8), T.int64(8)), dtype), oh: T.handle):
            T.func_attr({"tirx.noalias": True})
            B = T.int64()
            x = T.match_buffer(xh, (B, T.int64(8)), dtype)
            o = T.match_buffer(oh, (B, T.int64(8)), dtype)
            for i in T.parallel(B) if parallel else T.serial(B):
                for j, k in T.grid(8, 8):
                    with T.sblock("matmul"):
                        vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                        with T.init():
                            o[vi, vj] = T.Cast(dtype, T.float32(0))
                        o[vi, vj] = o[vi, vj] + x[vi, vk] * w[vk, vj]

        @R.function(pure=False)
        def main(
            x: R.Tensor(("B", 8), dtype), w: R.Tensor((8, 8), dtype), out: R.Tensor(("B", 8), dtype)
        ) -> R.Tuple():
            B = T.int64()
            cls = Module
            middle: R.Tensor((B, 8), dtype) = R.builtin.alloc_tensor(R.shape([B, 8]), dtype, 0)
            _ = cls.matmul(x, w, middle)
            _1 = cls.matmul(middle, w, out)
            return R.tuple()

    return Module


def pair_signature() -> Signature:
    """Return the signature of ``pair``: nested, with a result that an empty batch leaves full."""
    tensor = ("B", WIDTH)
    items = [
        {
            "kind": "dict",
            "keys": ["x", "y"],
            "items": [{"kind": "leaf", "index": 0}, {"kind": "leaf", "index": 1}],
        },
        {"kind": "const", "value": 2},
    ]
    parts = {"kind": "tuple", "items": [{"kind": "leaf", "index": 1}, {"kind": "leaf", "index": 2}]}
    return Signature(
        inputs=(TensorSpec("data.x", "float32", tensor), TensorSpec("data.y", "float32", tensor)),
        outputs=(
            TensorSpec("out0", "float32", tensor),
            TensorSpec("out1", "float32", (WIDTH,)),
            TensorSpec("out2", "float32", ("B*2", WIDTH)),
        ),
        dims=(DimSpec("B"),),
        in_tree={"kind": "tuple", "items": items},
        out_tree={
            "kind": "dict",
            "keys": ["sum", "parts"],
            "items": [{"kind": "leaf", "index": 0}, parts],
        },
        arg_names=("data", "scale"),
    )


def pair_module() -> Any:
    """Sum, column sums, and one above the other."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Pair:
        @T.prim_func(s_tir=True, private=True)
        def add(xh: T.handle, yh: T.handle, oh: T.handle):
            T.func_attr({"tirx.noalias": True})
            B = T.int64()
            x = T.match_buffer(xh, (B, T.int64(8)), "float32")
            y = T.match_buffer(yh, (B, T.int64(8)), "float32")
            o = T.match_buffer(oh, (B, T.int64(8)), "float32")
            for i, j in T.grid(B, 8):
                with T.sblock("add"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    o[vi, vj] = x[vi, vj] + y[vi, vj]

        @T.prim_func(s_tir=True, private=True)
        def columns(xh: T.handle, o: T.Buffer((T.int64(8),), "float32")):
            T.func_attr({"tirx.noalias": True})
            B = T.int64()
            x = T.match_buffer(xh, (B, T.int64(8)), "float32")
            for j in range(8):
                with T.sblock("zero"):
                    vj = T.axis.remap("S", [j])
                    o[vj] = T.float32(0)
            for i, j in T.grid(B, 8):
                with T.sblock("columns"):
                    vi, vj = T.axis.remap("RS", [i, j])
                    o[vj] = o[vj] + x[vi, vj]

        @T.prim_func(s_tir=True, private=True)
        def stack(xh: T.handle, yh: T.handle, oh: T.handle):
            T.func_attr({"tirx.noalias": True})
            B = T.int64()
            x = T.match_buffer(xh, (B, T.int64(8)), "float32")
            y = T.match_buffer(yh, (B, T.int64(8)), "float32")
            o = T.match_buffer(oh, (B * T.int64(2), T.int64(8)), "float32")
            for i, j in T.grid(B * T.int64(2), 8):
                with T.sblock("stack"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    o[vi, vj] = T.if_then_else(vi < B, x[vi, vj], y[vi - B, vj])

        @R.function(pure=False)
        def main(
            x: R.Tensor(("B", 8), "float32"),
            y: R.Tensor(("B", 8), "float32"),
            out0: R.Tensor(("B", 8), "float32"),
            out1: R.Tensor((8,), "float32"),
            out2: R.Tensor(("B * 2", 8), "float32"),
        ) -> R.Tuple():
            cls = Pair
            _ = cls.add(x, y, out0)
            _1 = cls.columns(x, out1)
            _2 = cls.stack(x, y, out2)
            return R.tuple()

    return Pair


def write_pair(path: Path) -> Path:
    """Write the library of ``pair`` to ``path``."""
    from tvmcap.library import export

    export.write(compile_module(pair_module()), path, manifest_for(pair_signature()))
    return path


def scale_module() -> Any:
    """``out = x * w + b[2]`` with weights as parameters of main, as large weights arrive."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Scale:
        @T.prim_func(s_tir=True, private=True)
        def scale(
            xh: T.handle,
            w: T.Buffer((T.int64(8),), "float32"),
            b: T.Buffer((T.int64(3),), "float32"),
            oh: T.handle,
        ):
            T.func_attr({"tirx.noalias": True})
            B = T.int64()
            x = T.match_buffer(xh, (B, T.int64(8)), "float32")
            o = T.match_buffer(oh, (B, T.int64(8)), "float32")
            for i, j in T.grid(B, 8):
                with T.sblock("scale"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    o[vi, vj] = x[vi, vj] * w[vj] + b[T.int64(2)]

        @R.function(pure=False)
        def main(
            x: R.Tensor(("B", 8), "float32"),
            w: R.Tensor((8,), "float32"),
            b: R.Tensor((3,), "float32"),
            out: R.Tensor(("B", 8), "float32"),
        ) -> R.Tuple():
            cls = Scale
            _ = cls.scale(x, w, b, out)
            return R.tuple()

    return Scale


def write_scale(path: Path, weights: dict[str, Any]) -> Path:
    """Write the library of ``scale`` to ``path``, its weights beside it."""
    from tvmcap.library import export

    signature = replace(chain_signature(), in_tree=leaves(1), arg_names=("x",))
    signature = replace(signature, inputs=signature.inputs[:1])
    export.write(compile_module(scale_module()), path, manifest_for(signature), weights)
    return path


def write_chain(path: Path, dtype: str = "float32", parallel: bool = True, **fields: Any) -> Path:
    """Write the library of ``chain`` to ``path``."""
    from tvmcap.library import export

    signature = fields.pop("signature", chain_signature(dtype))
    export.write(
        compile_module(chain_module(dtype, parallel)), path, manifest_for(signature, **fields)
    )
    return path

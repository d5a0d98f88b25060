"""Small libraries for the tests of export, loading and calling, written in the form that lowering produces."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import DimSpec, Signature, TensorSpec

LEAF: dict[str, Any] = {"kind": "leaf", "index": 0}
VERSIONS = {"tvmcap": "0", "tvm": version("apache-tvm"), "tvm_ffi": version("apache-tvm-ffi"), "torch": None}
HIDDEN, WIDTH = 8, 8


def leaves(count: int) -> dict[str, Any]:
    """Return the structure of a tuple of tensors."""
    return {"kind": "tuple", "items": [{"kind": "leaf", "index": i} for i in range(count)]}


def chain_signature(dtype: str = "float32", minimum: int = 0, maximum: int | None = None) -> Signature:
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
    return replace(Manifest(versions=VERSIONS, target={"kind": "llvm"}, signature=signature), **fields)


def compile_module(module: Any) -> Any:
    """Compile a module whose main is in destination-passing form to a VM executable for this CPU."""
    import tvm
    from tvm import relax
    from tvm.relax.backend.cpu_generic import pipeline

    target = tvm.target.Target({"kind": "llvm"})
    passes = [*pipeline.legalize_passes(target)[:1], *pipeline.finalize_passes(target)]
    return relax.build(module, target=target, relax_pipeline=tvm.transform.Sequential(passes))


def chain_module(dtype: str = "float32", parallel: bool = True) -> Any:
    """Two matmuls in a row through one intermediate."""
    from tvm.script import ir as I  # noqa: N812
    from tvm.script import relax as R  # noqa: N812
    from tvm.script import tirx as T  # noqa: N812

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


def write_chain(path: Path, dtype: str = "float32", parallel: bool = True, **fields: Any) -> Path:
    """Write the library of ``chain`` to ``path``."""
    from tvmcap.library import export

    signature = fields.pop("signature", chain_signature(dtype))
    export.write(compile_module(chain_module(dtype, parallel)), path, manifest_for(signature, **fields))
    return path

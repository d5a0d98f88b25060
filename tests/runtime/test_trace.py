"""What an instrumented call sees: kernels by name, memory alive at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import libs
from tvmcap.base.signature import TensorSpec
from tvmcap.library import export
from tvmcap.runtime.executor import Executor


def long_chain_module() -> Any:
    """Five matmuls in a row, each through memory of its own, as before any planning."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Long:
        @T.prim_func(s_tir=True, private=True)
        def matmul(
            x: T.Buffer((T.int64(16), T.int64(8)), "float32"),
            w: T.Buffer((T.int64(8), T.int64(8)), "float32"),
            o: T.Buffer((T.int64(16), T.int64(8)), "float32"),
        ):
            T.func_attr({"tirx.noalias": True})
            for i, j, k in T.grid(16, 8, 8):
                with T.sblock("matmul"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        o[vi, vj] = T.float32(0)
                    o[vi, vj] = o[vi, vj] + x[vi, vk] * w[vk, vj]

        @R.function(pure=False)
        def main(
            x: R.Tensor((16, 8), "float32"),
            w: R.Tensor((8, 8), "float32"),
            out: R.Tensor((16, 8), "float32"),
        ) -> R.Tuple():
            cls = Long
            a = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _ = cls.matmul(x, w, a)
            b = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _1 = cls.matmul(a, w, b)
            c = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _2 = cls.matmul(b, w, c)
            d = R.builtin.alloc_tensor(R.shape([16, 8]), "float32", 0)
            _3 = cls.matmul(c, w, d)
            _4 = cls.matmul(d, w, out)
            return R.tuple()

    return Long


def write_long_chain(path: Path) -> Path:
    """Write the library of five matmuls to ``path``, without memory planning."""
    signature = libs.chain_signature()
    inputs = (TensorSpec("x", "float32", (16, 8)), signature.inputs[1])
    outputs = (TensorSpec("out0", "float32", (16, 8)),)
    signature = replace(signature, inputs=inputs, outputs=outputs, dims=())
    executable = libs.compile_module(long_chain_module(), plan=False)
    export.write(executable, path, libs.manifest_for(signature))
    return path


def test_kernels_and_memory_of_a_call(
    run: Executor, nested: Executor, x: torch.Tensor, w: torch.Tensor
) -> None:
    assert run.kernel_launches(x, w) == ("matmul", "matmul")
    assert run.trace(x, w).intermediate_bytes == x.nbytes
    assert run.peak_bytes(x.numpy(), w.numpy()) == 2 * x.nbytes
    assert run.kernel_launches(x[:0], w) == ()
    assert nested.kernel_launches({"x": x, "y": x}) == ("add", "columns", "stack")
    assert nested.peak_bytes({"x": x, "y": x}) == x.nbytes + 32 + 2 * x.nbytes
    torch.testing.assert_close(run(x, w), x @ w @ w)  # an instrument is left behind nowhere


def test_memory_that_is_released_does_not_count(folder: Path) -> None:
    run = Executor(write_long_chain(folder / "long.so"))
    x, w = torch.rand(16, 8), torch.rand(8, 8)
    trace = run.trace(x, w)
    assert trace.kernels == ("matmul",) * 5
    assert trace.intermediate_bytes == 2 * x.nbytes
    torch.testing.assert_close(run(x, w), x @ w @ w @ w @ w @ w)

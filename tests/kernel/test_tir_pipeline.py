"""The last passes before LLVM and CUDA's compiler: what they write is what those can read."""

from __future__ import annotations

import math

import pytest
import torch
import tvm
import tvm_ffi
from tvm.script import tirx as T

from tvmcap.base import codegen
from tvmcap.kernel import tir_pipeline


def numbers(func: tvm.tirx.PrimFunc) -> list[tuple[str, str, float]]:
    """Return type of node, dtype and value of all that is stored."""
    found = []

    def take(store: tvm.tirx.BufferStore) -> None:
        value = store.value
        inner = value.value if isinstance(value, tvm.tirx.Cast) else value
        found.append((type(value).__name__, str(inner.ty), float(inner.value)))

    tvm_ffi.structural_walk(func.body, (tvm.tirx.BufferStore, take))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_infinities_of_16_bits_come_from_float32(dtype: str) -> None:
    @T.prim_func(s_tir=True)
    def func(a: T.handle) -> None:
        x = T.match_buffer(a, (3,), dtype)
        x[0] = T.FloatImm(dtype, -math.inf)
        x[1] = T.FloatImm(dtype, math.inf)
        x[2] = T.FloatImm(dtype, -1.5)

    mod = tir_pipeline.printable_numbers(tvm.IRModule({"main": func}))
    kind = "FloatImm" if dtype == "float32" else "Cast"
    assert numbers(mod["main"]) == [
        (kind, "float32", -math.inf),
        (kind, "float32", math.inf),
        ("FloatImm", dtype, -1.5),
    ]


def test_shared_comparisons_of_index_vectors_compile() -> None:
    """A mask of the vectorized axis that is needed twice is what sharing binds to a variable."""

    @T.prim_func(s_tir=True)
    def func(a: T.Buffer((16,), "bfloat16"), b: T.Buffer((8,), "bfloat16")) -> None:
        for t in range(2):
            for k in T.vectorized(4):
                b[t * 4 + k] = T.Select(
                    T.int64(0) < T.Cast("int64", T.Cast("int64", k) % T.int64(2) == T.int64(0)),
                    a[(T.Cast("int64", t * 4 + k) + T.int64(1)) // T.int64(2)],
                    a[t * 4 + k + 8],
                )

    target = codegen.make_target("llvm")
    with target:
        built = tvm.compile(
            tvm.IRModule({"main": func}), target=target, tir_pipeline=tir_pipeline.LOOPS
        )
    a, b = torch.randn(16).bfloat16(), torch.empty(8).bfloat16()
    built["main"](a, b)
    assert torch.equal(b[::2], a[:4]) and torch.equal(b[1::2], a[9::2])


def test_comparisons_that_read_memory_stay_bound() -> None:
    """What is read before a store may differ after it."""

    @T.prim_func(s_tir=True)
    def func(a: T.Buffer((4,), "float32")) -> None:
        mask: T.let[T.int32x4] = T.Cast(
            "int32x4", a[T.Ramp(0, 1, 4)] < T.Broadcast(T.float32(0), 4)
        )
        a[T.Ramp(0, 1, 4)] = T.Broadcast(T.float32(1), 4)
        a[T.Ramp(0, 1, 4)] = T.Cast("float32x4", mask)

    mod = tvm.IRModule({"main": func})
    tvm.ir.assert_structural_equal(tir_pipeline.unbound_comparisons(mod), mod)

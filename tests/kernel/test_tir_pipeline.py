"""The last passes before CUDA's compiler: what they write is what it can read."""

from __future__ import annotations

import math

import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T

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

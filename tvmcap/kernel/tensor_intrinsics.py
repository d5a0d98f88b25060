"""Tensor-core intrinsics: TVM's own, imported fast, and wmma for bfloat16, which TVM lacks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tvmcap.base.codegen import compute_capability
from tvmcap.kernel import tvmscript

SHARED = "shared.dyn"
"""Where fragments are loaded from and stored to: one dynamic allocation a thread block."""
_FIRST = {"bfloat16": 80, "float16": 80, "int8": 72}
"""The compute capability (times ten) from which products of a dtype are given to tensor cores."""
_TVM = "tvm.s_tir.tensor_intrin"
SUMS = {"bfloat16": "float32", "float16": "float32", "int8": "int32"}
"""Dtype of the operands to that of the sums."""


def available(target: Any, dtype: str = "bfloat16") -> bool:
    """Whether products of a dtype are given to a target's tensor cores."""
    first = _FIRST.get(dtype)
    return first is not None and target.kind.name == "cuda" and compute_capability(target) >= first


def import_tensor_intrinsics() -> None:
    """Import what a TuneContext needs, fast: as TVM would, it takes 20 s beside torch."""
    if _TVM not in sys.modules:
        tvmscript.quicken()
        __import__(_TVM)
        _register_bfloat16()


@contextlib.contextmanager
def no_tensor_intrinsics() -> Iterator[None]:
    """Let a TuneContext without MetaSchedule's rules do without them, which saves seconds."""
    absent = _TVM not in sys.modules
    if absent:
        sys.modules[_TVM] = ModuleType(_TVM)
    try:
        yield
    finally:
        if absent:
            del sys.modules[_TVM]


def _register_bfloat16() -> None:
    """Register loads and the multiply-add of m16n16k16; filling and storing are of float32."""
    from tvm.s_tir import TensorIntrin
    from tvm.s_tir.tensor_intrin import cuda

    for trans_b in (False, True):
        group = intrinsic_group("bfloat16", trans_b)
        load = functools.partial(cuda.get_wmma_load_intrin, 16, 16, 16, "bfloat16", SHARED)
        sync = cuda.get_wmma_sync_intrin(16, 16, 16, "bfloat16", "float32", trans_b)
        TensorIntrin.register(group["load_b"], *load(True, trans_b))
        TensorIntrin.register(group["compute"], *sync)
    TensorIntrin.register(group["load_a"], *load(False, False))


def intrinsic_group(dtype: str, trans_b: bool) -> dict[str, str]:
    """Name the wmma intrinsics of a product of bfloat16, float16 or int8 with wide sums.

    ``trans_b`` says that shared memory holds B as [N, K].
    """
    from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group

    if dtype != "bfloat16":
        sums = SUMS[dtype]
        names: dict[str, str] = get_wmma_intrin_group(SHARED, SHARED, dtype, sums, trans_b)
        return names
    trans = "_trans" if trans_b else ""
    return {
        **get_wmma_intrin_group(SHARED, SHARED, "float16", "float32", trans_b),
        "load_a": "tvmcap_wmma_load_16x16x16_bf16_a",
        "load_b": f"tvmcap_wmma_load_16x16x16_bf16_b{trans}",
        "compute": f"tvmcap_wmma_sync_16x16x16_bf16bf16f32{trans}",
    }

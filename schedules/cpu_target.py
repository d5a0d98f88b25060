"""What a CPU kernel has to know of an llvm target: vector width, vector registers, threads."""

from __future__ import annotations

import os
from typing import Any

import tvm

_HAS_FEATURE = "target.llvm_cpu_has_feature"


def vector_lanes(target: Any) -> int:
    """Return the float32 lanes of a vector register: 16 (AVX-512), 8 (AVX2) or 4."""
    if _has("avx512f", target):
        return 16
    return 8 if _has("avx2", target) else 4


def vector_registers(target: Any) -> int:
    """Return the number of vector registers: 32 for AVX-512 and aarch64, else 16."""
    aarch64 = str(target.attrs.get("mtriple", "")).startswith(("aarch64", "arm64"))
    return 32 if aarch64 or _has("avx512f", target) or _has("neon", target) else 16


def dot_product(target: Any) -> str | None:
    """Name the LLVM intrinsic that adds four products of bytes to each 32-bit lane, or None.

    Its first factor is unsigned (AVX-512 VNNI, AVX-VNNI).
    """
    lanes = vector_lanes(target)
    has = (lanes == 16 and _has("avx512vnni", target)) or (lanes == 8 and _has("avxvnni", target))
    return f"llvm.x86.avx512.vpdpbusd.{32 * lanes}" if has else None


def threads(target: Any) -> int:
    """Return the threads to plan for: the target's ``num-cores``, else those of this machine."""
    return int(target.attrs.get("num-cores", 0)) or os.cpu_count() or 1


def pack_width(dtype: str, target: Any) -> int:
    """Return NR, the columns of a packed panel ``[ceil(N / NR), K, NR]``.

    It depends on the dtype and the target alone, so that every kernel of a library reads the same
    packed weight. Four vectors of accumulators a row where there are 32 registers, two where there
    are 16 (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008,
    section 6). 16-bit weights accumulate in float32 and keep the same width.
    """
    del dtype
    return vector_lanes(target) * (4 if vector_registers(target) == 32 else 2)


def _has(feature: str, target: Any) -> bool:
    return bool(tvm.get_global_func(_HAS_FEATURE)(feature, target))

"""Why a matrix product is not one for wgmma fed by TMA, in words for the user."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvmcap.schedules import gemm_match
from tvmcap.schedules.gemm_match import Gemm
from tvmcap.schedules.hopper_plan import OPERANDS

TMA_BYTES = 16
"""Rows of a tensor in memory start at multiples of this (CUDA Driver API, cuTensorMapEncodeTiled:
globalStrides)."""


def refuse(func: tirx.PrimFunc, target: Any) -> str | None:
    """Say why the Hopper GEMM does not serve a product; None where it does, or for no product."""
    if target.kind.name != "cuda":
        return None
    gemm = gemm_match.read(func)
    return None if gemm is None else refuse_product(gemm, target)


def refuse_product(gemm: Gemm, target: Any) -> str | None:
    """Say why the Hopper GEMM does not serve a product on a cuda target; None where it does."""
    arch = str(target.arch)
    if arch != "sm_90a":
        return f"{arch} has no wgmma" + (" without the a of sm_90a" if arch == "sm_90" else "")
    return _operands(gemm) or _rows("A", gemm.a, gemm.a_pitch) or _rows("B", gemm.b, gemm.b_pitch)


def _operands(gemm: Gemm) -> str | None:
    left, right = str(gemm.a.dtype), str(gemm.b.dtype)
    sums = str(gemm.fused.epilogue.anchor.dtype)
    if left != right:
        return f"operands of {left} and {right}, where wgmma needs one dtype"
    if left not in OPERANDS:
        return f"wgmma is used for {', '.join(OPERANDS)}, not for {left}"
    wanted = "int32" if left == "int8" else "float32"
    if sums != wanted:
        return f"sums in {sums}, where wgmma adds {left} in {wanted}"
    if left == "float32" and not gemm.tf32:
        return "float32 without allow_tf32"
    if OPERANDS[left][1] != 2 and (gemm.a_layout, gemm.layout) != ("mk", "nk"):
        kind = "tf32" if left == "float32" else left
        return f"wgmma takes {kind} operands with K innermost in memory only"
    return None


def _rows(name: str, operand: Any, pitch: Any) -> str | None:
    item = OPERANDS[str(operand.dtype)][1]
    if gemm_match.is_multiple(pitch, TMA_BYTES // item):
        return None
    shown = getattr(pitch, "name", pitch)
    size = f"{pitch * item} bytes are" if isinstance(pitch, int) else f"{shown} elements may be"
    return f"rows of {name} of {size} no multiple of {TMA_BYTES} bytes, which TMA needs"

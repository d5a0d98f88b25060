"""Which search space serves a kernel: the first matching template, else MetaSchedule's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from tvmcap.base.quantization import LARGEST
from tvmcap.graph import layout
from tvmcap.graph.layout import Product
from tvmcap.kernel import registry, tensor_core_rule
from tvmcap.kernel.template import Template
from tvmcap.schedules import TEMPLATES, cpu_target, gemm_match, simt_gemm


def find(func: Any, target: Any) -> tuple[Template, Any] | None:
    """Return the first template that matches a PrimFunc, with the problem it read, or None.

    A product that CUDA cores would serve is left to MetaSchedule where tensor cores can have it.
    """
    for template in (*registry.registered(), *TEMPLATES):
        problem = template.match(func, target)
        if problem is not None:
            left = template is simt_gemm.TEMPLATE and tensor_core_rule.suits(problem, target)
            return None if left else (template, problem)
    return None


def few_rows(func: Any, target: Any) -> tuple[int, Any, str] | None:
    """Return (largest rows, kernel, name) for the few rows that a symbolic product may also have.

    None where no product is left to tensor cores, or its rows are a number. They compute 16 rows at
    least, and CUDA cores are quicker below that.
    """
    template = simt_gemm.TEMPLATE
    problem = template.match(func, target)
    symbolic = problem is not None and not problem.batch and not isinstance(problem.rows, int)
    if not symbolic or not tensor_core_rule.suits(problem, target):
        return None
    knobs = template.default(dataclasses.replace(problem, row_dims=(simt_gemm.FEW,)), target)
    name = f"template:{template.name} {template.knobs_to_json(knobs)}"
    return simt_gemm.FEW, template.lower(func, problem, knobs, target), name


def refusals(func: Any, target: Any) -> str:
    """Say why templates before the one that serves a PrimFunc do not; "" with nothing to say."""
    found: list[str] = []
    for template in (*registry.registered(), *TEMPLATES):
        if template.match(func, target) is not None:
            break
        reason = template.refuse(func, target) if template.refuse is not None else None
        if reason is not None:
            found.append(f"no {template.name}: {reason}")
    return "; ".join(found)


def mark_tf32(mod: tvm.IRModule, allowed: bool) -> tvm.IRModule:
    """Ensures every PrimFunc says so where its float32 products may be computed in tf32."""
    if not allowed:
        return mod
    functions = {
        gvar: func.with_attr(gemm_match.ALLOW_TF32, True)
        if isinstance(func, tirx.PrimFunc)
        else func
        for gvar, func in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def pack_weight(
    weight: Any, lhs: Any, dtype: str, target: Any, allow_tf32: bool = False
) -> tuple[np.ndarray[Any, Any], Callable[[str], Product]] | None:
    """Pack a constant weight [K, N] as the kernel of its matmul reads it.

    The layout follows from operator, dtype and target alone, so that every schedule of the kernel
    shares it.

    Parameters
    ----------
    weight: TVM tensor [K, N].
    lhs: type of the left operand, [..., K].
    dtype: of the result, in which the sum is kept.
    target: what the kernel is for.
    allow_tf32: whether tensor cores may multiply float32 weights.

    Returns
    -------
    The packed weight, and the matmul on it by the layout of the left operand; None where the kernel
    reads the weight as it is.
    """
    data = weight.numpy()
    columns = data.shape[1]
    if target.kind.name == "cuda":
        tf32 = allow_tf32 and str(lhs.dtype) == str(weight.dtype) == "float32"
        narrow = str(lhs.dtype) == str(weight.dtype) and str(weight.dtype) in LARGEST
        if not (tf32 or narrow):
            return None
        # tensor cores read operands of 32 and of 8 bits with K innermost only
        return np.ascontiguousarray(data.T), lambda left: layout.matmul(dtype, left, "nk")
    width = cpu_target.pack_width(str(lhs.dtype), target)
    if dtype == "int32" and str(weight.dtype) == "int8":
        return gemm_match.group(
            data, width
        ), lambda left: lambda x, packed: gemm_match.grouped_matmul(x, packed, columns, left)

    def expression(left: str) -> Product:
        return lambda x, packed: gemm_match.packed_matmul(x, packed, columns, dtype, left)

    return gemm_match.pack(data, width), expression

"""Fallback: the rule that schedules a kernel no record and no template serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmcap.base.errors import BuildError
from tvmcap.kernel import (
    column_sums,
    cpu_rules,
    elementwise,
    intrinsics,
    prim_func,
    tensor_core_rule,
)
from tvmcap.kernel.features import copy_func
from tvmcap.kernel.tensor_intrinsics import import_tensor_intrinsics

logger = logging.getLogger("tvmcap")


def schedule(func: tirx.PrimFunc, target: Any) -> tuple[tirx.PrimFunc, str]:
    """Schedule a PrimFunc by the first rule that fits; returns it with the rule's name."""
    if target.kind.name == "llvm":
        func = infinite_identities(func)
        done = cpu_rules.schedule(func, target)
        func, name = (func, "none") if done is None else (done, "cpu")
        return intrinsics.expand(func).with_attr("tirx.is_scheduled", True), name
    return _gpu(func, target)


def infinite_identities(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Start maxima at -inf and minima at inf; TOPI starts them at the largest finite number."""
    starts: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tvm.s_tir.SBlock, lambda block: starts.append(block.init)))
    starts = [start for start in starts if start is not None]

    def widen(store: Any) -> Any:
        value = store.value
        if not isinstance(value, tirx.FloatImm) or not any(map(store.same_as, starts)):
            return store
        dtype = str(value.ty)
        for bound, infinite in ((tirx.min_value(dtype), "-inf"), (tirx.max_value(dtype), "inf")):
            if value.value == bound.value:
                start = tirx.FloatImm(dtype, float(infinite))
                return tirx.BufferStore(store.buffer, start, store.indices)
        return store

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.BufferStore, widen)))


def _rules() -> Iterator[tuple[str, Callable[[Any, Any], Any]]]:
    from tvm.s_tir import dlight

    def use(rule: Any, func: Any, target: Any) -> Any:
        dtypes = {str(p.dtype) for p in func.params if prim_func.is_tensor(p)}
        if isinstance(rule, dlight.gpu.Matmul) and "int8" in dtypes:
            return None  # its software pipeline of int8 fragments does not lower
        if "float16" in dtypes:
            import_tensor_intrinsics()  # which dlight would do, slowly
        found = rule.apply(func, target, False)
        first = found[0] if isinstance(found, list) else found
        if first is None:
            return None
        # sums of several threads do not lower where something follows them in their loops
        tvm.s_tir.transform.LowerCrossThreadReduction()(first.mod)
        return first.mod["main"]

    yield (
        "tensor-core",
        lambda func, target: tensor_core_rule.schedule(copy_func(func), target),
    )
    yield "column-sums", column_sums.scheduled
    yield "elementwise", elementwise.scheduled
    for kind in ("Matmul", "GEMV", "Reduction", "GeneralReduction", "Fallback"):
        rule = getattr(dlight.gpu, kind)()
        yield f"dlight-{kind.lower()}", partial(use, rule)


def _launches(func: tirx.PrimFunc) -> bool:
    keys: list[str] = []
    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, lambda attr: keys.append(attr.attr_key)))
    return "thread_extent" in keys


def _gpu(func: tirx.PrimFunc, target: Any) -> tuple[tirx.PrimFunc, str]:
    """Apply our rule of tensor cores, then TVM's dlight rules, most specific first.

    What launches threads itself, as TOPI's scatters, sorts and running sums do, stays as it is.
    """
    if "tirx.is_scheduled" in (func.attrs or {}) or _launches(func):
        return func.with_attr("tirx.is_scheduled", True), "as written"
    with target:
        for name, rule in _rules():
            try:
                found = rule(func, target)
            except Exception as e:
                # a rule that trips over a pattern must not stop the ones after it
                kernel = func.attrs.get("global_symbol", "?")
                logger.debug("%s cannot schedule %s: %s", name, kernel, e)
                continue
            if found is not None:
                return found.with_attr("tirx.is_scheduled", True), name
    raise BuildError(
        "no rule schedules this kernel for the GPU; build with target='llvm', "
        "or report the operator:\n" + tvm.IRModule({"kernel": func}).script()[:2000]
    )

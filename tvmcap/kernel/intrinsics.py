"""Elementary functions for llvm as straight-line arithmetic, which LLVM vectorizes.

LLVM turns a vector ``exp``, ``tanh`` or ``erf`` into one library call a lane. The forms here are
polynomials and rational functions with selects (``kernel/elementary.py``).
``sqrt`` and ``rsqrt`` are instructions already; trigonometric functions keep the library call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmcap.kernel import fp8
from tvmcap.kernel.cells import settle
from tvmcap.kernel.elementary import FORMS, Expr, let

_HALF = ("float16", "bfloat16")


def expand(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with elementary functions written out, 16-bit ones in float32.

    ``max`` and ``min`` become selects that keep a NaN of either side, as PyTorch does.
    """
    forms = (
        (tvm.ir.Call, _rewrite),
        (tirx.Max, _max),
        (tirx.Min, _min),
        (tirx.Cast, _cast),
    )
    return func.with_body(settle(tvm_ffi.structural_map(func.body, forms)))


def _rewrite(call: Any) -> Expr:
    form = FORMS.get(getattr(call.op, "name", ""))
    dtype = str(call.ty)
    if form is None or dtype not in ("float32", *_HALF):
        return call
    result = form(*(a if dtype == "float32" else tirx.Cast("float32", a) for a in call.args))
    if result is None or dtype == "float32":
        return call if result is None else result
    return tirx.Cast(dtype, result)


def _cast(node: Any) -> Expr:
    if not str(node.ty).startswith(fp8.E4M3) or not str(node.value.ty).startswith("float32"):
        return node
    return fp8.encode(node.value, let)


def _max(node: Any) -> Expr:
    return _extreme(node, lambda x, y: x > y)


def _min(node: Any) -> Expr:
    return _extreme(node, lambda x, y: x < y)


def _extreme(node: Any, wins: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return ``b`` if it wins, else ``a``: a NaN in a stays, one in b is asked for."""
    a, b = (node.b, node.a) if isinstance(node.a, tirx.FloatImm) else (node.a, node.b)
    dtype = str(node.ty)
    if dtype == "bfloat16":
        wide = [tirx.Cast("float32", x) for x in (a, b)]
        return tirx.Cast(dtype, _extreme(type(node)(*wide), wins))
    if not dtype.startswith("float"):
        return node
    if isinstance(b, tirx.FloatImm):
        return let(a, lambda a: tirx.Select(wins(b, a), b, a))

    def pick(a: Expr, b: Expr) -> Expr:
        return tirx.Select(tirx.Or(wins(b, a), tirx.isnan(b)), b, a)

    return let(a, lambda a: let(b, lambda b: pick(a, b)))

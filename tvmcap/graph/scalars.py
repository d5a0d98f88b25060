"""Numbers as immediates: in kernels they need no load, and arithmetic on them can be simpler."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.ir import GenericConst, TensorLoad
from tvm.s_tir import SBlock, renew_defs

from tvmcap.graph.rewrite import is_op, rebuild

_POW = tvm.ir.Op.get("tirx.pow")
_FACTORS = (2, 3)  # exponents for which PyTorch multiplies, too
_KINDS = ("float", "int", "uint")


def _power(builder: Any, call: Any) -> Any:
    """Lower a power to a kernel that reads its exponent, even a constant.

    With a number from 3 on TVM prints a warning each time it makes one.
    """
    return builder.call_te(topi.power, *call.args)


tvm.ir.register_op_attr("relax.power", "FLegalize", _power, level=11)  # above TVM's own


def inline_scalars(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures kernels hold constant numbers as immediates, and write squares and cubes as products.

    A kernel that is called with a constant of no dimensions gets a copy without that parameter.
    """

    def emit(builder: Any, call: Any) -> Any:
        new = _rewritten(mod, call)
        if new is None:
            return None
        args = [a for a in call.args[1].fields if _immediate(a) is None]
        inner = builder.add_func(new, call.args[0].name_hint)
        return relax.Call(
            call.op, [inner, relax.Tuple(args), *call.args[2:]], call.attrs, call.ty_args
        )

    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    if all(_rewritten(mod, b.value) is None for b in bindings):
        return mod
    return relax.transform.DeadCodeElimination(["main"])(rebuild(mod, emit))


def _rewritten(mod: tvm.IRModule, call: Any) -> tirx.PrimFunc | None:
    """Return the kernel that should stand in a call instead; None where its own should."""
    if not is_op(call, "call_tir"):
        return None
    func = mod[call.args[0]]
    given = zip(func.params, map(_immediate, call.args[1].fields), strict=False)
    new = _powers(_inline(func, {param: number for param, number in given if number is not None}))
    return None if new.same_as(func) else renew_defs(new)  # the old one may stay beside it


def _immediate(value: Any) -> Any:
    """Return a constant of no dimensions as an immediate, or None."""
    if not isinstance(value, GenericConst) or value.ty.ndim:
        return None
    dtype = str(value.ty.dtype.dtype)
    if dtype.rstrip("0123456789") not in (*_KINDS, "bfloat"):
        return None
    number = value.value.numpy().item()
    return tirx.FloatImm(dtype, number) if "float" in dtype else tirx.IntImm(dtype, number)


def _inline(func: tirx.PrimFunc, numbers: dict[Any, Any]) -> tirx.PrimFunc:
    """Return a kernel with immediates in place of parameters of no dimensions."""
    if not numbers:
        return func

    def block(node: Any) -> Any:
        reads = [r for r in node.reads if r.source not in numbers]
        if len(reads) == len(node.reads):
            return node
        return SBlock(
            node.iter_vars,
            reads,
            node.writes,
            node.name_hint,
            node.body,
            node.init,
            node.alloc_buffers,
            node.match_buffers,
            node.annotations,
        )

    changes = [(TensorLoad, lambda node: numbers.get(node.source, node)), (SBlock, block)]
    body = tvm_ffi.structural_map(func.body, changes)
    params = [p for p in func.params if p not in numbers]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


def _powers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Write a value's square and cube as products: exact for what fits, and cheaper than pow."""

    def power(call: Any) -> Any:
        if not call.op.same_as(_POW):
            return call
        base, exponent = call.args
        plain = isinstance(base, TensorLoad | tirx.Cast)
        if not plain or not isinstance(exponent, tirx.FloatImm | tirx.IntImm):
            return call
        if exponent.value not in _FACTORS:
            return call
        return base * base if exponent.value == _FACTORS[0] else base * base * base

    body = tvm_ffi.structural_map(func.body, (tvm.ir.Call, power))
    return func if body.same_as(func.body) else func.with_body(body)

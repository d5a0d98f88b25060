"""Legalize and fuse: one PrimFunc for each group of operators that can share a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.ir import GenericConst

from tvmcap.base.errors import BuildError
from tvmcap.graph.dead_stores import drop_dead_stores
from tvmcap.graph.group import Graph, fuse_ops, join
from tvmcap.graph.merge import Serves, merge
from tvmcap.graph.rewrite import is_op, named_by, outputs_of, rebuild, values_of
from tvmcap.graph.scalars import inline_scalars


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures main holds only call_tir, one PrimFunc an operator, and outputs are distinct tensors.

    Raises BuildError that names the operators TVM has no kernel for.
    """
    for step in (
        relax.backend.DispatchSortScan(),  # prefix sums, which LegalizeOps leaves alone
        plain_reshapes,  # which that writes around a GPU's
        keep_zeros,  # before LegalizeOps, which takes what is multiplied by zero for zero
        relax.transform.LegalizeOps(),
        drop_scopes,
        relax.transform.FoldConstant(),
        inline_scalars,  # after folding, which makes some of them
        fill_empty,  # after folding, which makes some of them
        own_outputs,  # after folding, which would undo the copy of a constant
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.DeadCodeElimination(["main"]),
    ):
        mod = step(mod)
    left = {_name(b.value) for b in _calls(mod) if not is_op(b.value, "call_tir")}
    if left:
        raise BuildError(
            f"TVM has no kernel for {', '.join(sorted(left))}; write the function without it, "
            "or run that part in PyTorch"
        )
    return mod


def keep_zeros(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures no float is multiplied by the number zero: that is zero for finite values only.

    Dividing by infinity gives the same for every value, and TVM does not shorten it.
    """
    values = values_of(mod["main"])

    def emit(builder: Any, value: Any) -> Any:
        if not is_op(value, "multiply"):
            return None
        for number, other in (value.args, reversed(value.args)):
            zero = _number(number, values.get if builder is None else builder.lookup_binding)
            dtype = str(value.ty.dtype.dtype)
            if zero == 0 and "float" in dtype:
                return relax.op.divide(other, relax.const(math.copysign(math.inf, zero), dtype))
        return None

    return mod if all(emit(None, v) is None for v in values.values()) else rebuild(mod, emit)


def drop_scopes(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures kernels hold no mark of TVM's that its own code generator warns not to know."""

    def plain(node: Any) -> Any:
        return node.body if node.attr_key == "pragma_scope" else node

    functions = dict(mod.functions.items())
    for name, func in functions.items():
        if isinstance(func, tirx.PrimFunc):
            body = tvm_ffi.structural_map(func.body, (tirx.AttrStmt, plain))
            functions[name] = func if body.same_as(func.body) else func.with_body(body)
    return tvm.IRModule(functions, attrs=mod.attrs)


def _number(value: Any, look: Callable[[Any], Any]) -> float | None:
    """Return the constant number that a value is, whatever it is cast to; None for others."""
    while isinstance(value, relax.Var) or is_op(value, "astype"):
        value = look(value) if isinstance(value, relax.Var) else value.args[0]
    is_number = isinstance(value, GenericConst) and value.ty.ndim == 0
    return float(value.value.numpy().item()) if is_number else None


def plain_reshapes(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures a reshape is the operator, and no call of the virtual machine's own."""

    def is_call(value: Any) -> bool:
        return is_op(value, "call_pure_packed") and _name(value) == "vm.builtin.reshape"

    def emit(_: Any, value: Any) -> Any:
        return relax.op.reshape(*value.args[1:]) if is_call(value) else None

    return rebuild(mod, emit) if any(is_call(b.value) for b in _calls(mod)) else mod


def _calls(mod: tvm.IRModule) -> list[Any]:
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [b for b in bindings if isinstance(getattr(b.value, "op", None), tvm.ir.Op)]


def _name(call: Any) -> str:
    """Name what a call runs: the operator, or the packed function where it only calls one."""
    packed = call.args[0] if is_op(call, "call_pure_packed") else None
    return str(getattr(packed, "global_symbol", call.op.name))


def fuse(mod: tvm.IRModule, serves: Serves | None = None) -> tvm.IRModule:
    """Ensures elementwise work sits in the kernel of its producer: one PrimFunc a fused group.

    A product or a row-wise operator also keeps what follows it where several of the group's
    results are needed outside, if ``serves`` takes the PrimFunc of the whole group.
    """
    graph = Graph(mod)
    parts = fuse_ops(graph)
    if serves is not None:
        parts = merge(graph, parts, serves)
    mod = drop_dead_stores(relax.transform.FuseTIR()(join(graph, parts)))
    return relax.transform.DeadCodeElimination(["main"])(mod)


def fill_empty(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures main holds no constants without elements, of which TVM cannot load some again."""
    found: list[Any] = []
    relax.analysis.post_order_visit(mod["main"], lambda e: found.append(e) if _empty(e) else None)
    if not found:
        return mod

    def made(builder: Any, value: Any) -> Any:
        if not _empty(value):
            return value
        shape, dtype = value.value.shape, str(value.ty.dtype.dtype)
        return builder.emit_te(topi.full, shape, dtype, 0, primfunc_name_hint="empty")

    def emit(builder: Any, value: Any) -> Any:
        if not is_op(value, "call_tir"):
            return made(builder, value)
        args = relax.Tuple([made(builder, a) for a in value.args[1].fields])
        return relax.Call(
            value.op, [value.args[0], args, *value.args[2:]], value.attrs, value.ty_args
        )

    return rebuild(mod, emit, lambda builder, _, output: made(builder, output))


def _empty(value: Any) -> bool:
    return isinstance(value, GenericConst) and 0 in getattr(value.value, "shape", ())


def own_outputs(mod: tvm.IRModule) -> tvm.IRModule:
    """Copy each output of main that is an argument, a constant, or a tensor returned before.

    A library writes its outputs into tensors of the caller, so each needs a kernel that writes it.
    """
    main = mod["main"]
    values = values_of(main)
    seen, copied = set(), set()
    for i, output in enumerate(outputs_of(main)):
        result = _kernel_result(values, output)
        if result is None or result in seen:
            copied.add(i)
        seen.add(result)

    def finish(builder: Any, i: int, output: Any) -> Any:
        return (
            builder.emit_te(topi.identity, output, primfunc_name_hint="copy")
            if i in copied
            else output
        )

    return rebuild(mod, lambda builder, value: None, finish) if copied else mod


def _kernel_result(values: Mapping[Any, Any], var: Any) -> tuple[Any, int] | None:
    """Return the call that computes a variable and which of its results it is, or None."""
    var = named_by(values, var)
    value = values.get(var)
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value, value.index
    return (var, 0) if isinstance(value, relax.Call) else None

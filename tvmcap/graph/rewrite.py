"""The one walk that graph passes share: emit main's bindings anew, some of them changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx

Emit = Callable[[Any, Any], Any]
"""(block builder, value with its arguments already rewritten) -> what to bind instead, or None.

A variable that it returns stands for the value from there on.
"""


def values_of(main: Any) -> dict[Any, Any]:
    """Return the value of each variable that main binds."""
    return {b.var: b.value for block in main.body.blocks for b in block.bindings}


def named_by(values: Mapping[Any, Any], var: Any) -> Any:
    """Return the variable that another is a name for, itself where it is none."""
    while isinstance(values.get(var), relax.Var):
        var = values[var]
    return var


def outputs_of(main: Any) -> list[Any]:
    """List what main returns, seen through aliases and tuples."""
    values = values_of(main)
    result = main.body.body
    while isinstance(values.get(result), relax.Var | relax.Tuple):
        result = values[result]
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]


def rebuild(
    mod: tvm.IRModule,
    emit: Emit,
    finish: Callable[[Any, int, Any], Any] | None = None,
    enter: Callable[[Any], None] | None = None,
    extra: Sequence[Any] = (),
) -> tvm.IRModule:
    """Walk main and rebind each value to what ``emit`` gives; None keeps the value.

    ``finish(builder, i, output)`` may change output ``i``; ``enter(var)`` is told the variable of
    each binding, as main has it, before its value is emitted; the new main also returns the values
    of the variables ``extra``.
    """
    main = mod["main"]
    builder = relax.BlockBuilder(mod)
    env: dict[Any, Any] = {}
    outputs = [*outputs_of(main), *extra]
    with builder.function("tvmcap_main", list(main.params), attrs=dict(main.attrs or {})):
        with builder.dataflow():
            for block in main.body.blocks:
                for binding in block.bindings:
                    if enter is not None:
                        enter(binding.var)
                    value = builder.normalize(substitute(binding.value, env))
                    if isinstance(value, relax.Var | relax.Tuple):
                        env[binding.var] = value
                        continue
                    new = emit(builder, value)
                    is_var = isinstance(new, relax.Var)
                    env[binding.var] = (
                        new if is_var else builder.emit(value if new is None else new)
                    )
            results = [substitute(o, env) for o in outputs]
            if finish is not None:
                results = [finish(builder, i, r) for i, r in enumerate(results)]
            results = [builder.emit_output(r) for r in results]
        builder.emit_func_output(relax.Tuple(results) if len(results) > 1 else results[0])
    new_mod = builder.finalize()
    written = new_mod["tvmcap_main"].with_attr("global_symbol", "main")
    functions = {
        g: f for g, f in new_mod.functions.items() if g.name_hint not in ("main", "tvmcap_main")
    }
    return tvm.IRModule({**functions, tvm.ir.GlobalVar("main"): written}, attrs=mod.attrs)


def substitute(expr: Any, env: dict[Any, Any]) -> Any:
    """Replace variables in a value in A-normal form."""
    if isinstance(expr, relax.Var):
        return env.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([substitute(f, env) for f in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        source = substitute(expr.tuple_value, env)
        return (
            source.fields[expr.index]
            if isinstance(source, relax.Tuple)
            else relax.TupleGetItem(source, expr.index)
        )
    if isinstance(expr, relax.Call):
        return relax.Call(
            expr.op, [substitute(a, env) for a in expr.args], expr.attrs, expr.ty_args
        )
    return expr


def reshape(tensor: Any, shape: Sequence[Any]) -> Any:
    """Return a call that gives a tensor's elements another shape.

    Without elements that is a new tensor: Relax takes a 0 in a shape for the size that was there.
    """
    if any(isinstance(size, tirx.IntImm) and size.value == 0 for size in shape):
        return relax.op.zeros(relax.ShapeExpr(list(shape)), str(tensor.ty.dtype.dtype))
    return relax.op.reshape(tensor, list(shape))


def is_op(value: Any, *names: str) -> bool:
    """Whether the value is a call of one of these Relax operators, named without ``relax.``."""
    op = getattr(value, "op", None)
    return isinstance(op, tvm.ir.Op) and op.name.removeprefix("relax.") in names

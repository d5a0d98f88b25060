"""Memory plan: `main` writes into tensors that its caller owns, and intermediates share storage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.sym import Analyzer

from tvmcap.base.errors import ContractError
from tvmcap.graph.rewrite import is_op, named_by, outputs_of, values_of
from tvmcap.kernel import tir_pipeline
from tvmcap.library.storage import Slot, Storage, assign, split_bytes, unit_text


@dataclass
class _Program:
    """What one walk over main's bindings finds.

    Attributes
    ----------
    slots: (variable, output index) -> slot.
    roots: variable -> the kernel output that it is or views.
    views: variable -> what it is a reshape of.
    """

    bindings: list[Any] = field(default_factory=list)
    slots: dict[tuple[Any, int], Slot] = field(default_factory=dict)
    roots: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    views: dict[Any, Any] = field(default_factory=dict)


def plan(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures main(inputs..., outputs...) passes destinations and every intermediate has storage.

    Expects main in call_tir form whose outputs are distinct kernel outputs or views of them
    (``graph.fuse`` sees to it). The planned bytes stand in the attribute ``tvmcap.storage``:
    {symbolic factor ("" for none): bytes per unit}.
    """
    for step in (relax.transform.ToNonDataflow(), relax.transform.RemovePurityChecking()):
        mod = step(mod)
    main = mod["main"]
    outputs = outputs_of(main)
    program, owned = _read_with_outputs(mod, main, outputs)
    storages = assign([slot for root, slot in program.slots.items() if root not in owned])
    planned, gvar = _write(mod, main, program, outputs, owned, storages), mod.get_global_var("main")
    totals: dict[str, int] = {}
    for storage in storages:
        totals[unit_text(storage.unit)] = totals.get(unit_text(storage.unit), 0) + storage.size
    result = tvm.IRModule({**dict(mod.functions.items()), gvar: planned}, attrs=mod.attrs)
    live = relax.transform.DeadCodeElimination(["main"])(result)
    # calls by name do not keep their kernels alive
    by_name = {g: f for g, f in mod.functions.items() if _is_outside(f)}
    functions = {**dict(live.functions.items()), **by_name}
    return tvm.IRModule(functions, attrs=mod.attrs).with_attr("tvmcap.storage", totals)


def is_launch(value: Any) -> bool:
    """Whether a binding of a planned main launches a kernel, or chooses between variants of one."""
    callee = getattr(value, "op", None)
    return isinstance(value, relax.If) or isinstance(callee, tvm.ir.GlobalVar | relax.ExternFunc)


def _read_with_outputs(
    mod: tvm.IRModule, main: Any, outputs: list[Any]
) -> tuple[_Program, dict[Any, int]]:
    """Read main; a reshape of what already belongs to another output stays a kernel."""
    copied: set[Any] = set()
    values = values_of(main)
    while True:
        program, owned = _read(mod, main, copied), dict[Any, int]()
        clash: list[Any] = []
        for i, var in enumerate(outputs):
            root = program.roots.get(var)
            if root is None or root in owned:
                clash = [var] if root is None else [var, outputs[owned[root]]]
                break
            owned[root] = i
        if not clash:
            return program, owned
        named = (named_by(values, var) for var in clash)
        view = next((var for var in named if var in program.views), None)
        if view is None:
            raise ContractError(
                f"plan: output {clash[0]} of main is not a kernel's own output; "
                "the fuse pass ensures it"
            )
        copied.add(view)


def _read(mod: tvm.IRModule, main: Any, copied: set[Any]) -> _Program:
    program = _Program()
    for block in main.body.blocks:
        for binding in block.bindings:
            at, value, var = len(program.bindings), binding.value, binding.var
            program.bindings.append(binding)
            for used in relax.analysis.free_vars(value):
                if used in program.roots:
                    program.slots[program.roots[used]].end = at
            viewed = _viewed(mod, value)
            if viewed is not None and var not in copied:
                program.views[var] = viewed
                if viewed in program.roots:
                    program.roots[var] = program.roots[viewed]
            elif is_op(value, "call_tir"):
                for i, out in enumerate(_fields(value.ty_args[0])):
                    size, unit = split_bytes(out.shape.values, str(out.dtype))
                    program.slots[(var, i)] = Slot(size, unit, at, at)
                program.roots[var] = (var, 0)
            elif (
                isinstance(value, relax.TupleGetItem)
                and (value.tuple_value, value.index) in program.slots
            ):
                program.roots[var] = (value.tuple_value, value.index)
            elif isinstance(value, relax.Var) and value in program.roots:
                program.roots[var] = program.roots[value]
    return program


def _viewed(mod: tvm.IRModule, value: Any) -> Any:
    """Return what a reshape kernel reads, or None: its result can be a view of that.

    A tensor without elements is a view of nothing, though its kernel moves none of them. Nor is
    the first part of a tensor a view, though its kernel copies element by element.
    """
    if not is_op(value, "call_tir") or len(value.args[1].fields) != 1:
        return None
    source = value.args[1].fields[0]
    func = mod[value.args[0]]
    attrs = func.attrs or {}
    if not isinstance(source, relax.Var) or not attrs.get("s_tir", False):
        return None
    sizes = [n for out in _fields(value.ty_args[0]) for n in out.shape]
    if any(isinstance(n, tirx.IntImm) and n.value == 0 for n in sizes):
        return None
    reshapes = attrs.get("tvmcap.reshape", False) or relax.analysis.has_reshape_pattern(func)
    if not reshapes:
        return None
    is_whole = Analyzer().can_prove_equal(_product(sizes), _product(source.ty.shape))
    return source if is_whole else None


def _product(sizes: Iterable[Any]) -> Any:
    """Multiply sizes of a tensor; of all of them, the number of its elements."""
    return math.prod(sizes, start=tirx.const(1, "int64"))


def _write(
    mod: tvm.IRModule,
    main: Any,
    program: _Program,
    outputs: list[Any],
    owned: dict[Any, int],
    storages: list[Storage],
) -> Any:
    """Emit main anew: outputs as parameters, shared storage, one call a kernel."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"out{i}", var.ty) for i, var in enumerate(outputs)]
    with builder.function(
        "main", [*main.params, *params], attrs=dict(main.attrs or {}), private=False
    ):
        allocated = [builder.emit(s.allocation()) for s in storages]
        env: dict[Any, Any] = {}
        owned_vars = {var: i for i, var in enumerate(outputs)}

        def value_of(expr: Any) -> Any:
            """Rewrite old variables; a tuple-typed kernel result is a list of its tensors."""
            if isinstance(expr, relax.TupleGetItem) and isinstance(env.get(expr.tuple_value), list):
                return env[expr.tuple_value][expr.index]
            if isinstance(expr, relax.Tuple):
                return relax.Tuple([value_of(f) for f in expr.fields])
            return env.get(expr, expr)

        def place(root: Any, out: Any) -> Any:
            if root in owned:
                param = params[owned[root]]
                same = tvm_ffi.structural_equal(param.ty.shape, out.shape)
                return param if same else builder.emit(relax.op.reshape(param, out.shape))
            home = allocated[program.slots[root].storage]
            return builder.emit(relax.op.memory.alloc_tensor(home, 0, out.shape, str(out.dtype)))

        def view(var: Any) -> Any:
            source = value_of(program.views[var])
            if var in owned_vars:
                return params[owned_vars[var]]
            return builder.emit(relax.op.reshape(source, var.ty.shape))

        for binding in program.bindings:
            value, var = binding.value, binding.var
            if var in program.views:
                env[var] = view(var)
            elif is_op(value, "call_tir"):
                results = [place((var, i), out) for i, out in enumerate(_fields(value.ty_args[0]))]
                args = [value_of(a) for a in value.args[1].fields] + results
                args += list(value.args[2].values) if len(value.args) > 2 else []
                builder.emit(_launch(mod, value.args[0], args, results))
                env[var] = results if isinstance(value.ty_args[0], relax.TupleType) else results[0]
            elif isinstance(value, relax.TupleGetItem | relax.Var | relax.Tuple):
                env[var] = value_of(value)
            else:
                env[var] = builder.emit(_substitute(value, env))
        builder.emit_func_output(relax.Tuple([]))
    return (
        builder.finalize()["main"]
        .without_attr("global_symbol")
        .with_attrs({"relax.force_pure": True, "tvmcap.outputs": len(outputs)})
    )


def _substitute(value: Any, env: dict[Any, Any]) -> Any:
    if not isinstance(value, relax.Call):
        return value
    return relax.Call(value.op, [env.get(a, a) for a in value.args], value.attrs, value.ty_args)


def _launch(mod: tvm.IRModule, gvar: Any, args: list[Any], results: list[Any]) -> Any:
    """The call of one kernel: direct, or chosen among variants by the rows of its first result.

    The attribute ``tvmcap.variants`` of a kernel lists [bound, name] by rising bound; the kernel
    itself serves the rest. Rows are the dimensions of the first result but the first
    ``tvmcap.lead`` (a batch) and the last ``tvmcap.trailing`` (1 where not given).
    """
    func = mod[gvar]
    variants = list((func.attrs or {}).get("tvmcap.variants", []))
    call = _call(mod, gvar, args)
    lead = int((func.attrs or {}).get("tvmcap.lead", 0))
    shape = results[0].ty.shape.values
    trailing = int((func.attrs or {}).get("tvmcap.trailing", 1))
    rows = Analyzer().simplify(_product(shape[lead : len(shape) - trailing]))
    for bound, name in reversed(variants):
        cheaper = _call(mod, mod.get_global_var(str(name)), args)
        call = relax.If(relax.prim_value(rows <= int(bound)), _sequence(cheaper), _sequence(call))
    return call


def _call(mod: tvm.IRModule, gvar: Any, args: list[Any]) -> Any:
    callee = relax.ExternFunc(gvar.name_hint) if _is_outside(mod[gvar]) else gvar
    return relax.Call(callee, args, None, [relax.TupleType([])])


def _is_outside(func: Any) -> bool:
    """Whether a kernel is TIRx, which is compiled apart from the module and found by its name."""
    return isinstance(func, tirx.PrimFunc) and tir_pipeline.name_for(func) == tir_pipeline.TIRX


def _sequence(call: Any) -> Any:
    if isinstance(call, relax.SeqExpr):
        return call
    var = relax.Var("_", relax.TupleType([]))
    return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, call)])], var)


def _fields(out: Any) -> list[Any]:
    return list(out.fields) if isinstance(out, relax.TupleType) else [out]

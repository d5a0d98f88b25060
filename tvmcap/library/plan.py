"""Memory plan: `main` writes into tensors that its caller owns, and intermediates share storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.sym import Analyzer

from tvmcap.base.errors import ContractError

ALIGN = 64
"""Bytes: sizes of storage are multiples of this (a cache line; 128-bit loads and TMA need 16)."""


@dataclass
class Slot:
    """One intermediate.

    Bytes = ``size`` x the product of ``unit``, live from binding ``start`` to ``end``.
    """

    size: int
    unit: tuple[Any, ...]
    start: int
    end: int
    storage: int = 0


@dataclass
class Storage:
    """One allocation that slots of the same symbolic factor share in turn.

    Its size is that of its largest slot.
    """

    size: int
    unit: tuple[Any, ...]
    slots: list[Slot]

    def takes(self, slot: Slot) -> bool:
        """Whether a slot grows with the same factor and is never alive beside another of this storage."""
        return unit_text(self.unit) == unit_text(slot.unit) and all(
            s.end < slot.start or slot.end < s.start for s in self.slots
        )


@dataclass
class _Program:
    """What one walk over main's bindings finds."""

    bindings: list[Any] = field(default_factory=list)
    slots: dict[tuple[Any, int], Slot] = field(
        default_factory=dict
    )  # (variable, output index) -> slot
    roots: dict[Any, tuple[Any, int]] = field(
        default_factory=dict
    )  # variable -> the kernel output it is or views
    views: dict[Any, Any] = field(default_factory=dict)  # variable -> what it is a reshape of


def plan(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures main(inputs..., outputs...) calls kernels in destination-passing form and every intermediate has storage.

    Expects main in call_tir form whose outputs are distinct kernel outputs or views of them
    (``graph.fuse`` sees to it).
    The planned bytes stand in the attribute ``tvmcap.storage``: {symbolic factor ("" for none): bytes per unit}.
    """
    for step in (relax.transform.ToNonDataflow(), relax.transform.RemovePurityChecking()):
        mod = step(mod)
    main = mod["main"]
    outputs = _outputs(main)
    program, owned = _read_with_outputs(mod, main, outputs)
    storages = assign([slot for root, slot in program.slots.items() if root not in owned])
    planned, gvar = _write(mod, main, program, outputs, owned, storages), mod.get_global_var("main")
    totals: dict[str, int] = {}
    for storage in storages:
        totals[unit_text(storage.unit)] = totals.get(unit_text(storage.unit), 0) + storage.size
    result = tvm.IRModule({**dict(mod.functions.items()), gvar: planned}, attrs=mod.attrs)
    live = relax.transform.DeadCodeElimination(["main"])(result)
    by_name = {
        g: f for g, f in mod.functions.items() if _is_outside(f)
    }  # calls by name do not keep them alive
    functions = {**dict(live.functions.items()), **by_name}
    return tvm.IRModule(functions, attrs=mod.attrs).with_attr("tvmcap.storage", totals)


def assign(slots: Sequence[Slot]) -> list[Storage]:
    """Share storage greedily, largest slot first ("greedy by size", Pisarchyk and Lee, arXiv 2001.03288).

    Tensors start at offset 0 of their storage: TVM's kernels refuse another one.
    """
    storages: list[Storage] = []
    for slot in sorted(slots, key=lambda s: (-s.size, s.start)):
        slot.storage = next((i for i, s in enumerate(storages) if s.takes(slot)), len(storages))
        if slot.storage == len(storages):
            storages.append(Storage(slot.size, slot.unit, []))
        storages[slot.storage].slots.append(slot)
    return storages


def unit_text(unit: tuple[Any, ...]) -> str:
    """Write symbolic factors as a size expression; "" where there are none."""
    return " * ".join(f"({_size_text(factor)})" for factor in unit)


_SIGNS = {tirx.Add: "+", tirx.Sub: "-", tirx.Mul: "*", tirx.FloorDiv: "//", tirx.FloorMod: "%"}


def _size_text(expr: Any) -> str:
    """Write an extent by the names of its dimensions.

    TVM's printer renames those called T, R or I.
    """
    if isinstance(expr, tirx.Var | tirx.IntImm):
        return str(expr.name if isinstance(expr, tirx.Var) else int(expr))
    if type(expr) in _SIGNS:
        return f"({_size_text(expr.a)} {_SIGNS[type(expr)]} {_size_text(expr.b)})"
    if isinstance(expr, tirx.Min | tirx.Max):
        return f"{type(expr).__name__.lower()}({_size_text(expr.a)}, {_size_text(expr.b)})"
    return str(expr)


def measure(shape: Sequence[Any], dtype: str) -> tuple[int, tuple[Any, ...]]:
    """Split a tensor's bytes into a constant, rounded up to ALIGN, and its symbolic factors."""
    size, unit = (tvm.DataType(dtype).bits * tvm.DataType(dtype).lanes + 7) // 8, []
    for extent in shape:
        if isinstance(extent, tirx.Mul) and isinstance(extent.b, tirx.IntImm):
            size *= int(extent.b)
            extent = extent.a
        if isinstance(extent, tirx.IntImm | int):
            size *= int(extent)
        else:
            unit.append(extent)
    return -(-max(size, 1) // ALIGN) * ALIGN, tuple(sorted(unit, key=str))


def _outputs(main: Any) -> list[Any]:
    """List the variables that main returns."""
    values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    result = main.body.body
    while values.get(result) is not None and isinstance(values[result], relax.Var | relax.Tuple):
        result = values[result]
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]


def is_launch(value: Any) -> bool:
    """Whether a binding of a planned main launches a kernel.

    A call of one, or a choice between variants.
    """
    callee = getattr(value, "op", None)
    return isinstance(value, relax.If) or isinstance(callee, tvm.ir.GlobalVar | relax.ExternFunc)


def _read_with_outputs(
    mod: tvm.IRModule, main: Any, outputs: list[Any]
) -> tuple[_Program, dict[Any, int]]:
    """Read main.

    A reshape stays a kernel where what it would view already belongs to another output.
    """
    copied: set[Any] = set()
    while True:
        program, owned = _read(mod, main, copied), {}
        clash = None
        for i, var in enumerate(outputs):
            root = program.roots.get(var)
            if root is None or root in owned:
                clash = var
                break
            owned[root] = i
        if clash is None:
            return program, owned
        if clash in copied:
            raise ContractError(
                f"plan: output {clash} of main is not a kernel's own output; the fuse pass ensures it"
            )
        copied.add(clash)


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
            elif _is_call(value, "relax.call_tir"):
                for i, out in enumerate(_fields(value.ty_args[0])):
                    size, unit = measure(out.shape.values, str(out.dtype))
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
    """Return what a reshape kernel reads, or None: its result can be a view of that."""
    if not _is_call(value, "relax.call_tir") or len(value.args[1].fields) != 1:
        return None
    source = value.args[1].fields[0]
    func = mod[value.args[0]]
    attrs = func.attrs or {}
    if not isinstance(source, relax.Var) or not attrs.get("s_tir", False):
        return None
    reshapes = attrs.get("tvmcap.reshape", False) or relax.analysis.has_reshape_pattern(func)
    return source if reshapes else None


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
        allocated = [builder.emit(_storage(s.size, s.unit)) for s in storages]
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
            elif _is_call(value, "relax.call_tir"):
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
    """The call of one kernel: direct, or chosen among variants by the number of rows of its first result.

    The attribute ``tvmcap.variants`` of a kernel lists [bound, name] by rising bound; the kernel
    itself serves the rest.
    Rows are the dimensions of the first result but the last and the first ``tvmcap.lead`` (a
    batch).
    """
    func = mod[gvar]
    variants = list((func.attrs or {}).get("tvmcap.variants", []))
    call = _call(mod, gvar, args)
    rows = tirx.const(1, "int64")
    lead = int((func.attrs or {}).get("tvmcap.lead", 0))
    for extent in results[0].ty.shape.values[lead:-1]:
        rows = rows * extent
    rows = Analyzer().simplify(rows)
    for bound, name in reversed(variants):
        cheaper = _call(mod, mod.get_global_var(str(name)), args)
        call = relax.If(relax.prim_value(rows <= int(bound)), _sequence(cheaper), _sequence(call))
    return call


def _call(mod: tvm.IRModule, gvar: Any, args: list[Any]) -> Any:
    callee = relax.ExternFunc(gvar.name_hint) if _is_outside(mod[gvar]) else gvar
    return relax.Call(callee, args, None, [relax.TupleType([])])


def _is_outside(func: Any) -> bool:
    """Whether a kernel is TIRx, which is compiled apart from the module and found by its name."""
    return isinstance(func, tirx.PrimFunc) and not (func.attrs or {}).get("s_tir", False)


def _sequence(call: Any) -> Any:
    if isinstance(call, relax.SeqExpr):
        return call
    var = relax.Var("_", relax.TupleType([]))
    return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, call)])], var)


def _storage(size: int, unit: tuple[Any, ...]) -> Any:
    return relax.op.memory.alloc_storage(
        relax.ShapeExpr([_scaled(size, unit)]), 0, "global", "uint8"
    )


def _scaled(size: int, unit: tuple[Any, ...]) -> Any:
    total = tirx.IntImm("int64", size)
    for factor in unit:
        total = total * factor
    return total


def _fields(out: Any) -> list[Any]:
    return list(out.fields) if isinstance(out, relax.TupleType) else [out]


def _is_call(value: Any, name: str) -> bool:
    return (
        isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name == name
    )

"""Groups of kernels: main's kernels as a graph, and one primitive function for each group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.graph.rewrite import is_op, outputs_of, rebuild

Value = tuple[Any, int]
"""A tensor of main: a variable and which of the tensors it holds, or a constant and 0."""


@dataclass
class Kernel:
    """One ``call_tir`` of main.

    Attributes
    ----------
    var, call: the binding.
    reads: its arguments in order: results of kernels, parameters of main, constants, and sizes.
    users: the kernels that read one of its results, by index.
    returned: which of its results main returns.
    """

    var: Any
    call: Any
    reads: tuple[Value, ...]
    users: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)

    @property
    def types(self) -> list[Any]:
        """Types of the results."""
        out = self.call.ty_args[0]
        return list(out.fields) if isinstance(out, relax.TupleType) else [out]


class Graph:
    """Main's kernels in order, and which of them reads what of which."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod, self.main = mod, mod["main"]
        bindings = [b for block in self.main.body.blocks for b in block.bindings]
        self._values = {b.var: b.value for b in bindings}
        self.kernels: list[Kernel] = []
        self.index: dict[Any, int] = {}
        for b in bindings:
            if is_op(b.value, "call_tir"):
                self.index[b.var] = len(self.kernels)
                reads = tuple(map(self.value_of, b.value.args[1].fields))
                self.kernels.append(Kernel(b.var, b.value, reads))
        for i, kernel in enumerate(self.kernels):
            for var, _ in kernel.reads:
                if var in self.index:
                    self.kernels[self.index[var]].users.add(i)
        for output in outputs_of(self.main):
            var, which = self.value_of(output)
            if var in self.index:
                self.kernels[self.index[var]].returned.add(which)

    def value_of(self, expr: Any) -> Value:
        """Return the tensor that an expression of main is, seen through aliases and tuples."""
        value = self._values.get(expr, expr)
        if isinstance(value, relax.Call):
            return expr, 0
        if isinstance(value, relax.TupleGetItem):
            source = self.value_of(value.tuple_value)[0]
            if isinstance(source, relax.Tuple):
                return self.value_of(source.fields[value.index])
            return source, int(value.index)
        return (value, 0) if value is expr else self.value_of(value)

    def func(self, i: int) -> tirx.PrimFunc:
        """Return the PrimFunc that a kernel calls."""
        return self.mod[self.kernels[i].call.args[0]]

    def type_of(self, value: Value) -> Any:
        """Return the type of a tensor of main."""
        var, which = value
        return self.kernels[self.index[var]].types[which] if var in self.index else var.ty

    def exports(self, members: Sequence[int]) -> list[Value]:
        """Return the results of a group that main returns or that other kernels read, in order."""
        inside, found = set(members), []
        for i in members:
            kernel = self.kernels[i]
            outside = {v for u in kernel.users - inside for v in self.kernels[u].reads}
            found += [
                (kernel.var, which)
                for which in range(len(kernel.types))
                if which in kernel.returned or (kernel.var, which) in outside
            ]
        return found


@dataclass(frozen=True)
class Group:
    """A primitive function of several kernels.

    ``args`` are what to call it with, ``sizes`` the symbolic extents that follow from none of
    them, and ``exports`` what it returns.
    """

    function: Any
    args: list[Value]
    sizes: list[Any]
    exports: list[Value]


def fuse_ops(graph: Graph) -> list[list[int]]:
    """Partition the kernels as FuseOps does; each part lists its kernels in order."""
    functions: dict[Any, Any] = {}

    def rename(builder: Any, value: Any) -> Any:
        """Give every call a PrimFunc of its own, whose name tells which call it is."""
        if not is_op(value, "call_tir"):
            return None
        old, new = value.args[0], tvm.ir.GlobalVar(f"kernel_{len(functions)}")
        relax.expr._update_type(new, old.ty)
        functions[new] = graph.mod[old]
        return relax.Call(value.op, [new, *value.args[1:]], value.attrs, value.ty_args)

    functions[tvm.ir.GlobalVar("main")] = rebuild(graph.mod, rename)["main"]
    fused = relax.transform.FuseOps()(tvm.IRModule(functions))
    parts = []
    for gvar, func in fused.functions.items():
        if not isinstance(func, relax.Function):
            continue
        called = [
            int(b.value.args[0].name_hint.removeprefix("kernel_"))
            for block in func.body.blocks
            for b in block.bindings
            if is_op(b.value, "call_tir")
        ]
        parts += [[i] for i in called] if gvar.name_hint == "main" else [sorted(called)]
    return sorted(parts)


def join(graph: Graph, parts: Iterable[Sequence[int]]) -> tvm.IRModule:
    """Call one primitive function for each part of several kernels; FuseTIR fuses those."""
    builder = relax.BlockBuilder(graph.mod)
    env: dict[Value, Any] = {}
    main = graph.main
    with builder.function("tvmcap_main", list(main.params), attrs=dict(main.attrs or {})):
        with builder.dataflow():
            for members in in_order(graph, [sorted(p) for p in parts]):
                if len(members) == 1:
                    _call(builder, graph.kernels[members[0]], env)
                else:
                    _call_group(builder, graph, members, env)
            found = [_new(env, graph.value_of(o)) for o in outputs_of(main)]
            results = [builder.emit_output(r) for r in found]
        builder.emit_func_output(relax.Tuple(results) if len(results) > 1 else results[0])
    mod = builder.finalize()
    written = mod["tvmcap_main"].with_attr("global_symbol", "main")
    kept = {g: f for g, f in mod.functions.items() if g.name_hint not in ("main", "tvmcap_main")}
    return tvm.IRModule({**kept, tvm.ir.GlobalVar("main"): written}, attrs=graph.mod.attrs)


def fused(graph: Graph, members: Sequence[int]) -> tirx.PrimFunc:
    """Return the PrimFunc that a group of several kernels would be."""
    function = make_group(graph, members).function
    called = {graph.kernels[i].call.args[0] for i in members}
    builder = relax.BlockBuilder(tvm.IRModule({g: graph.mod[g] for g in called}))
    gvar = builder.add_func(function, "fused")
    params = [relax.Var(p.name, p.ty) for p in function.params]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(gvar, params))
        builder.emit_func_output(result)
    (func,) = (
        f
        for f in relax.transform.FuseTIR()(builder.finalize()).functions.values()
        if isinstance(f, tirx.PrimFunc)
    )
    return func


def in_order(graph: Graph, parts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Order the parts such that each comes after those it reads, else by its last kernel."""
    part_of = {i: members[0] for members in parts for i in members}
    by_first = {members[0]: members for members in parts}
    done: dict[int, None] = {}
    stack = sorted(by_first, key=lambda p: by_first[p][-1], reverse=True)
    while stack:
        part = stack[-1]
        sources = {
            part_of[graph.index[var]]
            for i in by_first[part]
            for var, _ in graph.kernels[i].reads
            if var in graph.index
        }
        waiting = sorted(sources - done.keys() - {part}, reverse=True)
        if part in done or not waiting:
            done[stack.pop()] = None
        stack += [] if part in done else waiting
    return [by_first[p] for p in done]


def make_group(graph: Graph, members: Sequence[int]) -> Group:
    """Write the primitive function of several kernels, with variables of its own."""
    inside = {graph.kernels[i].var for i in members}
    read = (v for i in members for v in graph.kernels[i].reads)
    tensors = (v for v in read if isinstance(graph.type_of(v), relax.TensorType))
    args = list(dict.fromkeys(v for v in tensors if v[0] not in inside))
    params = [relax.Var(f"x{n}", graph.type_of(v)) for n, v in enumerate(args)]
    env: dict[Value, Any] = dict(zip(args, params, strict=True))
    exports = graph.exports(members)
    builder = relax.BlockBuilder()
    with builder.function("group", params, attrs={"Primitive": True}):
        with builder.dataflow():
            for i in members:
                _call(builder, graph.kernels[i], env)
            results = [builder.emit_output(env[v]) for v in exports]
        builder.emit_func_output(relax.Tuple(results) if len(results) > 1 else results[0])
    function = builder.finalize()["group"].without_attr("global_symbol")
    sizes = list(relax.analysis.free_symbolic_vars(function))
    if sizes:
        params = [*function.params, relax.Var("sizes", relax.ShapeType(sizes))]
        function = relax.Function(params, function.body, function.ret_ty, attrs=function.attrs)
    return Group(relax.utils.copy_with_new_vars(function), args, sizes, exports)


def _call(builder: Any, kernel: Kernel, env: dict[Value, Any]) -> None:
    """Emit a kernel's call with the tensors of ``env``, which learns its results."""
    call = kernel.call
    args = [call.args[0], relax.Tuple([_new(env, v) for v in kernel.reads]), *call.args[2:]]
    result = builder.emit(relax.Call(call.op, args, call.attrs, call.ty_args))
    outputs = [(kernel.var, which) for which in range(len(kernel.types))]
    _learn(builder, result, outputs, isinstance(result.ty, relax.TupleType), env)


def _call_group(builder: Any, graph: Graph, members: Sequence[int], env: dict[Value, Any]) -> None:
    group = make_group(graph, members)
    names = [graph.kernels[i].call.args[0].name_hint for i in members]
    gvar = builder.add_func(group.function, "_".join(["fused", *names]))
    args = [_new(env, v) for v in group.args]
    args += [relax.ShapeExpr(group.sizes)] if group.sizes else []
    result = builder.emit(relax.Call(gvar, args))
    _learn(builder, result, group.exports, len(group.exports) > 1, env)


def _learn(
    builder: Any, result: Any, outputs: Sequence[Value], several: bool, env: dict[Value, Any]
) -> None:
    for which, value in enumerate(outputs):
        env[value] = builder.emit(relax.TupleGetItem(result, which)) if several else result


def _new(env: dict[Value, Any], value: Value) -> Any:
    return env.get(value, value[0])

"""Tuning tasks: the structurally distinct kernels of a fused module, with their free sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmcap.kernel.prim_func import has_reduction, is_tensor, size_vars, structure, substitute
from tvmcap.kernel.records import TaskKey, digest

Find = Callable[[Any, Any], "tuple[Any, Any] | None"]
"""``find(func, target) -> (template, problem)``, or None where no template matches."""

REPRESENTATIVE_SIZES = {"llvm": (1, 16, 128, 512), "cuda": (1, 16, 128, 512, 2048, 8192)}
"""By kind of target: the values of a symbolic extent to tune at, as far as they are in bounds."""
_WORTH_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class SizeVar:
    """A symbolic extent of a kernel with its inclusive bounds; ``max`` None is no bound."""

    name: str
    var: Any
    min: int = 1
    max: int | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """One kernel to tune.

    Attributes
    ----------
    name: name of the first PrimFunc of this structure; ``names`` has all of them.
    func: the PrimFunc, symbolic where the program is.
    count: how many calls one run of the program makes.
    template, problem: what ``find`` returned; None where MetaSchedule's rules tune a loop nest.
    vars: symbolic extents in order of appearance in the arguments' shapes.
    key, workload: what records of this task carry; names of variables and functions do not matter.
    typical: values of a symbolic extent worth tuning at.
    """

    name: str
    func: Any = field(repr=False)
    count: int
    template: Any = field(repr=False)
    problem: Any = field(repr=False)
    vars: tuple[SizeVar, ...]
    key: TaskKey
    workload: dict[str, Any] = field(repr=False)
    names: tuple[str, ...] = ()
    typical: tuple[int, ...] = REPRESENTATIVE_SIZES["llvm"]

    @property
    def workload_hash(self) -> str:
        """Digest of the workload."""
        return self.key.workload_hash

    def sizes(self, override: Mapping[str, Sequence[int]] | None = None) -> list[dict[str, int]]:
        """List representative values of the symbolic extents, by name; ``[{}]`` if all is static.

        ``override`` gives the values of some by name. Several extents take their values side by
        side, not as a product.
        """
        # of several extents each takes the root, so that their product stays in the same range
        typical = [max(1, round(n ** (1 / max(len(self.vars), 1)))) for n in self.typical]
        given = override or {}
        columns = [list(given.get(v.name) or _representative(v, typical)) for v in self.vars]
        length = max((len(c) for c in columns), default=1)
        rows = [
            {v.name: c[min(i, len(c) - 1)] for v, c in zip(self.vars, columns, strict=True)}
            for i in range(length)
        ]
        return list({tuple(r.items()): r for r in rows}.values())

    def record_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return sizes as records hold them: ``{"s0": n}``, and ``{"rows": n}`` for a template.

        Of a template's extents only those that are no part of the rows have an entry of their own.
        """
        if self.template is None:
            return {f"s{i}": int(sizes[v.name]) for i, v in enumerate(self.vars)}
        rows = self.problem.rows
        inside: list[Any] = []
        if not isinstance(rows, int):
            tvm_ffi.structural_walk(rows, (tirx.Var, inside.append))
        others = {
            f"s{i}": int(sizes[v.name])
            for i, v in enumerate(self.vars)
            if not any(v.var.same_as(part) for part in inside)
        }
        return {"rows": evaluate(rows, self.vars, sizes), **others}


def _representative(var: SizeVar, typical: Sequence[int]) -> list[int]:
    inside = [n for n in typical if n >= var.min and (var.max is None or n <= var.max)]
    if var.max is not None and (not inside or var.max < 2 * typical[-1]):
        inside.append(var.max)
    return sorted(set(inside or [max(var.min, 1)]))


def evaluate(extent: Any, size_vars: Sequence[SizeVar], sizes: Mapping[str, int]) -> int:
    """Value of an extent (int or expression of symbolic variables) at given sizes."""
    if isinstance(extent, int):
        return extent
    values = [(v.var, tirx.IntImm(v.var.ty.dtype, int(sizes[v.name]))) for v in size_vars]
    return int(tvm.sym.Analyzer().simplify(substitute(extent, values)))


def bind(task: Task, sizes: Mapping[str, int]) -> Any:
    """Return the PrimFunc with its symbolic extents replaced by numbers.

    Extents that are arguments of their own leave the signature.
    """
    if not task.vars:
        return task.func
    values = [(v.var, tirx.IntImm(v.var.ty.dtype, int(sizes[v.name]))) for v in task.vars]
    scalars = [p for p in task.func.params if not is_tensor(p)]
    func = task.func
    if scalars:
        chosen = {p: value for p in scalars for old, value in values if p.same_as(old)}
        func = func.specialize(chosen)
    return substitute(func, values)


def argument_specs(
    func: Any, size_vars: Sequence[SizeVar], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Describe the arguments: ``{"shape", "dtype"}`` a tensor, ``{"value", "dtype"}`` a number."""
    specs: list[dict[str, Any]] = []
    for p in func.params:
        if is_tensor(p):
            shape = [evaluate(_as_int(e), size_vars, sizes) for e in p.shape]
            specs.append({"shape": shape, "dtype": str(p.dtype)})
        else:
            specs.append({"value": evaluate(p, size_vars, sizes), "dtype": str(p.ty.dtype)})
    return specs


def _as_int(extent: Any) -> Any:
    return int(extent) if isinstance(extent, int | tirx.IntImm) else extent


def work(task: Task, sizes: Mapping[str, int]) -> tuple[float, float]:
    """Estimate floating-point operations and bytes of arguments of one call."""
    specs = argument_specs(task.func, task.vars, sizes)
    sizes_of = ((math.prod(s["shape"]), tvm.DataType(s["dtype"])) for s in specs if "shape" in s)
    nbytes = float(sum(elements * dtype.itemsize for elements, dtype in sizes_of))
    func = bind(task, sizes)
    flops = float(tvm.s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": func})))
    return flops, nbytes


def extract(mod: Any, target: Any, find: Find) -> list[Task]:
    """List the tasks of a fused module, in order of first call.

    Parameters
    ----------
    mod: module whose Relax functions call PrimFuncs through ``call_tir``.
    target: the target that templates are matched for.
    find: picks a template and its problem for a PrimFunc.
    """
    found: dict[tuple[TaskKey, str], Task] = {}
    bounds = _bounds(mod)
    for gvar, args in _calls(mod):
        func, name = mod[gvar], gvar.name_hint
        if "tirx.is_scheduled" in func.attrs:
            continue
        task = _task(name, func, target, find, _own_bounds(func, args, bounds))
        identity = (task.key, structure(func))  # a template's key leaves the rows out
        old = found.get(identity)
        if old is not None:
            names = tuple(dict.fromkeys([*old.names, name]))
            task = Task(**{**vars(old), "count": old.count + 1, "names": names})
        found[identity] = task
    return [task for task in found.values() if _worth(task)]


def make_task(
    func: Any, target: Any, find: Find, bounds: Mapping[str, tuple[int, int | None]] | None = None
) -> Task:
    """Return the task of one PrimFunc; ``bounds`` gives (min, max) of its extents by name."""
    name = str(func.attrs["global_symbol"]) if "global_symbol" in func.attrs else "main"
    return _task(name, func, target, find, bounds or {})


def _task(
    name: str, func: Any, target: Any, find: Find, bounds: Mapping[str, tuple[int, int | None]]
) -> Task:
    free = tuple(SizeVar(v.name, v, *bounds.get(v.name, (1, None))) for v in size_vars(func))
    pair = find(func, target)
    if pair is None:
        template = problem = None
        workload: dict[str, Any] = {"func": structure(func)}
        key = TaskKey("trace", digest(workload))
    else:
        from tvmcap.kernel.template import source_hash

        template, problem = pair
        workload = {**problem.key(), "template": template.name}
        workload.pop("rows", None)
        key = TaskKey("template", digest(workload), template.name, source_hash(template))
    typical = REPRESENTATIVE_SIZES[target.kind.name]
    return Task(name, func, 1, template, problem, free, key, workload, (name,), typical)


def _worth(task: Task) -> bool:
    if task.template is not None or has_reduction(task.func):
        return True
    return work(task, task.sizes()[-1])[1] >= _WORTH_BYTES


def _calls(mod: Any) -> list[tuple[Any, list[Any]]]:
    calls: list[tuple[Any, list[Any]]] = []
    call_tir = tvm.ir.Op.get("relax.call_tir")

    def see(call: Any) -> None:
        if isinstance(call, relax.Call) and call.op == call_tir:
            calls.append((call.args[0], list(call.args[1])))

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, see)
    return calls


def _bounds(mod: Any) -> dict[str, tuple[int, int | None]]:
    bounds: dict[str, tuple[int, int | None]] = {}
    for func in mod.functions.values():
        if not isinstance(func, relax.Function) or not func.attrs:
            continue
        low, high = (
            {str(k): int(v) for k, v in func.attrs.get(f"tir_var_{side}_bound", {}).items()}
            for side in ("lower", "upper")
        )
        for name in {*low, *high}:
            bounds[name] = (low.get(name, 1), high.get(name))
    return bounds


def _own_bounds(
    func: Any, args: list[Any], bounds: Mapping[str, tuple[int, int | None]]
) -> dict[str, tuple[int, int | None]]:
    """Carry the bounds of the caller's variables to the callee's, which may be named otherwise."""
    own = dict(bounds)
    for param, arg in zip([p for p in func.params if is_tensor(p)], args, strict=False):
        shape = getattr(arg.ty, "shape", None)
        for inner, outer in zip(param.shape, shape or (), strict=False):
            if isinstance(inner, tirx.Var) and isinstance(outer, tirx.Var) and outer.name in bounds:
                own[inner.name] = bounds[outer.name]
    return own

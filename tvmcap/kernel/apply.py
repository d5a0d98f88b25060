"""Apply: every PrimFunc gets a schedule, from a record where one exists, else from a rule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.kernel import fallback, intrinsics, spaces, tasks, traces, variants
from tvmcap.kernel.choice import Choice, Choose
from tvmcap.kernel.records import Record
from tvmcap.kernel.stores import best_by_size

logger = logging.getLogger("tvmcap")

VENDOR = "vendor:"

Lookup = Callable[[tasks.Task], Sequence[Record]]
"""What was timed of a task at each size, the fastest first (``admission.admitted``)."""


@dataclass(frozen=True)
class Served:
    """What serves one task.

    Attributes
    ----------
    task: name of the kernel; ``calls`` how often one run of the program calls it.
    served_by: ``"template:NAME"``, ``"trace"``, ``"rule:NAME"`` or ``"vendor:torch"``.
    records: for each tuned size, the record's median in microseconds and its candidate.
    ranges: for each variant the largest number of rows it serves ("any" for the last), and its
        knobs.
    tunable: whether tuning could do something for this kernel.
    reason: why no record serves it, and no template that would be faster.
    operator: the custom operator of PyTorch that the kernel calls, or "".
    """

    task: str
    served_by: str
    calls: int
    tunable: bool = True
    records: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    operator: str = ""

    @property
    def tuned(self) -> bool:
        """Whether a record decided the schedule."""
        return bool(self.records)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "tuned": self.tuned}


def schedule(
    mod: tvm.IRModule,
    target: Any,
    lookup: Lookup,
    coverage: list[Served],
    choose: Choose | None = None,
) -> tvm.IRModule:
    """Ensures every PrimFunc is scheduled; appends to ``coverage`` what serves each.

    A record at the very size decides, else ``choose`` (a cost model), else the rule or default.
    """
    functions = dict(mod.functions.items())
    found = {name: task for task in tasks.extract(mod, target, spaces.find) for name in task.names}
    for gvar, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        if "tvmcap.vendor" in (func.attrs or {}):
            coverage.append(_left_to_torch(gvar.name_hint, func))
            continue
        task = found.get(gvar.name_hint)
        if task is None:
            functions[gvar], rule = fallback.schedule(func, target)
            coverage.append(
                Served(gvar.name_hint, f"rule:{rule}", 1, False, reason="too small to tune")
            )
            continue
        own = task if task.name == gvar.name_hint else tasks.make_task(func, target, spaces.find)
        kernels, served = _serve(own, list(lookup(task)), target, choose)
        if task.name == gvar.name_hint:
            coverage.append(served)
        functions.update(_attach(gvar, kernels, len(getattr(own.problem, "batch", ()))))
    return tvm.IRModule(functions, attrs=mod.attrs)


def _serve(
    task: tasks.Task, timed: list[Record], target: Any, choose: Choose | None
) -> tuple[list[tuple[int | None, Any]], Served]:
    """Kernels of a task as (largest number of rows or None, PrimFunc), and the report."""
    records = best_by_size(timed)
    seen = {_sizes_text(r): f"{r.median_us:.1f} us {r.candidate[:120]}" for r in records}
    if task.template is not None:
        known = [r.sizes["rows"] for r in records]
        choice = None if choose is None else choose(task, known)
        choices = _choose(task, timed, target, choice)
        made = [
            (bound, task.template.lower(task.func, task.problem, knobs, target))
            for bound, knobs in choices
        ]
        if target.kind.name == "llvm":
            made = [(bound, intrinsics.expand(f)) for bound, f in made]
        ranges = {
            "any" if b is None else f"<={b}": task.template.knobs_to_json(k) for b, k in choices
        }
        reason = _reason(task, target, _missing(records, choice))
        if choice is not None and isinstance(task.problem.rows, int):
            seen = {}  # records of other numbers of rows decided nothing
        return made, Served(
            task.name, f"template:{task.template.name}", task.count, True, seen, ranges, reason
        )
    for record in sorted(records, key=lambda r: -sum(r.sizes.values())):
        func = traces.apply_trace(task.func, record.trace, target)
        if func is not None:
            used = {_sizes_text(record): seen[_sizes_text(record)]}
            made, ranges = _with_few_rows(task, func, target)
            lent = traces.lends_tile(task.func, record.trace or [])
            reason = _reason(task, target, "the trace's tile, rows padded to it" if lent else "")
            return made, Served(task.name, "trace", task.count, True, used, ranges, reason)
    func, rule = fallback.schedule(task.func, target)
    made, ranges = _with_few_rows(task, func, target)
    missing = "no record" if not records else "no record's trace applies to the symbolic sizes"
    reason = _reason(task, target, missing)
    return made, Served(task.name, f"rule:{rule}", task.count, True, {}, ranges, reason)


def _with_few_rows(
    task: tasks.Task, func: Any, target: Any
) -> tuple[list[tuple[int | None, Any]], dict[str, str]]:
    """Put a kernel for few rows before one for tensor cores, and name both by range of rows."""
    few = spaces.few_rows(task.func, target)
    if few is None:
        return [(None, func)], {}
    bound, kernel, name = few
    return [(bound, kernel), (None, func)], {f"<={bound}": name, "any": "tensor cores"}


def _left_to_torch(name: str, func: Any) -> Served:
    operator = func.attrs.get("tvmcap.operator")
    if operator is None:
        return Served(name, f"{VENDOR}torch", 1, reason="left to torch's kernel by vendor_matmul")
    why = f"custom operator {operator}, registered with lower='eager'"
    return Served(name, f"{VENDOR}torch", 1, False, reason=why, operator=str(operator))


def needs(coverage: Sequence[Served]) -> tuple[str, ...]:
    """Name the packages that kernels are left to, and the custom operators among them."""
    left = (s.served_by for s in coverage if s.served_by.startswith(VENDOR))
    operators = {f"operator:{s.operator}" for s in coverage if s.operator}
    return tuple(sorted({name.removeprefix(VENDOR) for name in left} | operators))


def _reason(task: tasks.Task, target: Any, missing: str) -> str:
    return "; ".join(filter(None, [spaces.refusals(task.func, target), missing]))


def _missing(records: list[Record], choice: Choice | None) -> str:
    """Say what decides where no record does."""
    if choice is None:
        return "" if records else "no record; the template's default"
    rows = ", ".join(map(str, sorted(choice.knobs)))
    where = f"no record at {rows} rows" if records else "no record"
    return f"{where}; the cost model's choice ({choice.model})"


def _sizes_text(record: Record) -> str:
    return ", ".join(f"{k}={v}" for k, v in record.sizes.items()) or "static"


def _choose(
    task: tasks.Task, timed: list[Record], target: Any, choice: Choice | None
) -> variants.Ranges:
    """Knobs by range of rows: of the record at a size, else the model's, else by estimate."""
    chosen = {} if choice is None else dict(choice.knobs)
    times = _times(task, timed)
    tuned = {rows: next(iter(found)) for rows, found in times.items()}
    if isinstance(task.problem.rows, int):
        rows = task.problem.rows
        near = tuned.get(rows) or chosen.get(rows) or _nearest(tuned, rows)
        return [(None, near or _defaults(task, target)[0][1])]
    if not tuned and not chosen:
        return _defaults(task, target)
    if variants.can_estimate(task):
        return variants.assign(task, times, chosen, target)
    defaults = _defaults(task, target)
    sizes = [task.record_sizes(sizes)["rows"] for sizes in task.sizes()]
    first = {n: next(k for b, k in defaults if b is None or n <= b) for n in sizes}
    return variants.halfway(first | chosen | tuned)


def _times(task: tasks.Task, timed: list[Record]) -> dict[int, dict[Any, float]]:
    """Microseconds of the settings timed at each number of rows, the fastest first.

    Where another size varies too, as the reduction of a weight's gradient does, at its largest.
    """
    largest: dict[int, list[tuple[str, int]]] = {}
    for record in timed:
        rows, sizes = record.sizes["rows"], sorted(record.sizes.items())
        largest[rows] = max(largest.get(rows, sizes), sizes)
    times: dict[int, dict[Any, float]] = {}
    for record in sorted(timed, key=lambda r: r.median_us or 0.0):
        rows = record.sizes["rows"]
        if sorted(record.sizes.items()) == largest[rows]:
            knobs = task.template.knobs_from_json(record.candidate)
            times.setdefault(rows, {})[knobs] = record.median_us or 0.0
    return times


def _nearest(tuned: dict[int, Any], rows: int) -> Any:
    """Return the knobs tuned at the size nearest to ``rows``, no further than a factor of four."""
    near = min(tuned, key=lambda n: abs(math.log(n / rows)), default=None) if rows else None
    return tuned[near] if near is not None and rows / 4 <= near <= 4 * rows else None


def _defaults(task: tasks.Task, target: Any) -> variants.Ranges:
    """The template's own choice by range of rows where it has one, else its one default."""
    if task.template.ranges is not None and not isinstance(task.problem.rows, int):
        ranged: variants.Ranges = task.template.ranges(task.problem, target)
        return ranged
    return [(None, task.template.default(task.problem, target))]


def _attach(gvar: Any, kernels: list[tuple[int | None, Any]], lead: int) -> dict[Any, Any]:
    """Name the variants of a kernel; the last, which serves any size, lists the others."""
    functions, listed = {}, []
    for bound, func in kernels[:-1]:
        name = f"{gvar.name_hint}_upto{bound}"
        variant = tvm.ir.GlobalVar(name)
        relax.expr._update_type(variant, gvar.ty)  # Relax types a call by its callee
        functions[variant] = func
        listed.append([bound, name])
    last = kernels[-1][1]
    functions[gvar] = (
        last.with_attrs({"tvmcap.variants": listed, "tvmcap.lead": lead}) if listed else last
    )
    return functions

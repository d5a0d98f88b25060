"""The table of kernels of a final module: what each call of a kernel reads and writes, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.sym import Analyzer

from tvmcap.base.errors import LibraryError
from tvmcap.base.signature import Signature, Size
from tvmcap.view.traffic import weight_like

_THREAD_BINDING = 4
_CALLS = ("relax.call_tir", "relax.call_dps_packed")
_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "Div": "//"}


def table(module: tvm.IRModule, signature: Signature) -> dict[str, Any]:
    """List the kernel calls of ``main`` in the form that ``view.traffic.count`` reads.

    ``module`` is planned (destinations among the arguments) or still in ``call_tir`` form.
    """
    arenas = (module.attrs or {}).get("tvmcap.storage")
    planned = None if arenas is None else {str(k): int(v) for k, v in arenas.items()}
    return {"kernels": _Walker(module, signature).run(), "arenas": planned}


def launches(func: Any) -> int:
    """Count the device kernels of a PrimFunc: nests bound to threads, 1 where there is none."""
    nests = 0

    def see(block: Any) -> None:
        nonlocal nests
        if block.name_hint == "root":
            parts = block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]
            nests += sum(map(_bound_to_threads, parts))

    tvm_ffi.structural_walk(func.body, (tvm.s_tir.SBlock, see))
    return max(1, nests)


def _bound_to_threads(stmt: Any) -> bool:
    found = False

    def see(loop: Any) -> None:
        nonlocal found
        found = found or int(loop.kind) == _THREAD_BINDING

    tvm_ffi.structural_walk(stmt, (tirx.For, see))
    return found


def size_of(expr: Any) -> Size:
    """Write an extent as signatures do: a number, or arithmetic on the names of dimensions."""
    if isinstance(expr, int):
        return expr
    expr = Analyzer().simplify(expr)
    return int(expr) if isinstance(expr, tirx.IntImm) else _text(expr)


def _text(expr: Any) -> str:
    kind = type(expr).__name__
    if isinstance(expr, tirx.IntImm):
        return str(int(expr))
    if isinstance(expr, tirx.Var):
        return str(expr.name)
    if kind in _ARITHMETIC:
        return f"({_text(expr.a)} {_ARITHMETIC[kind]} {_text(expr.b)})"
    if kind in ("Max", "Min"):
        return f"{kind.lower()}({_text(expr.a)}, {_text(expr.b)})"
    raise LibraryError(f"the size {expr} is no arithmetic on the dimensions' names")


class _Walker:
    """Follows main's bindings; an alias map leads every view to the tensor that it shows."""

    def __init__(self, module: tvm.IRModule, signature: Signature) -> None:
        self.functions = {g.name_hint: f for g, f in module.functions.items()}
        self.main = self.functions["main"]
        self.rows: list[dict[str, Any]] = []
        self.when: list[tuple[Size, int, bool]] = []
        self.alias: dict[Any, Any] = {}
        self.written: set[Any] = set()
        self.numbers: dict[Any, int] = {}
        params, inputs = list(self.main.params), signature.inputs
        outputs = len(signature.outputs)
        planned = "tvmcap.outputs" in (self.main.attrs or {})
        end = len(params) - outputs if planned else len(params)
        flags = zip(params, weight_like(signature), strict=False)
        self.roles = {p: "weight" if w else "activation" for p, w in flags}
        self.roles.update(dict.fromkeys(params[len(inputs) : end], "frozen"))

    def run(self) -> list[dict[str, Any]]:
        """Return the rows of main."""
        self._sequence(self.main.body)
        return self.rows

    def _sequence(self, body: Any) -> None:
        for block in body.blocks:
            for binding in block.bindings:
                self._binding(getattr(binding, "var", None), binding.value)

    def _binding(self, var: Any, value: Any) -> None:
        if isinstance(value, relax.If):
            self._choice(value)
        elif isinstance(value, relax.TupleGetItem):
            self.alias[var] = self._root(value.tuple_value)
        elif isinstance(value, relax.Call):
            self._call(var, value)
        elif isinstance(value, relax.Var | GenericConst) or not isinstance(value, relax.Expr):
            self.alias[var] = value

    def _choice(self, value: Any) -> None:
        """Record both branches, each under its condition on a size."""
        cond = self._root(value.cond)
        if type(cond).__name__ not in ("LE", "LT"):
            raise LibraryError(f"main chooses kernels by {cond}; expected a size and its bound")
        strict = type(cond).__name__ == "LT"
        size, bound = size_of(cond.a), int(cond.b) - strict
        for holds, branch in ((True, value.true_branch), (False, value.false_branch)):
            written = set(self.written)
            self.when.append((size, bound, holds))
            self._sequence(branch)
            self.when.pop()
            self.written, after = written, self.written
        self.written = after

    def _call(self, var: Any, value: Any) -> None:
        if isinstance(value.op, relax.GlobalVar):
            self._launch(value.op.name_hint, list(value.args))
        elif isinstance(value.op, relax.ExternFunc):
            self._launch(str(value.op.global_symbol), list(value.args))
        elif value.op.name in _CALLS:
            out = value.ty_args[0]
            outs = list(out.fields) if isinstance(out, relax.TupleType) else [out]
            callee = value.args[0]
            name = getattr(callee, "name_hint", None) or str(callee.global_symbol)
            reads = [(self._root(a), a.ty) for a in value.args[1].fields]
            self._record(name, reads, [(var, ty) for ty in outs])
        elif value.op.name == "relax.reshape":
            self.alias[var] = self._root(value.args[0])

    def _root(self, expr: Any) -> Any:
        while expr in self.alias:
            expr = self.alias[expr]
        return expr

    def _launch(self, name: str, args: list[Any]) -> None:
        """Split the arguments of a planned call: what nobody wrote before is written by it."""
        reads: list[tuple[Any, Any]] = []
        writes: list[tuple[Any, Any]] = []
        for arg in args:
            if not isinstance(getattr(arg, "ty", None), relax.TensorType):
                continue
            root = self._root(arg)
            known = root in self.roles or root in self.written or isinstance(root, GenericConst)
            (reads if known else writes).append((root, arg.ty))
        self.written.update(root for root, _ in writes)
        self._record(name, reads, writes)

    def _record(
        self, name: str, reads: Sequence[tuple[Any, Any]], writes: Sequence[tuple[Any, Any]]
    ) -> None:
        func = self.functions.get(name)
        row = {
            "name": name,
            "launches": 1 if func is None else launches(func),
            "reads": [self._tensor(root, ty) for root, ty in dict(reads).items()],
            "writes": [self._tensor(root, ty) for root, ty in writes],
            "when": [list(c) for c in self.when],
        }
        self.rows.append(row)

    def _tensor(self, root: Any, ty: Any) -> list[Any]:
        frozen = isinstance(root, GenericConst)
        role = "frozen" if frozen else self.roles.get(root, "activation")
        number = self.numbers.setdefault(root, len(self.numbers))
        return [str(ty.dtype), [size_of(e) for e in ty.shape.values], role, number]

"""16-bit graphs: compute in float32 between loads and stores of 16 bits.

Every elementwise operator, normalisation, softmax and reduction works on float32. A value keeps its
32 bits only where operator fusion will put its producer and all its consumers into one kernel, so
every tensor between kernels still has 16 bits. The rule is FuseOps': a value joins its
post-dominator if all that lies between is elementwise, and a kernel has at most one product,
reduction or normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, te, topi

from tvmcap.capture.emitting import HALF

#: Computed in float32, one value a point.
_POINTWISE = frozenset(
    "relax." + name
    for name in (
        "add subtract multiply divide power maximum minimum negative abs exp log sqrt rsqrt"
        " square sin cos tan sinh cosh"
        " asin acos atan asinh acosh atanh tanh sigmoid erf floor ceil round trunc sign clip"
        " where floor_divide"
        " floor_mod mod log_add_exp atan2 astype nn.relu nn.relu6 nn.gelu nn.gelu_tanh nn.silu"
        " nn.leakyrelu nn.softplus"
        " nn.selu nn.prelu greater greater_equal less less_equal equal not_equal isnan isinf"
        " isfinite"
    ).split()
)

#: Computed in float32 in one kernel that loads 16 bits, through their legalization.
_REDUCING = frozenset(
    "relax." + name
    for name in (
        "nn.softmax nn.log_softmax nn.layer_norm nn.group_norm nn.instance_norm nn.rms_norm mean"
        " sum prod variance std"
        " cumsum cumprod nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d nn.adaptive_avg_pool1d"
        " nn.adaptive_avg_pool2d"
        " nn.adaptive_avg_pool3d image.resize2d"
    ).split()
)

_PRODUCTS = frozenset(
    "relax." + name
    for name in (
        "matmul nn.conv1d nn.conv2d nn.conv3d nn.conv1d_transpose nn.conv2d_transpose"
        " nn.conv3d_transpose"
    ).split()
)


def widen(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures 16-bit values are computed in float32 and stored in 16 bits.

    Other modules stay as they are.
    """
    main = mod["main"]
    if not any(_is_half(b.var.ty) for block in main.body.blocks for b in block.bindings):
        return mod
    rewriter = _Widen(mod)
    main = rewriter.visit_expr(main)
    mod = rewriter.builder_.get().clone()  # the builder shares the caller's module
    mod["main"] = main
    return relax.transform.DeadCodeElimination(["main"])(mod)


def _is_half(ty: Any) -> bool:
    return isinstance(ty, relax.TensorType) and str(ty.dtype.dtype) in HALF


def _operator(value: Any) -> str:
    return (
        value.op.name if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else ""
    )


@dataclass
class _Node:
    """One binding in the dataflow graph."""

    kind: str
    users: list[int] = field(default_factory=list)
    returned: bool = False


def _placement(bindings: Sequence[Any]) -> tuple[set[Any], set[Any]]:
    """Find variables consumed in their producer's kernel, and those only an anchor keeps out."""
    index = {b.var: i for i, b in enumerate(bindings)}
    nodes = [_Node(_kind(b.value)) for b in bindings]
    for i, b in enumerate(bindings):
        for var in relax.analysis.free_vars(b.value):
            if var in index:
                nodes[index[var]].users.append(i)
        nodes[i].returned = not isinstance(b.var, relax.DataflowVar)
    dominator = _post_dominators(nodes)
    group = _Groups([n.kind in ("product", "reducing") for n in nodes])
    kept: set[Any] = set()
    apart: set[Any] = set()
    for i, node in enumerate(nodes):
        if node.kind == "other" or dominator[i] is None or _is_rounding(bindings, index, i):
            continue
        between = _between(nodes, i, dominator[i] or 0)
        if all(nodes[j].kind == "pointwise" for j in between):
            (kept if group.join([i, *between]) else apart).add(bindings[i].var)
    return kept, apart


def _is_rounding(bindings: Sequence[Any], index: dict[relax.Var, int], i: int) -> bool:
    """Whether binding ``i`` is a cast that the user wrote to round, not one that ends a product."""
    value = bindings[i].value
    if _operator(value) != "relax.astype":
        return False
    source = index.get(value.args[0])
    return source is None or _kind(bindings[source].value) != "product"


def _kind(value: Any) -> str:
    name = _operator(value)
    if name in _POINTWISE:
        return "pointwise"
    if name in _PRODUCTS:
        return "product"
    return "reducing" if name in _REDUCING else "other"


def _post_dominators(nodes: Sequence[_Node]) -> list[int | None]:
    """Immediate post-dominator of each node; None where values leave by several ways."""
    above: list[int | None] = [None] * len(nodes)
    for i in reversed(range(len(nodes))):
        if nodes[i].returned or not nodes[i].users:
            continue
        common: int | None = nodes[i].users[0]
        for user in nodes[i].users[1:]:
            other: int | None = user
            while common != other and common is not None and other is not None:
                if common < other:
                    common = above[common]
                else:
                    other = above[other]
            common = common if common == other else None
        above[i] = common
    return above


def _between(nodes: Sequence[_Node], start: int, end: int) -> list[int]:
    """List the nodes on the ways from ``start`` (left out) to ``end`` (included)."""
    found: set[int] = set()
    todo = list(nodes[start].users)
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo += [] if i == end else nodes[i].users
    return sorted(found)


class _Groups:
    """Union-find over bindings; a group holds at most one anchor."""

    def __init__(self, anchored: list[bool]) -> None:
        self.parent = list(range(len(anchored)))
        self.anchored = anchored

    def _root(self, i: int) -> int:
        while self.parent[i] != i:
            i = self.parent[i]
        return i

    def join(self, members: Sequence[int]) -> bool:
        """Unite the members' groups, unless that would put two anchors together."""
        roots = {self._root(i) for i in members}
        if sum(self.anchored[r] for r in roots) > 1:
            return False
        first = min(roots)
        self.anchored[first] = any(self.anchored[r] for r in roots)
        for root in roots:
            self.parent[root] = first
        return True


class _WideCalls:
    """A block builder for legalizations whose kernels widen what they load."""

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self.builder = builder

    def call_te(self, function: Any, *args: Any, **kwargs: Any) -> relax.Call:
        """Make a kernel of ``function`` on float32 views of 16-bit tensors."""

        def wide(*tensors: Any, **options: Any) -> Any:
            return function(*(self._load(t) for t in tensors), **options)

        kwargs.setdefault(
            "primfunc_name_hint", getattr(function, "__name__", "kernel").removeprefix("_te_")
        )
        return self.builder.call_te(wide, *args, **kwargs)

    @staticmethod
    def _load(value: Any) -> Any:
        is_half = isinstance(value, te.Tensor) and str(value.dtype) in HALF
        return topi.cast(value, "float32") if is_half else value


@relax.expr_functor.mutator
class _Widen(relax.PyExprMutator):  # type: ignore[misc]
    """Rewrites ``main``; ``wide`` maps a rewritten 16-bit variable to its float32 value."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.kept: set[Any] = set()
        self.apart: set[Any] = set()
        self.wide: dict[relax.Var, relax.Var] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Decide which values stay wide, then rewrite the block."""
        self.kept, self.apart = _placement(block.bindings)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Widen one call, and store its result in 16 bits as well."""
        call, name = binding.value, _operator(binding.value)
        halves = _is_half(binding.var.ty) or any(
            _is_half(getattr(a, "ty", None)) for a in getattr(call, "args", ())
        )
        if not halves or (name not in _POINTWISE and name not in _REDUCING):
            super().visit_var_binding_(binding)
            return
        emit = self.builder_.emit
        if name == "relax.astype":
            wide = self._load(call.args[0])
            dtype = "float32" if _is_half(binding.var.ty) else str(binding.var.ty.dtype.dtype)
            if str(wide.ty.dtype.dtype) != dtype:
                wide = emit(relax.op.astype(wide, dtype))
        elif name in _REDUCING:
            wide = emit(self._legalized(call))
            if _is_half(wide.ty):  # nothing was loaded: a sum of no elements
                wide = emit(relax.op.astype(wide, "float32"))
        elif any(isinstance(a, relax.Var) and a in self.apart for a in call.args):
            args = [self.wide.get(v, v) for v in map(self.visit_expr, call.args)]
            mixed = relax.Call(call.op, args, call.attrs, call.ty_args)
            wide = emit(call.op.get_attr("FLegalize")(_WideCalls(self.builder_), mixed))
        else:
            args = [self._load(a) for a in call.args]
            wide = emit(relax.Call(call.op, args, call.attrs, call.ty_args))
        var = wide
        if _is_half(binding.var.ty):
            dtype = binding.var.ty.dtype.dtype
            is_output = not isinstance(binding.var, relax.DataflowVar)
            var = (self.builder_.emit_output if is_output else emit)(relax.op.astype(wide, dtype))
            if binding.var in self.kept:
                self.wide[var] = wide
        self.set_var_remap(binding.var, var)

    def _legalized(self, call: relax.Call) -> relax.Call:
        """Return a call of one kernel that loads 16 bits and computes in 32 bits.

        Where shapes are unknown, of the operator.
        """
        args = [self.visit_expr(a) for a in call.args]
        same = self.builder_.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))
        legalize = call.op.get_attr("FLegalize")
        kernel = legalize(_WideCalls(self.builder_), same) if legalize else same
        if _operator(kernel) == "relax.call_tir":
            return kernel
        return relax.Call(call.op, [self._load(a) for a in call.args], call.attrs, call.ty_args)

    def _load(self, value: relax.Expr) -> relax.Expr:
        value = self.visit_expr(value)
        if isinstance(value, relax.Var) and value in self.wide:
            return self.wide[value]
        if not _is_half(getattr(value, "ty", None)):
            return value
        if isinstance(value, tvm.ir.GenericConst) and not value.ty.ndim:
            # a number becomes part of the kernel
            return relax.const(value.value.numpy().astype("float32"), "float32")
        return self.builder_.emit(relax.op.astype(value, "float32"))

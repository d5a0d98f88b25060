"""Custom operators of ``torch.library`` with a lowering of their own.

A lowering is a function of Relax values or of TE tensors, or ``"eager"``: a call of PyTorch's
kernel, which ties the library to a process that has that operator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from tvm import relax, te, tirx

from tvmcap.base.errors import CaptureError, ConfigError
from tvmcap.capture.emitting import emit
from tvmcap.capture.hashing import Walk
from tvmcap.capture.structure import dtype_name

EAGER = "eager"
CALL = "tvmcap.torch.call"
"""The global function that runs an operator of PyTorch: ``(call as JSON, *inputs, *outputs)``."""
CALLS = "tvmcap.vendor"
"""Attribute of a PrimFunc that only calls a global function: its name (``graph.vendor``)."""
OPERATOR = "tvmcap.operator"
"""Attribute of such a PrimFunc: the operator that it runs."""
_OPAQUE = 8

Lowering = Callable[..., Any]


@dataclass(frozen=True)
class CustomOp:
    """A registered operator: its name with namespace and overload, and its lowering."""

    name: str
    lower: Lowering | str

    def identity(self) -> str:
        """Return what tells this lowering from another one."""
        walk = Walk()
        walk.visit(self.lower)
        return f"{self.name} {walk.hash.hexdigest()}"


_REGISTERED: dict[Any, CustomOp] = {}


def register_op(
    name: str | Any, *, meta: Callable[..., Any] | None = None, lower: Lowering | str
) -> None:
    """Give an operator of ``torch.library`` a lowering, for ``build`` and ``torch.compile``.

    Parameters
    ----------
    name: ``"namespace::name"`` (``"namespace::name.overload"``), or what
        ``torch.library.custom_op`` returned. The operator must exist and be pure.
    meta: what ``torch.library.register_fake`` takes: shapes and dtypes of the results for given
        inputs. None where the operator has one.
    lower: a function of the operator's arguments, in their order with defaults filled in, that
        returns the result (or a tuple of them): of Relax values, or, where it takes none of them,
        of TE tensors, as TOPI's functions are. Numbers and lists come as Python's. ``"eager"``
        instead calls PyTorch's kernel from the library, which then needs this operator registered
        wherever it runs.

    Registering again replaces the lowering. The gradient is the operator's own
    (``torch.library.register_autograd``).

    Raises
    ------
    ConfigError: for an operator that does not exist, changes its arguments, returns anything but
        tensors, or has no meta function.
    """
    operator = _operator(name)
    schema = operator._schema
    if schema.is_mutable:
        raise ConfigError(
            f"{operator.name()} changes an argument in place; a lowering computes new tensors. "
            "Register an operator that returns them"
        )
    if not schema.returns or any(str(r.type) != "Tensor" for r in schema.returns):
        raise ConfigError(f"{operator.name()}: expected results that are tensors, got {schema}")
    if not (callable(lower) or lower == EAGER):
        raise ConfigError(
            f"lower: expected a function of Relax values or TE tensors, or 'eager', got {lower!r}"
        )
    if meta is not None:
        torch.library.register_fake(schema.name, meta, allow_override=True)
    elif not _has_meta(operator):
        raise ConfigError(
            f"{operator.name()} has no meta function, so shapes of its results are unknown: pass "
            "meta=, a function that returns torch.empty(...) of the right shape and dtype for "
            "given inputs"
        )
    _REGISTERED[operator] = CustomOp(operator.name(), lower)


def find(target: Any) -> CustomOp | None:
    """Return the registered operator of a node's target, or None."""
    return _REGISTERED.get(target) if isinstance(target, torch._ops.OpOverload) else None


def registered() -> tuple[CustomOp, ...]:
    """List the registered operators."""
    return tuple(_REGISTERED.values())


def identity(targets: Sequence[Any] | None = None) -> list[str]:
    """Return what tells the lowerings of ``targets`` (of all where None) from others."""
    ops = _REGISTERED.values() if targets is None else filter(None, map(find, targets))
    return sorted({op.identity() for op in ops})


def convert(node: fx.Node, importer: Any, op: CustomOp) -> Any:
    """Translate a node with its registered lowering; raises CaptureError where that fails."""
    assert isinstance(node.target, torch._ops.OpOverload)
    values = [_given(node, i, a) for i, a in enumerate(node.target._schema.arguments)]
    if op.lower == EAGER:
        return _call_eager(node, importer, op, values)
    assert callable(op.lower)
    args = [importer._retrieve_args(value) for value in values]
    try:
        result = op.lower(*args)
    except Exception as first:
        try:
            result = importer.block_builder.call_te(op.lower, *args)
        except Exception as second:
            raise CaptureError(
                f"the lowering of {op.name} failed, with Relax values: {_said(first)}; with TE "
                f"tensors: {_said(second)}"
            ) from first
    return _emitted(importer, result, op)


def _emitted(importer: Any, result: Any, op: CustomOp) -> Any:
    if isinstance(result, tuple | list):
        return [_emitted(importer, part, op) for part in result]
    if not isinstance(result, relax.Expr):
        raise CaptureError(
            f"the lowering of {op.name} returned a {type(result).__name__}; expected a Relax "
            "expression, or a TE tensor of a function of TE tensors"
        )
    return result if isinstance(result, relax.Var) else emit(importer, result)


def _call_eager(node: fx.Node, importer: Any, op: CustomOp, values: Sequence[Any]) -> Any:
    """Emit a kernel that calls PyTorch's; the arguments that are no tensors go along as JSON."""
    tensors: list[fx.Node] = []
    spec = json.dumps({"op": op.name, "args": [_as_json(v, tensors, op) for v in values]})
    results = node.meta["val"]
    single = isinstance(results, torch.Tensor)
    outputs = [results] if single else list(results)
    shapes = [[importer.symbols.expr(size) for size in t.shape] for t in outputs]
    dtypes = [dtype_name(t.dtype) for t in outputs]
    known = [dtype_name(n.meta["val"].dtype) for n in tensors]

    def eager(*inputs: te.Tensor) -> Any:
        return te.extern(
            shapes,
            list(inputs),
            lambda ins, outs: tirx.call_packed(
                CALL, spec, ",".join([*known, *dtypes]), *ins, *outs
            ),
            name="torch_call",
            dtype=dtypes,
        )

    name = op.name.replace("::", "_").replace(".", "_")
    attrs = {"op_pattern": _OPAQUE, "tirx.is_scheduled": True, CALLS: CALL, OPERATOR: op.name}
    call = importer.block_builder.call_te(
        eager,
        *(importer.env[n] for n in tensors),
        primfunc_name_hint=f"torch_{name}",
        primfunc_attrs=attrs,
    )
    result = emit(importer, call)
    if single:
        return result
    return [emit(importer, relax.TupleGetItem(result, i)) for i in range(len(outputs))]


def _as_json(value: Any, tensors: list[fx.Node], op: CustomOp) -> Any:
    if isinstance(value, fx.Node):
        if not isinstance(value.meta.get("val"), torch.Tensor):
            raise CaptureError(
                f"{op.name} takes a size that varies; with lower='eager' its numbers are fixed at "
                "build. Make that dimension static, or give a lowering"
            )
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return [_as_json(v, tensors, op) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CaptureError(
        f"{op.name} takes a {type(value).__name__}, which a library cannot hold with lower='eager'"
    )


def _given(node: fx.Node, position: int, argument: Any) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(argument.name, argument.default_value)


def _operator(name: Any) -> Any:
    if isinstance(name, torch._ops.OpOverload):
        return name
    if isinstance(name, torch._ops.OpOverloadPacket):
        return name.default
    text = getattr(name, "_qualname", name)
    if not isinstance(text, str) or "::" not in text:
        raise ConfigError(f"name: expected 'namespace::name', got {name!r}")
    space, _, rest = text.partition("::")
    bare, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), bare), overload or "default")
    except AttributeError as e:
        raise ConfigError(
            f"there is no operator {text!r}: define it first, with torch.library.custom_op"
        ) from e


def _has_meta(operator: Any) -> bool:
    name = operator._schema.name
    defined = torch._library.custom_ops.OPDEFS.get(name)
    if defined is not None and defined._abstract_fn is None:
        return False  # torch.library.custom_op registers one that only raises
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    entry = torch._library.simple_registry.singleton.find(name)
    return entry.fake_impl.kernel is not None or any(has(operator.name(), key) for key in keys)


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]

"""Differentiation: one PyTorch function in, a forward and a backward graph out.

PyTorch's AOTAutograd traces both at once (the joint graph): functional, in ATen operators that the
back end lowers, with every input flat. Its min-cut partitioner then decides what the forward graph
saves for the backward one and what that one computes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import GetItemSource, LocalSource
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from tvmcap.base.errors import CaptureError, MutationError, TvmcapError
from tvmcap.base.signature import Tree
from tvmcap.capture import arguments, guards, ir, memory, operators, shapes, tracing
from tvmcap.capture.decompositions import for_training
from tvmcap.capture.flat import Flat
from tvmcap.capture.random import Draw, add_input, lift_draws


@dataclass(frozen=True)
class Joint:
    """Forward and backward as one graph.

    Attributes
    ----------
    graph: inputs are the tensors ``names`` speaks of, then the gradients of ``tangents``; outputs
        are the function's (``outputs`` of them), the new values of ``updates``, then one gradient
        or None for each input.
    names: of the inputs: parameters and buffers, arguments, lifted constants, drawn tensors.
    state: how many of them are parameters and buffers; they come first.
    draws: the drawn tensors, the last inputs.
    constants: the lifted constants, by name of their placeholder.
    outputs: how many tensors the function returns; ``out_tree`` is the structure around them.
    updates: the buffers that a call changes.
    tangents: the outputs whose gradient the backward graph takes.
    grads: the inputs that get a gradient.
    """

    graph: fx.GraphModule
    names: tuple[str, ...]
    state: int
    draws: tuple[Draw, ...]
    constants: Mapping[str, torch.Tensor]
    outputs: int
    out_tree: Tree
    updates: tuple[str, ...]
    tangents: tuple[int, ...]
    grads: tuple[int, ...]


def trace_joint(
    call: arguments.BoundCall,
    leaves: shapes.Leaves,
    free: shapes.Free,
    state: Mapping[str, torch.Tensor],
) -> Joint:
    """Trace a function and its gradient at sizes that avoid coincidences, else at the example's.

    ``state`` holds the parameters and buffers of the module that ``call`` runs, if it is one.
    Gradients are those of the parameters and arguments that require one; where none does, of every
    argument that can. Raises CaptureError (DataDependentError, MutationError) for code that cannot
    be traced and where nothing can be differentiated.
    """
    wanted = _wanted(leaves, state)
    chosen, given = shapes.example_sizes(free, leaves), shapes.given_sizes(free, leaves)
    try:
        return _trace_at(call, leaves, free, state, wanted, chosen)
    except TvmcapError:
        if chosen == given:
            raise
        return _trace_at(call, leaves, free, state, wanted, given)


def _wanted(leaves: shapes.Leaves, state: Mapping[str, torch.Tensor]) -> list[bool]:
    tensors = [*state.values(), *(tensor for _, tensor in leaves)]
    wanted = [tensor.requires_grad for tensor in tensors]
    if not any(wanted):
        first = len(state)
        wanted = [i >= first and t.is_floating_point() for i, t in enumerate(tensors)]
    if not any(wanted):
        raise CaptureError(
            "backward=True, but there is nothing to differentiate: no parameter requires grad and "
            "no argument is a floating-point tensor. Pass such a tensor as an argument, or build "
            "without backward"
        )
    return wanted


def _trace_at(
    call: arguments.BoundCall,
    leaves: shapes.Leaves,
    free: shapes.Free,
    state: Mapping[str, torch.Tensor],
    wanted: Sequence[bool],
    sizes: Mapping[str, int],
) -> Joint:
    flat = Flat(call, state)
    names = (*state, *(name for name, _ in leaves))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    try:
        with _tracing():
            examples = (*state.values(), *shapes.resize(free, leaves, sizes))
            inputs = _fakes(mode, free, len(state), examples, wanted)
            table = for_training()
            graph = aot_export_joint_simple(flat, inputs, trace_joint=True, decompositions=table)
            memory.check(Flat(call, state), examples, flat.found.reads)
    except TvmcapError:
        raise
    except Exception as e:
        raise _translate(e, names, sizes) from e
    guards.check(mode.shape_env, free, inputs[len(state) :])
    return _joint(graph, mode, flat, names, state, wanted)


def _joint(
    graph: fx.GraphModule,
    mode: FakeTensorMode,
    flat: Flat,
    names: tuple[str, ...],
    state: Mapping[str, torch.Tensor],
    wanted: Sequence[bool],
) -> Joint:
    """Lift constants and random numbers into inputs, and drop buffers that nothing changes."""
    count = len(flat.found.requires_grad)
    constants = _lift_constants(graph)
    draws = lift_draws(graph, mode)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    results = list(output.args[0])
    buffers = [name for name in flat.buffers]
    first = [n for n in graph.graph.nodes if n.op == "placeholder"][: len(state)]
    home = dict(zip(state, first, strict=True))
    ends = results[count : count + len(buffers)]
    changed = [
        (name, node)
        for name, node in zip(buffers, ends, strict=True)
        if _source(node) is not home[name]
    ]
    more = [None] * (len(constants) + len(draws))
    kept = [*results[:count], *(n for _, n in changed), *results[count + len(buffers) :], *more]
    output.args = (tuple(kept),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    operators.check_data_dependent(graph.graph, _symbols_of(graph))
    operators.check_supported(graph.graph, ir.known_operators())
    tangents = tuple(i for i, needs in enumerate(flat.found.requires_grad) if needs)
    if not tangents:
        raise CaptureError(
            "backward=True, but no output depends on anything that requires grad; build without "
            "backward"
        )
    taken = [n for n in graph.graph.nodes if n.op == "placeholder" and "tangents" in n.name]
    if len(taken) != len(tangents):
        raise CaptureError(
            f"PyTorch {torch.__version__} traced gradients of {len(taken)} outputs where "
            f"{len(tangents)} require grad; return each tensor once, detached where it has none"
        )
    numbers = (*(f"constant{i}" for i in range(len(constants))), *(d.name for d in draws))
    return Joint(
        graph=graph,
        names=(*names, *numbers),
        state=len(state),
        draws=draws,
        constants=constants,
        outputs=count,
        out_tree=flat.found.out_tree,
        updates=tuple(name for name, _ in changed),
        tangents=tangents,
        grads=tuple(i for i, needs in enumerate(wanted) if needs),
    )


def state_of(fn: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name, tied ones once; {} of a function."""
    if not isinstance(fn, torch.nn.Module):
        return {}
    return {**dict(fn.named_parameters()), **dict(fn.named_buffers())}


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Trace with gradients, attention as written: its fused kernels have no lowering."""
    attention = sdpa_kernel(SDPBackend.MATH)
    with tracing.undisturbed(grad=True), tracing.quiet(), attention, tracing.any_convolution():
        yield


def _fakes(
    mode: FakeTensorMode,
    free: shapes.Free,
    state: int,
    examples: Sequence[torch.Tensor],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """Stand-ins without memory, with a symbol for each dynamic dimension."""
    out: list[torch.Tensor] = []
    sizes: dict[str, Any] = {}
    for i, (tensor, needs) in enumerate(zip(examples, wanted, strict=True)):
        names = [free.where.get((i - state, axis)) for axis in range(tensor.ndim)]
        dynamic = [DimDynamic.DYNAMIC if name else DimDynamic.STATIC for name in names]
        fake = mode.from_tensor(
            tensor.detach(),
            source=GetItemSource(LocalSource("leaves"), i),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
        )
        for name, size in zip(names, fake.shape, strict=True):
            if name is not None:
                torch._check(sizes.setdefault(name, size) == size)  # equal names are equal sizes
        out.append(fake.requires_grad_(needs))
    return tuple(out)


def _translate(error: Exception, names: Sequence[str], sizes: Mapping[str, int]) -> CaptureError:
    if "requires gradients, and received a mutation" in str(error):
        return MutationError(
            "a leaf Variable that requires grad is changed in place, which PyTorch forbids too. "
            "Compute a new tensor instead (x = x * 2, not x.mul_(2))"
        )
    if "input mutations" in str(error):
        return MutationError(
            "an argument is changed in place; a library changes nothing but the buffers of a "
            "module. Return the new value as an output instead (x = x + 1, not x += 1)"
        )
    return tracing.translate(error, names, sizes)


def _lift_constants(graph: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Turn tensors that the code refers to into inputs of the graph."""
    found: dict[str, torch.Tensor] = {}
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in [n for n in graph.graph.nodes if n.op == "get_attr"]:
        value = getattr(graph, str(node.target))
        if value.requires_grad:
            raise CaptureError(
                "the code uses a tensor that requires grad and is no argument; its gradient would "
                "be lost. Pass it as an argument, or build the nn.Module that holds it"
            )
        same = (value.data_ptr(), value.dtype, value.shape, value.stride())
        new = known.get(same)
        if new is None:
            new = known[same] = add_input(graph, node.meta.get("val", value))
            found[new.name] = value.detach()
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    return found


def _source(node: Any) -> Any:
    """Follow copies back to what is copied."""
    copies = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
    while isinstance(node, fx.Node) and node.target in copies:
        node = node.args[0]
    return node


def _symbols_of(graph: fx.GraphModule) -> set[str]:
    """Name the symbols of the graph's inputs."""
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    sizes = [s for v in values if isinstance(v, torch.Tensor) for s in v.shape]
    exprs = [s.node.expr for s in sizes if isinstance(s, torch.SymInt)]
    return {str(symbol) for expr in exprs for symbol in expr.free_symbols}

"""A library with a forward and a backward entry, as a callable that takes part in autograd."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

from tvmcap.base.errors import InputError, LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import evaluate, unflatten
from tvmcap.base.training import DrawSpec, Entry, Training
from tvmcap.runtime.binding import flatten_call
from tvmcap.runtime.executor import Executor
from tvmcap.runtime.graph_call import GraphCall, dims_of
from tvmcap.runtime.trace import Trace, Watch


def _of_entry(manifest: Manifest, name: str, entry: Entry) -> Manifest:
    return replace(manifest, entry=name, signature=entry.signature, arena=entry.arena)


class TrainingExecutor:
    """A loaded library with two entries: torch tensors in and out, with gradients.

    Attributes
    ----------
    forward, backward: the entries.
    module: the nn.Module whose parameters and buffers a call reads; None where the caller passes
        them as the dict ``parameters``.
    """

    def __init__(
        self, path: str | os.PathLike[str], manifest: Manifest, *, device: int = 0
    ) -> None:
        assert manifest.training is not None
        self.manifest, self.signature = manifest, manifest.signature
        self.training: Training = manifest.training
        kind = manifest.target["kind"]
        self.device = torch.device("cuda", device) if kind == "cuda" else torch.device("cpu")
        self.forward, self.backward = (
            GraphCall(
                # on a GPU autograd calls the backward entry from a thread of its own
                Executor(
                    path,
                    device=device,
                    manifest=_of_entry(manifest, name, entry),
                    ready=name == "forward",
                ),
                entry,
                self.device,
            )
            for name, entry in (
                ("forward", self.training.forward),
                ("backward", self.training.backward),
            )
        )
        self._own: list[tuple[dict[str, Any], str]] = []
        self._count = len(self.signature.inputs) - len(self.training.state)
        self._short = self.signature
        grads = set(self.training.grads)
        names = (*self.training.state, *(s.name for s in self.signature.inputs[: self._count]))
        self._constant = [(i, name) for i, name in enumerate(names) if i not in grads]
        self._kept = len(self.signature.outputs) + len(self.training.updates)

    def use_module(self, module: torch.nn.Module) -> None:
        """Read parameters and buffers from ``module`` from now on; they are no argument then."""
        for name in self.training.state:
            owner, _, last = name.rpartition(".")
            part = module.get_submodule(owner)
            self._own.append(
                (part._parameters if last in part._parameters else part._buffers, last)
            )
        if self._own:
            items = self.signature.in_tree["items"][:-1]
            self._short = replace(
                self.signature,
                inputs=self.signature.inputs[: self._count],
                in_tree={**self.signature.in_tree, "items": items},
                arg_names=self.signature.arg_names[:-1],
            )

    @property
    def copies(self) -> int:
        """Inputs copied so far because they were not contiguous or not aligned."""
        return self.forward.executor.copies + self.backward.executor.copies

    @property
    def arena_bytes(self) -> int:
        """Bytes that both entries hold for intermediates, in all threads."""
        return self.forward.executor.arena_bytes + self.backward.executor.arena_bytes

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function; see ``call``."""
        return self.call(args, out, kwargs)

    def call(self, args: Sequence[Any], out: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the function; gradients flow to what required one when it was built.

        Raises InputError for arguments that do not fit the signature, and for one that requires
        grad though the library has no gradient for it; LibraryError where calls are refused.
        """
        if out is not None:
            raise InputError("out: a library with gradients returns new tensors; leave out= away")
        self.forward.executor.check()
        inputs = self.inputs(args, kwargs)
        results = self.apply(inputs)
        state = dict(zip(self.training.state, inputs, strict=False))
        count = len(self.signature.outputs)
        with torch.no_grad():
            for name, value in zip(self.training.updates, results[count:], strict=True):
                state[name].copy_(value)
        return unflatten(self.signature.out_tree, list(results[:count]))

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """List the tensors of a call: parameters and buffers, then the arguments'."""
        leaves = flatten_call(self._short, args, kwargs)
        state = self.state() or leaves[self._count :]
        return [*state, *leaves[: self._count]]

    def apply(self, inputs: list[Any]) -> Sequence[Any]:
        """Return outputs and new values of buffers for the tensors of a call."""
        for value in inputs:
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"a library with gradients takes torch tensors, got {type(value).__name__}"
                )
        if torch.is_grad_enabled():
            for i, name in self._constant:
                if inputs[i].requires_grad:
                    raise InputError(
                        f"argument {name!r} requires grad, but the library has no gradient for "
                        "it: build with an example that requires grad, or pass it detached"
                    )
        drawn = self._draw(inputs)
        found: Sequence[Any] = _Run.apply(self, *inputs, *drawn)
        return found

    def _draw(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.training.draws:
            return []
        dims = self._dims(inputs)
        return [draw(spec, dims, self.device) for spec in self.training.draws]

    def _dims(self, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
        known = self.training.forward.signature.inputs
        return dims_of(known[: len(inputs)], inputs)

    def split(self, results: list[Any]) -> tuple[list[Any], list[Any]]:
        """Part the forward graph's results into its outputs and what the backward graph takes."""
        kept, saved = results[: self._kept], results[self._kept :]
        sizes = [v for v in saved if not isinstance(v, torch.Tensor)]
        return kept, [*sizes, *(v for v in saved if isinstance(v, torch.Tensor))]

    def state(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the bound module; [] without one."""
        return [owner[name] for owner, name in self._own]

    def traces(self, inputs: Sequence[torch.Tensor]) -> tuple[Trace, Trace]:
        """Run both entries once and return the kernels each launched and its intermediates.

        ``inputs`` are the tensors of a call: parameters and buffers, then the arguments'.
        """
        values = self._drawn(inputs)
        first = self.forward.executor.trace(*self.forward.tensors(values))
        values = self._after(self.forward(*values))
        return first, self.backward.executor.trace(*self.backward.tensors(values))

    def _drawn(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the forward graph takes for the tensors of a call."""
        inputs = [t.detach() for t in inputs]
        return [*inputs, *self._draw(inputs)]

    def _after(self, results: list[Any]) -> list[Any]:
        """Return what the backward graph takes after the forward one, for gradients of ones."""
        outputs, saved = self.split(results)
        return [*saved, *(torch.ones_like(outputs[i]) for i in self.training.tangents)]

    def step(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run both entries on the calling thread; returns the gradients of a sum of the outputs.

        They are those of the inputs ``training.grads``. Autograd has no part in it, and buffers
        stay as they are.
        """
        inputs = self.inputs(args, kwargs)
        found = self.backward(*self._after(self.forward(*self._drawn(inputs))))
        return [found[i] for i in self.training.grads]

    def sizes(self, *args: Any, **kwargs: Any) -> Mapping[str, int]:
        """Return the symbolic sizes of a call, without running it."""
        return self._dims(self.inputs(args, kwargs))

    @contextlib.contextmanager
    def watched(self, before: Watch, after: Watch) -> Iterator[None]:
        """Call both with the name of each kernel that this thread launches, of both entries."""
        with (
            self.forward.executor.watched(before, after),
            self.backward.executor.watched(before, after),
        ):
            yield

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run both entries once; the kernels of both, and the larger peak of intermediates."""
        first, second = self.traces(self.inputs(args, kwargs))
        peak = max(first.intermediate_bytes, second.intermediate_bytes)
        return Trace((*first.kernels, *second.kernels), peak)

    @property
    def counts(self) -> Any:
        """What the forward entry's calls of the calling thread took beside kernels."""
        return self.forward.executor.counts

    def close(self) -> None:
        """Free memory and code; a call after that raises LibraryError."""
        self.forward.executor.close()
        self.backward.executor.close()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LibraryError(
            "a library with gradients is called with its arguments: it keeps no bound tensors and "
            "records no CUDA graphs; torch.cuda.graph records a whole training step"
        )

    bind = run = output = use_graphs = _refuse

    def kernel_launches(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Run both entries once and return the names of the kernels launched, in order."""
        return self.trace(*args, **kwargs).kernels


class _Run(torch.autograd.Function):  # type: ignore[misc]
    """The forward entry, with the backward entry as its gradient."""

    @staticmethod
    def forward(ctx: Any, program: TrainingExecutor, *values: torch.Tensor) -> tuple[Any, ...]:
        """Run the forward graph; what it saves waits for the backward one."""
        outputs, saved = program.split(program.forward(*(v.detach() for v in values)))
        training = program.training
        sizes = len([v for v in saved if not isinstance(v, torch.Tensor)])
        changed = {training.state.index(name) for name in training.updates}
        # autograd watches what is saved: the caller's own tensors and results, not views of them
        ports = program.training.forward.outputs[program._kept :]
        ports = tuple(port for port in ports if port.kind != "size")
        tensors = [
            (values[p.index].clone() if p.index in changed else values[p.index])
            if p.kind == "input"
            else tensor
            for p, tensor in zip(ports, saved[sizes:], strict=True)
        ]
        ctx.program, ctx.sizes = program, saved[:sizes]
        ctx.save_for_backward(*tensors)
        differentiable = {id(outputs[i]) for i in training.tangents}
        ctx.mark_non_differentiable(*(o for o in outputs if id(o) not in differentiable))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Run the backward graph on what was saved and the gradients of the outputs."""
        program: TrainingExecutor = ctx.program
        tangents = [gradients[i] for i in program.training.tangents]
        found = program.backward(*ctx.sizes, *(t.detach() for t in ctx.saved_tensors), *tangents)
        return (None, *found)


def draw(spec: DrawSpec, dims: Mapping[str, int], device: torch.device) -> torch.Tensor:
    """Draw a random tensor as the eager operator would, with PyTorch's generator."""
    shape = [evaluate(size, dims) for size in spec.shape]
    dtype = getattr(torch, spec.dtype)
    inner = [shape[axis] for axis in spec.order]
    back = [spec.order.index(axis) for axis in range(len(shape))]
    like = torch.empty(inner, dtype=dtype, device=device).permute(back)
    if spec.operator == "dropout":
        mask: torch.Tensor = torch.dropout(torch.ones_like(like), spec.numbers[0], True) != 0
        return mask
    operator: Any = torch.ops.aten
    for part in spec.operator.split("."):
        operator = getattr(operator, part)
    if spec.operator in ("rand.default", "randn.default"):
        made: torch.Tensor = operator(shape, dtype=dtype, device=device)
        return made
    drawn: torch.Tensor = operator(like, *spec.numbers)
    return drawn

"""``verify`` of a library with gradients: outputs and gradients against PyTorch in float64.

The budget is that of ``verify.check``: twice eager's own largest error plus one ulp. Random
operators give eager, the reference and the library the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tvmcap.base.errors import VerifyError
from tvmcap.base.numerics import Comparison, compare, to_numpy
from tvmcap.base.signature import flatten, unflatten
from tvmcap.verify.again import NoReference, check_redrawn
from tvmcap.verify.inputs import InputSet, draw, plan_inputs
from tvmcap.verify.result import VerifyReport
from tvmcap.verify.rounding import rounded

_SETS = 3
"""Sets of inputs that are checked: the example's sizes, large magnitudes, other sizes."""


def verify_gradients(
    compiled: Any,
    fn: Callable[..., Any],
    example: Sequence[torch.Tensor] | None,
    keywords: tuple[str, ...],
    *,
    sizes: Sequence[Mapping[str, int]] | None = None,
    seed: int = 0,
) -> VerifyReport:
    """Compare the outputs and gradients of a library with those of the PyTorch code ``fn``.

    Gradients are taken of random gradients of the outputs, dense and of their dtype.
    """
    subject = _Subject.of(compiled, fn, keywords)
    signature = replace(compiled.signature, inputs=subject.specs)
    sets = plan_inputs(signature, example, sizes=sizes, seed=seed)
    # zeros tell little: kinks such as relu's at 0 have no one gradient
    chosen = [s for s in sets if s.kind in ("normal", "large")][: None if sizes else _SETS]
    return VerifyReport(
        tuple(
            check_redrawn(lambda s, n: _compare_once(subject, signature, s, example, n), one)
            for one in chosen
        ),
        "float64",
    )


@dataclass(frozen=True)
class _Subject:
    """A library, the PyTorch code with parameters of its own, and how to call that."""

    executor: Any
    fn: Callable[..., Any]
    state: dict[str, torch.Tensor]
    specs: tuple[Any, ...]
    keywords: tuple[str, ...]
    device: torch.device

    @staticmethod
    def of(compiled: Any, fn: Callable[..., Any], keywords: tuple[str, ...]) -> _Subject:
        executor = compiled.executor
        training = compiled.manifest.training
        if isinstance(fn, torch.nn.Module):
            try:
                fn = copy.deepcopy(fn).to(executor.device)
            except Exception as e:
                raise VerifyError(
                    f"the module cannot be copied for a reference ({e}); build with verify=False"
                ) from e
        state = {}
        if training.state:
            module: Any = fn
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            state = {name: state[name].detach().clone() for name in training.state}
        specs = compiled.signature.inputs[: len(compiled.signature.inputs) - len(training.state)]
        return _Subject(executor, fn, state, specs, keywords, executor.device)

    def eager(
        self, leaves: list[torch.Tensor], tangents: list[torch.Tensor], dtype: torch.dtype | None
    ) -> list[Any]:
        """Run the PyTorch code and its gradient, in ``dtype`` where one is given."""

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            change = dtype is not None and tensor.is_floating_point()
            return tensor.detach().to(dtype) if change else tensor.detach().clone()

        inputs = [*map(wide, self.state.values()), *map(wide, leaves)]
        training = self.executor.training
        for i in training.grads:
            inputs[i].requires_grad_()
        state = dict(zip(training.state, inputs, strict=False))
        signature = self.executor.signature
        items = signature.in_tree["items"][: -1 if state else None]
        values = unflatten({"kind": "tuple", "items": items}, inputs[len(state) :])
        count = len(values) - len(self.keywords)
        args, kwargs = values[:count], dict(zip(self.keywords, values[count:], strict=True))
        with sdpa_kernel(SDPBackend.MATH):
            return self._differentiate(inputs, state, args, kwargs, tangents, wide)

    def _differentiate(
        self,
        inputs: list[torch.Tensor],
        state: dict[str, torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tangents: Sequence[torch.Tensor],
        wide: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[Any]:
        training, signature = self.executor.training, self.executor.signature

        def differentiate(result: Any) -> list[Any]:
            outputs = flatten(signature.out_tree, result)
            gradients = torch.autograd.grad(
                [outputs[i] for i in training.tangents],
                [inputs[i] for i in training.grads],
                [wide(t) for t in tangents],
                allow_unused=True,
            )
            pairs = zip(gradients, training.grads, strict=True)
            dense = [torch.zeros_like(inputs[i]) if g is None else g for g, i in pairs]
            return [to_numpy(t) for t in (*outputs, *dense)]

        if not state:
            return differentiate(self.fn(*args, **kwargs))
        # checkpoints compute again in the backward pass, which must see the same parameters
        module = _Then(self.fn, differentiate)
        state = {f"fn.{name}": tensor for name, tensor in state.items()}
        found: list[Any] = torch.func.functional_call(module, state, tuple(args), dict(kwargs))
        return found

    def ours(self, leaves: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[Any]:
        """Run the library and its gradient; the buffers of the module stay as they are."""
        inputs = [t.detach().clone() for t in (*self.state.values(), *leaves)]
        training = self.executor.training
        for i in training.grads:
            inputs[i].requires_grad_()
        outputs = self.executor.apply(inputs)
        outputs = outputs[: len(self.executor.signature.outputs)]
        gradients = torch.autograd.grad(
            [outputs[i] for i in training.tangents],
            [inputs[i] for i in training.grads],
            tangents,
            allow_unused=True,
        )
        found = zip(gradients, training.grads, strict=True)
        dense = [torch.zeros_like(inputs[i]) if g is None else g for g, i in found]
        return [to_numpy(t) for t in (*outputs, *dense)]

    def tangents(self, leaves: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Draw a gradient for each output that takes one."""
        with torch.no_grad():
            outputs = self.executor.apply([*self.state.values(), *leaves])
        generator = torch.Generator().manual_seed(seed)
        shaped = [outputs[i] for i in self.executor.training.tangents]
        return [torch.randn(t.shape, generator=generator).to(t) for t in shaped]


class _Then(torch.nn.Module):  # type: ignore[misc]
    """Runs a module, and then a function on its result while its parameters are as they are."""

    def __init__(self, fn: Any, then: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self.fn, self.then = fn, then

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.then(self.fn(*args, **kwargs))


def _compare_once(
    subject: _Subject,
    signature: Any,
    chosen: InputSet,
    example: Sequence[torch.Tensor] | None,
    runs: int,
) -> tuple[Comparison, ...]:
    leaves = [t.to(subject.device) for t in draw(signature, chosen, example)]
    with _seeded(chosen.seed):
        tangents = subject.tangents(leaves, chosen.seed)
    drawn: list[Any] = []
    try:
        what = "PyTorch refuses these inputs"
        with _seeded(chosen.seed), _Record(drawn):
            eager = subject.eager(leaves, tangents, None)

        def again() -> list[Any]:
            with _seeded(chosen.seed):
                return subject.eager(leaves, tangents, None)

        others = rounded(again, runs)
        what = "PyTorch cannot compute a float64 reference; build with verify=False"
        with _Replay(drawn):
            wide = subject.eager(leaves, tangents, torch.float64)
    except Exception as e:
        raise NoReference(f"{what}: {(str(e).splitlines() or [repr(e)])[0]}") from e
    with _seeded(chosen.seed):
        ours = subject.ours(leaves, tangents)
    return tuple(
        compare(o, w, e, name=name, dtype=dtype, others=[other[i] for other in others])
        for i, ((name, dtype), o, w, e) in enumerate(
            zip(_labels(subject), ours, wide, eager, strict=True)
        )
    )


def _labels(subject: _Subject) -> list[tuple[str, str]]:
    signature, training = subject.executor.signature, subject.executor.training
    dtypes = [*(str(t.dtype).removeprefix("torch.") for t in subject.state.values())]
    dtypes += [spec.dtype for spec in subject.specs]
    names = [*training.state, *(spec.name for spec in subject.specs)]
    outputs = [(spec.name, spec.dtype) for spec in signature.outputs]
    return [*outputs, *((f"gradient of {names[i]}", dtypes[i]) for i in training.grads)]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's generators, and leave the caller's as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _is_random(func: Any) -> bool:
    """Whether an operator draws one tensor; attention is tagged random too, and may draw none."""
    dropout = func is torch.ops.aten.native_dropout.default
    single = len(func._schema.returns) == 1
    return torch.Tag.nondeterministic_seeded in func.tags and (dropout or single)


class _Record(TorchDispatchMode):  # type: ignore[misc]
    """Keeps what random operators give, in order."""

    def __init__(self, drawn: list[Any]) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func):
            kept = result[1] if isinstance(result, tuple | list) else result
            self.drawn.append(kept.detach().clone())
        return result


class _Replay(TorchDispatchMode):  # type: ignore[misc]
    """Gives what random operators gave before, in the dtype that is asked for now."""

    def __init__(self, drawn: list[Any]) -> None:
        super().__init__()
        self.rest = iter(drawn)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        kept = next(self.rest)
        if func is torch.ops.aten.native_dropout.default:
            x, p = args[:2]
            return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept
        if func._schema.is_mutable:
            return args[0].copy_(kept)
        return tree_map(lambda t: t.double() if t.is_floating_point() else t, kept)

"""Running torch.export on a function: with which sizes, undisturbed, and what its errors mean."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tvmcap.base.errors import CaptureError, DataDependentError, TvmcapError
from tvmcap.base.signature import Tree
from tvmcap.capture import arguments, memory, shapes, source
from tvmcap.capture.structure import describe, replace_tensors


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """The user's function on a flat list of tensors, as torch.export wants it."""

    def __init__(self, call: arguments.BoundCall) -> None:
        super().__init__()
        self.call_ = call
        # torch.export restores the attributes of a module, but not what they hold.
        self.found = SimpleNamespace(out_tree=None, reads=[])
        if isinstance(call.fn, torch.nn.Module):
            self.fn = call.fn

    def forward(self, *leaves: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(leaves)
        values = [replace_tensors(value, lambda: next(rest)) for value in self.call_.values]
        outputs: list[tuple[str, torch.Tensor]] = []
        with memory.Reads() as reads:
            result = self.call_.invoke(values)
        self.found.reads = reads.found
        self.found.out_tree = describe(result, "output", outputs)
        return [tensor for _, tensor in outputs]


@contextlib.contextmanager
def undisturbed(grad: bool = False) -> Iterator[None]:
    """Leave the caller's random state, grad mode and attention switch as they were.

    Inside, gradients are on or off as ``grad`` says.
    """
    states = torch.get_rng_state(), random.getstate()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_rng_state(states[0])
        random.setstate(states[1])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging and printing what our errors say.

    Its logs come back with TORCH_LOGS.
    """
    names = (
        "torch._subclasses.fake_tensor",
        "torch.fx.experimental.symbolic_shapes",
        "torch.export",
    )
    loggers = [logging.getLogger(name) for name in names]
    before = [log.disabled for log in loggers]
    is_quiet = not os.environ.get("TORCH_LOGS")
    for log in loggers:
        log.disabled = log.disabled or is_quiet
    try:
        with contextlib.redirect_stderr(io.StringIO()) if is_quiet else contextlib.nullcontext():
            yield
    finally:
        for log, was in zip(loggers, before, strict=True):
            log.disabled = was


@contextlib.contextmanager
def any_convolution() -> Iterator[None]:
    """Trace convolutions without what PyTorch asks of sizes to choose a kernel of its own.

    On a CPU it asks whether a batch has 16 images; the graph would hold for the answer alone.
    """
    choose = torch._C._select_conv_backend

    def freely(*args: Any, **kwargs: Any) -> Any:
        # tensors come by position, or by name (torch 2.11)
        modes = (getattr(x, "fake_mode", None) for x in (*args, *kwargs.values()))
        sizes = next((mode.shape_env for mode in modes if mode is not None), None)
        with contextlib.nullcontext() if sizes is None else sizes.suppress_guards():
            return choose(*args, **kwargs)

    torch._C._select_conv_backend = freely
    try:
        yield
    finally:
        torch._C._select_conv_backend = choose


def trace(
    call: arguments.BoundCall, leaves: shapes.Leaves, free: shapes.Free
) -> tuple[ExportedProgram, Tree]:
    """Run torch.export with sizes that avoid coincidences, else with the example's own."""
    chosen, given = shapes.example_sizes(free, leaves), shapes.given_sizes(free, leaves)
    try:
        return _export_at(call, leaves, free, chosen)
    except TvmcapError:
        if chosen == given:
            raise
        return _export_at(call, leaves, free, given)


def _export_at(
    call: arguments.BoundCall, leaves: shapes.Leaves, free: shapes.Free, sizes: Mapping[str, int]
) -> tuple[ExportedProgram, Tree]:
    flat = _Flat(call)
    dynamic = {"leaves": shapes.torch_shapes(free, leaves)} if free.dims else None
    try:
        with undisturbed(), source.recording():
            inputs = shapes.resize(free, leaves, sizes)
            with quiet():
                program = torch.export.export(flat, inputs, dynamic_shapes=dynamic, strict=False)
            memory.check(_Flat(call), inputs, flat.found.reads)
    except TvmcapError:
        raise
    except Exception as e:
        raise translate(e, [name for name, _ in leaves], sizes) from e
    return program, flat.found.out_tree


def translate(error: Exception, names: Sequence[str], sizes: Mapping[str, int]) -> CaptureError:
    """Turn an error of torch.export into one that says where and what to do."""
    line = source.of_error(error.__traceback__)
    at = f" at {line}" if line else ""
    text = str(error)
    if "Constraints violated" in text:
        return CaptureError(shapes.explain_violation(text, names))
    if isinstance(error, GuardOnDataDependentSymNode) or "DataDependent" in type(error).__name__:
        return DataDependentError(
            f"the code branches on, or takes a number out of, the values of tensors{at}. A"
            " library is one straight line"
            " of operators: use torch.where or a mask, or keep the decision outside the function"
        )
    below = re.search(r"Expected op to be .* for (\d+)(?:/(\d+))? <= (\w+)$", text)
    if below and below[3] in sizes:  # torch fails to word this one; it wants sizes above 1 too
        least = -(-int(below[1]) // int(below[2] or 1)) + 1
        return CaptureError(
            f"the code does not hold for every size of {below[3]!r}{at}: small ones leave nothing"
            f" of a slice. What to do: use {below[3]} = tvmcap.Dim({below[3]!r}, min={least})"
        )
    chosen = f" (captured with {', '.join(f'{n}={s}' for n, s in sizes.items())})" if sizes else ""
    return CaptureError(
        f"PyTorch could not trace the function{at}: {type(error).__name__}:"
        f" {source.first_line(error)}{chosen}. Check that the"
        " function runs on the example inputs, and that its dynamic dimensions may vary"
    )

"""Compile a captured module the plain way and compare it with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from torch.utils._pytree import tree_leaves
from tvm import relax

from tvmcap.base.config import Config
from tvmcap.base.signature import flatten, unflatten
from tvmcap.capture.export import Captured, capture
from tvmcap.capture.precision import widen

TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-8, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def compiled(captured: Captured, is_widened: bool = True) -> Callable[..., Any]:
    """Return a function with the user's calling convention that runs the module on the CPU."""
    mod = widen(captured.mod) if is_widened else captured.mod
    mod = relax.transform.LegalizeOps()(mod)
    machine = relax.VirtualMachine(
        tvm.compile(mod, target=tvm.target.Target({"kind": "llvm"})), tvm.cpu()
    )

    def call(*args: Any) -> Any:
        leaves = [t.contiguous() for t in flatten(captured.signature.in_tree, args)]
        outputs = list(machine["main"](*leaves))
        for output, spec in zip(outputs, captured.signature.outputs, strict=True):
            assert str(output.dtype) == f"torch.{spec.dtype}"
        return unflatten(captured.signature.out_tree, outputs)

    return call


def same(got: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert equal structure, dtypes and shapes, and close values."""
    mine, theirs = tree_leaves(got), tree_leaves(expected)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
        limit = tolerance or TOLERANCE.get(b.dtype, 0)
        torch.testing.assert_close(a, b, rtol=limit, atol=limit, equal_nan=True)


def check(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *others: tuple[Any, ...],
    tolerance: float | None = None,
    **config: Any,
) -> Captured:
    """Capture at ``args``; compare with eager there and at ``others``, with no second capture."""
    captured = capture(fn, args, config=Config(**config))
    run = compiled(captured)
    for example in (args, *others):
        with torch.no_grad():
            same(run(*example), fn(*example), tolerance)
    return captured

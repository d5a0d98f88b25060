"""Decompositions that some versions of PyTorch lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from tvmcap.capture.cells import cells
from tvmcap.capture.gradients import gradients
from tvmcap.capture.normalizations import normalizations
from tvmcap.capture.pooling import pooling
from tvmcap.capture.scatters import as_strided, masked_put, scatters

_NARROW = (torch.float16, torch.bfloat16)


def fused_rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write ``aten._fused_rms_norm``, ``rms_norm`` on a GPU, as elementwise work and a sum.

    Parameters
    ----------
    x: shape (..., *normalized_shape); 16-bit values are summed in float32.
    weight: shape ``normalized_shape``.
    eps: added to the mean square; the machine epsilon of x's dtype where None.

    Returns
    -------
    The result in the dtype of x, and the reciprocal root of the mean square, which keeps the
    reduced dimensions as 1.
    """
    dims = [-i for i in range(1, len(normalized_shape) + 1)]
    wide = x.float() if x.dtype in _NARROW else x
    least = torch.finfo(x.dtype).eps if eps is None else eps
    scale = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + least)
    result = wide * scale
    return (result if weight is None else result * weight).to(x.dtype), scale


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Write ``aten.rms_norm`` so on every device; torch's own becomes ``_fused_rms_norm`` on a GPU.

    Some versions leave that one whole whatever the table says, because a GPU has a kernel for it.
    """
    return fused_rms_norm(x, normalized_shape, weight, eps)[0]


def missing_in_torch() -> dict[Any, Callable[..., Any]]:
    """List by operator what PyTorch's own table of decompositions lacks here, or does otherwise."""
    found: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.rms_norm.default: rms_norm,
        torch.ops.aten.as_strided.default: as_strided,
        torch.ops.aten.index_put.default: masked_put,
        **cells(),
    }
    operator = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return found if operator is None else {**found, operator.default: fused_rms_norm}


_SEVERAL = (
    "_native_batch_norm_legit_no_training.default",
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "native_batch_norm.default",
)
"""Operators whose lowering gives the first result alone, where gradients need the others too."""


_KEPT = ("lift.default", "lift_fresh.default", "erfinv.default", "copysign.Tensor")
"""Operators whose rule in PyTorch is no help: tracing has one of its own for constants of the code,
and the others end in ``torch.ops.prims``."""


def _ends_in_prims(operator: Any) -> bool:
    """Whether PyTorch's rule only gives an operator its name in ``torch.ops.prims``.

    Nothing lowers those, and of some the traced dtype is wrong.
    """
    return hasattr(torch.ops.prims, operator.__name__.split(".")[0])


def _decomposes_itself(operator: Any) -> bool:
    """Whether tracing sees what an operator is made of; torch's rule for it may go further.

    It does not where the operator has a gradient of its own, as ``silu_backward`` has.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, "Autograd")


def for_training() -> dict[Any, Callable[..., Any]]:
    """List the decompositions for tracing with gradients: all but those of what has a lowering.

    Random operators stay, as they are drawn outside the graph.
    """
    from tvmcap.capture.ir import known_operators

    known = known_operators()
    found = {
        operator: rule
        for operator, rule in decomposition_table.items()
        if isinstance(operator, torch._ops.OpOverload)
        and (operator.__name__ not in known or operator.__name__ in _SEVERAL)
        and torch.Tag.nondeterministic_seeded not in operator.tags
        and not _decomposes_itself(operator)
        and not (operator.__name__ in _KEPT or _ends_in_prims(operator))
    }
    own = missing_in_torch() | normalizations() | gradients() | pooling() | scatters()
    return {**found, **own}


def for_inference() -> dict[Any, Callable[..., Any]]:
    """List the decompositions for tracing without gradients: pooling needs no positions then."""
    table = for_training()
    del table[torch.ops.aten.max_pool2d_with_indices.default]
    return table

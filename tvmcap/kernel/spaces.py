"""Which search space serves a kernel: the first matching template, else MetaSchedule's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te

from tvmcap.kernel.template import Template
from tvmcap.schedules import TEMPLATES, cpu_match, cpu_target


def find(func: Any, target: Any) -> tuple[Template, Any] | None:
    """Return the first template that matches a PrimFunc, with the problem it read, or None."""
    for template in TEMPLATES:
        problem = template.match(func, target)
        if problem is not None:
            return template, problem
    return None


def pack_weight(
    weight: Any, lhs: Any, dtype: str, target: Any
) -> tuple[np.ndarray[Any, Any], Callable[[te.Tensor, te.Tensor], te.Tensor]] | None:
    """Pack a constant weight [K, N] as the kernel of its matmul reads it.

    The layout follows from operator, dtype and target alone, so that every schedule of the kernel
    shares it.

    Parameters
    ----------
    weight: TVM tensor [K, N].
    lhs: type of the left operand, [..., K].
    dtype: of the result, in which the sum is kept.
    """
    data = weight.numpy()
    columns = data.shape[1]
    if target.kind.name == "cuda":
        return None
    width = cpu_target.pack_width(str(lhs.dtype), target)
    return cpu_match.pack(data, width), lambda x, packed: cpu_match.packed_matmul(
        x, packed, columns, dtype
    )

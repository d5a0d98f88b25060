"""Hand-written kernel families: each lowers one kind of PrimFunc from a setting of its knobs."""

from __future__ import annotations

from tvmcap.kernel.template import Template
from tvmcap.schedules import cpu_gemm, hopper_gemm, row_norm, simt_gemm

TEMPLATES: tuple[Template, ...] = (
    cpu_gemm.TEMPLATE,
    hopper_gemm.TEMPLATE,
    simt_gemm.TEMPLATE,
    row_norm.TEMPLATE,
)
"""In order: the first that matches a kernel serves it."""

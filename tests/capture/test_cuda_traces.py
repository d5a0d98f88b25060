"""What a GPU's trace holds that a CPU's does not has a lowering too; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tvmcap.capture import ir, operators
from tvmcap.capture.decompositions import for_training

_aten = torch.ops.aten


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


PLANE = (2, 3, 4, 4)
CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "softmax": (lambda x: F.softmax(x, -1, dtype=torch.float32), drawn((3, 4), dtype=torch.half)),
    "batch norm": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
        drawn(PLANE, (3,), (3,), (3,), (3,)),
    ),
    "cudnn batch norm": (
        lambda x, w, b: _aten.cudnn_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[:3],
        drawn(PLANE, (3,), (3,)),
    ),
    "cudnn batch norm's gradient": (
        lambda x, g, w, m, s: _aten.cudnn_batch_norm_backward(
            x, g, w, None, None, m, s, 1e-5, m.to(torch.uint8)
        ),
        drawn(PLANE, PLANE, (3,), (3,), (3,)),
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), drawn((3, 4), (4,))),
    "rms norm's gradient": (
        lambda g, x, s, w: _aten._fused_rms_norm_backward(g, x, [4], s, w, [True, True]),
        drawn((3, 4), (3, 4), (3, 1), (4,)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        drawn(*[(1, 2, 4, 8)] * 3, dtype=torch.bfloat16),
    ),
    "lstm cell": (
        lambda x, h, c, w, u, p, q: torch.lstm_cell(x, (h, c), w, u, p, q),
        drawn((2, 4), (2, 3), (2, 3), (12, 4), (12, 3), (12,), (12,)),
    ),
    "lstm cell's gradient": (
        lambda h, c, x, y, w: _aten._thnn_fused_lstm_cell_backward_impl(h, c, x, y, w, True),
        drawn(*[(2, 3)] * 4, (2, 12)),
    ),
    "max pooling's gradient": (
        lambda g, x: _aten.max_pool2d_with_indices_backward(
            g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, g.long()
        ),
        drawn((2, 3, 2, 2), PLANE),
    ),
    "convolution's gradient": (
        lambda g, x, w: _aten.convolution_backward(
            g, x, w, [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3
        ),
        drawn((2, 5, 2, 2), PLANE, (5, 3, 3, 3)),
    ),
    "embedding's gradient": (
        lambda g: _aten.embedding_dense_backward(g, g.select(1, 0).long(), 7, -1, False),
        drawn((3, 4)),
    ),
    "loss": (lambda x: F.cross_entropy(x, x.argmax(1)), drawn((3, 4))),
}


@pytest.mark.parametrize("name", list(CASES))
def test_every_operator_of_a_gpus_trace_has_a_lowering(name: str) -> None:
    fn, examples = CASES[name]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with mode:
            inputs = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in examples]

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            found = fn(*values)
            return list(found) if isinstance(found, tuple | list) else [found]

        graph = aot_export_joint_simple(
            flat, tuple(inputs), trace_joint=False, decompositions=for_training()
        )
    assert operators.calls(graph.graph)
    operators.check_supported(graph.graph, ir.known_operators())

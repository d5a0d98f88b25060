"""The kernels of training steps on sm_90a, counted without a GPU: what fuses into what."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.training_cases import block
from tvmcap import chain, pipeline
from tvmcap.base import codegen
from tvmcap.base.config import Config
from tvmcap.capture.training import capture_training
from tvmcap.graph.rewrite import is_op
from tvmcap.kernel import column_sums, spaces
from tvmcap.training_score import saved_bytes
from tvmcap.view.kernels import table
from tvmcap.view.traffic import count

CUDA = {"kind": "cuda", "arch": "sm_90a"}


def served(fn: Any, *args: torch.Tensor, budget: float = 1.0) -> dict[str, list[tuple[str, str]]]:
    """Name and server of each kernel that each entry calls, with a dynamic batch."""
    options: dict[str, Any] = {"dynamic": {0: {0: "B"}}, "tune": "none", "memory_budget": budget}
    config = Config(target=CUDA, backward=True, **options)
    captured = capture_training(fn, args, None, config)
    target, found = codegen.make_target(CUDA), {}
    for name, side in (("forward", captured.forward), ("backward", captured.backward)):
        passes = pipeline.front(target)
        fused = pipeline.run(side.mod, passes, target, config, pipeline.Trace())
        bindings = [b for block in fused["main"].body.blocks for b in block.bindings]
        calls = [b.value.args[0] for b in bindings if is_op(b.value, "call_tir")]
        found[name] = [(g.name_hint, _server(fused[g], target)) for g in calls]
    return found


def _server(func: Any, target: Any) -> str:
    template = spaces.find(func, target)
    if template is not None:
        return f"template:{template[0].name}"
    return SUM if column_sums.suits(func, target) else "another rule"


def by(rows: list[tuple[str, str]]) -> list[str]:
    return sorted(server for _, server in rows)


GEMM, SUM = "template:hopper_gemm", "rule:column-sums"


def test_an_mlp_is_six_products_and_a_sum_a_layer() -> None:
    module = nn.Sequential(nn.Linear(128, 256), nn.GELU(approximate="tanh"), nn.Linear(256, 128))
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    found = served(module.bfloat16(), x)
    assert by(found["forward"]) == [GEMM, GEMM]
    assert by(found["backward"]) == sorted([*[GEMM] * 4, SUM, SUM])
    derivative = [name for name, _ in found["backward"] if "tanh" in name]
    assert len(derivative) == 1 and "matmul" in derivative[0]


def test_sequences_take_the_same_kernels_as_matrices() -> None:
    module = nn.Sequential(nn.Linear(128, 256), nn.GELU(approximate="tanh"), nn.Linear(256, 128))
    found = served(module.bfloat16(), torch.randn(4, 16, 128).bfloat16().requires_grad_())
    kernels = {
        name: by([row for row in rows if not row[0].startswith("reshape")])  # views, once planned
        for name, rows in found.items()
    }
    assert kernels == {"forward": [GEMM, GEMM], "backward": sorted([*[GEMM] * 4, SUM, SUM])}


def test_below_budget_one_the_activation_is_computed_again_in_one_kernel() -> None:
    module = nn.Sequential(nn.Linear(128, 256), nn.GELU(approximate="tanh"), nn.Linear(256, 128))
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    found = served(module.bfloat16(), x, budget=0.5)
    assert by(found["forward"]) == [GEMM, GEMM]
    assert by(found["backward"]).count(GEMM) == 4
    assert len(by(found["backward"])) == 7


def test_a_blocks_derivative_and_bias_gradient_are_one_pass() -> None:
    fn, _, _ = block()
    shapes = ((64, 128), (256, 128), (256,))
    args = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
    found = served(fn, *args)
    assert by(found["forward"]) == [GEMM]
    assert by(found["backward"]) == sorted([GEMM, GEMM, SUM])


def test_planned_memory_never_rises_as_the_budget_falls() -> None:
    """Planned memory of both entries and what is saved between them, not an estimate of it."""
    module = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU())))
    x, target, peaks = torch.randn(256, 16, requires_grad=True), codegen.make_target("llvm"), []
    for budget in (1.0, 0.7, 0.3, 0.0):
        config = Config(target="llvm", backward=True, tune="none", memory_budget=budget)
        captured = capture_training(module, (x,), None, config)
        needed = []
        for side in (captured.forward, captured.backward):
            planned = chain.planned(side.mod, config, target, None, pipeline.Trace())
            signature = side.entry.signature
            needed.append(count(table(planned, signature), signature, {}).peak_planned or 0)
        peaks.append(max(needed[0], needed[1] + saved_bytes(captured.training, {})))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.75 * peaks[0]


def test_layer_norm_goes_forward_and_backward_in_row_kernels() -> None:
    module = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128)).half()
    found = served(module, torch.randn(64, 128).half().requires_grad_())
    assert by(found["forward"]) == [GEMM, "template:row_norm"]
    kinds = by(found["backward"])
    assert kinds.count(GEMM) == 2 and "template:row_norm" in kinds
    assert set(kinds) == {GEMM, SUM, "template:row_norm"}

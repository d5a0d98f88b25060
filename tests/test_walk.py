"""The measured walk: kernels and traffic fall when operators are fused, the result stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tvmcap
from examples.models import gelu_tanh


@pytest.fixture(scope="module")
def args() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(64, 32), torch.randn(32, 48) / 6, torch.randn(48)


@pytest.fixture(scope="module")
def steps(args: tuple[torch.Tensor, ...], blocks: Any) -> dict[str, Any]:
    """The block's library whole and without fusion, with its score at 64 rows."""
    libs = {
        "fused": blocks("tanh", torch.float32)[1],
        "apart": tvmcap.build(
            gelu_tanh,
            args,
            dynamic={"x": {0: "B"}},
            target="llvm",
            tune="none",
            verify=False,
            disable=("fuse",),
        ),
    }
    return {name: (lib, lib.scoreboard({"B": 64}, baselines=False)) for name, lib in libs.items()}


def test_fusion_makes_one_kernel_of_the_block(steps: dict[str, Any]) -> None:
    fused, apart = steps["fused"][1], steps["apart"][1]
    assert fused.kernels == 1 and apart.kernels >= 3


def test_the_count_is_what_runs(steps: dict[str, Any], args: tuple[torch.Tensor, ...]) -> None:
    for lib, score in steps.values():
        assert score.kernels == score.kernels_traced == len(lib.executor.kernel_launches(*args))


def test_fusion_saves_the_traffic(steps: dict[str, Any]) -> None:
    fused, apart = steps["fused"][1], steps["apart"][1]
    assert fused.activation_traffic == pytest.approx(
        (32 + 48) / 48
    )  # x read once, the result written once
    assert apart.activation_traffic > 2 * fused.activation_traffic
    assert fused.hbm_bytes == 4 * (64 * 32 + 32 * 48 + 48 + 64 * 48) < apart.hbm_bytes


def test_fusion_needs_no_intermediate(steps: dict[str, Any]) -> None:
    fused, apart = steps["fused"][1], steps["apart"][1]
    assert fused.peak_bytes_planned == 4 * 64 * 48  # the result alone
    assert apart.peak_bytes_planned > fused.peak_bytes_planned
    for score in (fused, apart):
        assert score.peak_bytes_measured == score.peak_bytes_planned


def test_both_compute_the_same(steps: dict[str, Any], args: tuple[torch.Tensor, ...]) -> None:
    wanted = gelu_tanh(*(a.double() for a in args))
    for lib, _ in steps.values():
        assert (lib(*args).double() - wanted).abs().max() < 2e-6

"""A build that measures nothing: where there is a model its choice, and explain says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import tvmcap
from tvmcap.base.codegen import make_target
from tvmcap.kernel import models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group
from tvmcap.schedules import cpu_gemm


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(48, 80)

    def forward(self, x):
        return torch.relu(self.linear(x))


def model_against_unrolling() -> RankModel:
    """Return a model of the CPU GEMM whose records were the faster the less was unrolled."""
    names = cpu_gemm.TEMPLATE.feature_names
    column = names.index("unroll")
    rng = np.random.default_rng(0)
    groups = []
    for g in range(6):
        rows = rng.integers(1, 9, (60, len(names))).astype(np.float32)
        times = 10.0 + rows[:, column]
        groups.append(Group(str(g), rows, tuple(times), {}, {}))
    model = RankModel(0, names)
    model.pretrain(groups, "made up")
    return model


def test_the_choice_of_a_model_serves_and_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = Layer().eval(), torch.randn(24, 48)
    options = {"target": "llvm", "log_dir": str(tmp_path / "logs"), "verify": False}
    options["cache_dir"] = str(tmp_path / "cache")
    plain = tvmcap.build(layer, (x,), **options)
    assert "the template's default" in plain.explain()
    target = make_target("llvm")
    models.save(model_against_unrolling(), tmp_path / "logs", "cpu_gemm", target)
    chosen = tvmcap.build(layer, (x,), **options)
    assert not chosen.from_cache  # the model is part of what decides
    assert "the cost model's choice (cpu_gemm.model.json, 360 measurements)" in chosen.explain()
    (served,) = (s for s in chosen.manifest.coverage if "cpu_gemm" in s["served_by"])
    assert not served["tuned"] and '"unroll":1}' in served["ranges"]["any"]
    torch.testing.assert_close(torch.as_tensor(chosen(x)), layer(x), atol=1e-5, rtol=1e-5)
    rule = tvmcap.build(layer, (x,), tune="none", **options)
    assert "cost model" not in rule.explain()

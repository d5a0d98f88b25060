"""bisect names the pass and the operator that a planted mistake is in."""

from functools import partial

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmcap import Dim, pipeline
from tvmcap.bisect import bisect


class Net(nn.Module):
    """A chain in which the mistake is neither first nor last; no matmul, so it compiles quickly."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(24))

    def forward(self, x):
        hidden = torch.abs(x * self.scale + self.shift)
        scaled = torch.tanh(hidden * 3.0)
        return torch.relu(scaled - 0.1) * self.scale


@mutator
class Wrong(PyExprMutator):
    """Replaces one operator by another."""

    def __init__(self, mod, old, new):
        super().__init__(mod)
        self.old, self.new = old, new

    def visit_call_(self, call):
        call = super().visit_call_(call)
        if isinstance(call.op, tvm.ir.Op) and call.op.name == self.old:
            return self.new(call.args[0])
        return call


def plant(mod, step, old, new):
    wrong = Wrong(mod, old, new)
    wrong.builder_.update_func(mod.get_global_var("main"), wrong.visit_expr(mod["main"]))
    return step(wrong.builder_.get())


@pytest.fixture
def options(tmp_path):
    return {
        "target": "llvm",
        "tune": "none",
        "dynamic": {"x": {0: Dim("B", max=8)}},
        "log_dir": str(tmp_path / "logs"),
    }


def test_a_sound_chain_has_nothing_to_find(options):
    torch.manual_seed(1)
    report = bisect(Net().eval(), (torch.randn(6, 24),), **options)
    assert report.ok and report.to_json()["culprit"] is None
    assert "within the error budget" in str(report)


def test_the_pass_and_the_operator_are_named(options, monkeypatch):
    torch.manual_seed(2)
    front = pipeline.front

    def planted(*options):
        bad = {"canonicalize": ("relax.tanh", relax.op.sin)}
        return [
            (n, partial(plant, step=s, old=bad[n][0], new=bad[n][1]) if n in bad else s)
            for n, s in front(*options)
        ]

    monkeypatch.setattr(pipeline, "front", planted)
    tried = []
    report = bisect(Net().eval(), (torch.randn(6, 24),), progress=tried.append, **options)
    assert not report.ok and report.culprit == "canonicalize"
    assert [c.ok for _, c in report.stages] == [True] * (len(report.stages) - 1) + [False]
    assert report.stages[-1][0] == "canonicalize" and report.stages[0][0] == "capture"
    assert "tanh" in report.operator.target and "test_bisect.py" in report.operator.line
    assert "disable=('canonicalize',)" in str(report)
    assert any(t.startswith("operator ") for t in tried)
    assert report.to_json()["operator"]["name"].startswith("tanh")

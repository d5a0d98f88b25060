"""The benchmark of training steps: what it compares, and its tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmcap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import training
import training_tables


def test_a_step_of_a_library_gives_the_gradients_that_eager_gives() -> None:
    x, w, b, dy = training.tensors(6, 16, 32)
    options: dict[str, Any] = {"target": "llvm", "tune": "none", "verify": False}
    lib = tvmcap.build(training.block, (x, w, b), backward=True, **options)
    steps = {"ours": training.ours_of(lib), "eager": training.step_of(training.block)}
    found = training.checked(steps, (x, w, b, dy))
    assert found["right"], found["errors"]
    steps["ours"] = lambda *values: [1.1 * g for g in steps["eager"](*values)]
    assert not training.checked(steps, (x, w, b, dy))["right"]


def test_the_bare_products_are_those_of_the_step() -> None:
    x, w, b, dy = (t.double() for t in training.tensors(6, 16, 32))
    y, by_x, by_w = training.products(x, w, b, dy)
    xs, ws = x.requires_grad_(), w.requires_grad_()
    expected = torch.autograd.grad(xs @ ws.T, (xs, ws), dy)
    torch.testing.assert_close(y, (xs @ ws.T).detach())
    torch.testing.assert_close((by_x, by_w), expected)


def test_what_eager_saves_is_counted_without_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    assert training.eager_saved(module, x) == 2 * 4 * 8 * 4  # before and after the GELU


@pytest.mark.parametrize("failed", [False, True])
def test_tables(failed: bool) -> None:
    time = {"median": 10.0, "p10": 9.0, "p90": 11.0}
    names = {"kind": "layer", "M": 2, "K": 3, "N": 4}
    layer = {
        **names,
        "case": "any batch",
        "kernels": 4,
        "ours_us": time,
        "baselines_us": {"three_matmuls": time, "eager": time},
        "over_matmuls": {"ours": 1.2, "eager": 1.5},
        "right": True,
    }
    budget = {
        "kind": "budget",
        "case": "8 layers",
        "memory_budget": 0.5,
        "saved_bytes": 1 << 20,
        "eager_saved_bytes": 2 << 20,
        "peak_bytes_planned": 4 << 20,
        "ours_us": time,
        "baselines_us": {"eager": time},
    }
    if failed:
        layer = {**names, "failed": "no | memory"}
        budget = {"kind": "budget", "memory_budget": 0.5, "failed": "no"}
    for make in (training_tables.layers, training_tables.budgets):
        head, body = make(lambda t: "-" if t is None else f"{t['median']:.0f}")([layer, budget])
        assert [len(line) for line in body] == [len(head)]
        assert ("failed" in str(body)) == failed
    assert failed or body[0][3] == "0.50x"

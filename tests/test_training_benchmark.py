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
import training_memory
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


def test_what_eager_saves_is_counted_without_parameters_on_any_device() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    bytes_saved = 2 * 4 * 8 * 4  # before and after the GELU
    assert training_memory.eager_saved(module, x) == bytes_saved
    assert training_memory.eager_saved(module.to("meta"), x.detach().to("meta")) == bytes_saved


SHAPE = (2, 32, 16)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MLP's libraries over budgets."""
    folder: Path = tmp_path_factory.mktemp("deep")
    training_memory.build(folder, SHAPE, target="llvm", tune="none", verify=False)
    return folder


def test_memory_never_rises_as_the_budget_falls(libraries: Path) -> None:
    rows = training_memory.planned(libraries, SHAPE)
    assert [r["memory_budget"] for r in rows] == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0]
    for name in ("saved_bytes", "peak_bytes_planned"):
        found = [r[name] for r in rows]
        assert found == sorted(found, reverse=True)
    activation = 16 * 32 * 2
    assert rows[0]["saved_bytes"] == rows[0]["eager_saved_bytes"] == 3 * activation
    assert rows[1]["saved_bytes"] == 2 * activation
    assert len(list(libraries.glob("*.so"))) == len({r["library"] for r in rows}) < len(rows)


def test_the_planned_peak_is_what_a_step_holds(libraries: Path) -> None:
    row = training_memory.planned(libraries, SHAPE)[-1]
    lib = tvmcap.load(libraries / row["library"])
    module = training_memory.deep(*SHAPE[:2])
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    lib.executor.use_module(module)
    y = lib(x)
    gradients = torch.autograd.grad(y, [x, *module.parameters()], torch.randn_like(y))
    held = sum(t.nbytes for t in (y, *gradients)) + row["saved_bytes"]
    assert row["peak_bytes_planned"] == held + lib.executor.arena_bytes


def test_the_gradients_of_every_budget_are_right(libraries: Path) -> None:
    module = training_memory.deep(*SHAPE[:2])
    x, dy = (torch.randn(16, 32).bfloat16() for _ in range(2))
    exact = training_memory.gradients(
        training_memory.deep(*SHAPE[:2]).double(), x.double(), dy.double()
    )
    eager = training_memory.distance(training_memory.gradients(module, x, dy), exact)
    for path in set(training_memory.libraries(libraries).values()):
        found = training_memory.steps_of(path, module)(x, dy)
        # the parameters' gradients first, in the order of a library's inputs
        assert training_memory.distance([found[-1], *found[:-1]], exact) <= 2 * eager


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
        "memory_budget": 0.9,
        "library": "deep-a.so",
        "saved_bytes": 1 << 20,
        "eager_saved_bytes": 2 << 20,
        "peak_bytes_planned": 4 << 20,
        "peak_bytes": 5 << 20,
        "eager_peak_bytes": 6 << 20,
        "kernels": 3,
        "ours_us": time,
        "baselines_us": {"eager": time, "budget_1": time},
        "over_budget_1": 1.03,
        "right": True,
    }
    if failed:
        layer = {**names, "failed": "no | memory"}
        budget = {"kind": "budget", "memory_budget": 0.5, "failed": "no"}
    tables = [training_tables.layers, training_tables.budgets]
    rows = [layer, budget, *([] if failed else [{**budget, "memory_budget": 0.5}])]
    for make in tables:
        head, body = make(lambda t: "-" if t is None else f"{t['median']:.0f}")(rows)
        assert [len(line) for line in body] == [len(head)]
        assert ("failed" in str(body)) == failed
    if not failed:
        assert body[0][1:6] == ["0.9 to 0.5", "1.0 MiB", "0.50x", "4.0 MiB", "5.0 MiB"]
        head, body = training_tables.planned(rows[1:])
        assert len(body) == 1 and body[0][1:3] == ["0.9 to 0.5", "1.0 MiB"]

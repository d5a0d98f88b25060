"""Every ATen core operator that is served computes what PyTorch does, and so does its gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_function

from tvmcap import dynamo
from tvmcap.base.config import Config
from tvmcap.base.numerics import compare, to_numpy

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import operators  # noqa: E402

GROUP = 30
"""Operators that are compiled together."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def rows() -> list[operators.Row]:
    return operators.rows()


@pytest.fixture(scope="module")
def served(rows: list[operators.Row]) -> dict[str, operators.Case]:
    unset = ("empty.memory_format", "empty_strided.default")
    cases = operators.cases()
    return {r.operator: cases[r.operator] for r in rows if r.is_ours and r.operator not in unset}


def test_the_page_of_operators_is_up_to_date(rows: list[operators.Row]) -> None:
    assert operators.DOCUMENT.read_text() == operators.document(rows), (
        "run python benchmarks/operators.py --write"
    )


def test_every_core_operator_has_a_row(rows: list[operators.Row]) -> None:
    names = [r.operator for r in rows]
    assert len(names) == len(set(names)) > 180
    assert sum(r.is_ours for r in rows) > 160


def groups(cases: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = list(cases)
    for i in range(0, len(names), GROUP):
        yield {name: cases[name] for name in names[i : i + GROUP]}


def run(cases: dict[str, operators.Case], fn: Any, dtype: torch.dtype | None, grad: bool) -> Any:
    """Return results and gradients of all cases, by name."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone()

    inputs = [
        [wide(x).requires_grad_(grad and i < case.count) for i, x in enumerate(case.tensors)]
        for case in cases.values()
    ]
    results = fn(*inputs)
    found: dict[str, list[torch.Tensor]] = {
        name: [x.detach() for x in some] for name, some in zip(cases, results, strict=True)
    }
    if not grad:
        return found
    draw = torch.Generator().manual_seed(1)
    smooth = [x for some in results for x in some if x.requires_grad]
    tangents = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in smooth]
    wanted = [x for some in inputs for x in some if x.requires_grad]
    gradients = iter(torch.autograd.grad(smooth, wanted, tangents, allow_unused=True))
    for name, some in zip(cases, inputs, strict=True):
        each = [(x, next(gradients)) for x in some if x.requires_grad]
        found[name] += [torch.zeros_like(x) if g is None else g for x, g in each]
    return found


def check(cases: dict[str, operators.Case], grad: bool, caplog: Any) -> None:
    def fn(*inputs: Any) -> Any:
        return [case(*some) for case, some in zip(cases.values(), inputs, strict=True)]

    fast = aot_function(fn, **dynamo.stages(Config(tune="none"), grad))
    ours = run(cases, fast, None, grad)
    eager, exact = run(cases, fn, None, grad), run(cases, fn, torch.float64, grad)
    said = [r.message for r in caplog.records if r.name == "tvmcap"]
    # none fell back to eager; PyTorch may hand over a gradient in another order of memory
    assert not [message for message in said if "was copied" not in message]
    failed = []
    for name in cases:
        for i, parts in enumerate(zip(ours[name], exact[name], eager[name], strict=True)):
            dtype = str(parts[0].dtype).removeprefix("torch.")
            assert parts[0].dtype == parts[2].dtype, name
            result = compare(*map(to_numpy, parts), name=f"{name} {i}", dtype=dtype)
            if not result.ok:
                failed.append(str(result))
    assert not failed, "\n".join(failed)


def test_results_without_gradients(
    served: dict[str, operators.Case], rows: list[operators.Row], caplog: Any
) -> None:
    left = {r.operator for r in rows if r.gradient != operators.YES}
    for group in groups({n: c for n, c in served.items() if n in left}):
        check(group, False, caplog)


def test_results_and_gradients(
    served: dict[str, operators.Case], rows: list[operators.Row], caplog: Any
) -> None:
    wanted = {r.operator for r in rows if r.gradient == operators.YES}
    for group in groups({n: c for n, c in served.items() if n in wanted}):
        check(group, True, caplog)

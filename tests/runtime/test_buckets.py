"""Buckets: padded calls give the rows of exact ones, and only where rows are independent."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import libs
from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.runtime.buckets import Buckets
from tvmcap.runtime.executor import Executor


@pytest.fixture
def padded(chain: Path) -> Any:
    """Return an executor that pads to 4, 16 and 64, as one on a GPU would."""
    run = Executor(chain)
    run._buckets = Buckets(run.signature, (16, 4, 64))
    run._quick = False
    return run


def test_a_call_is_padded_to_the_smallest_that_holds_it(padded: Any, w: torch.Tensor) -> None:
    shapes = []
    run = padded._threads.here.run
    padded._threads.here.run = lambda plan, *rest: (shapes.append(plan.dims["B"]), run(plan, *rest))
    for rows in (1, 3, 4, 5, 16, 17, 64, 65, 2, 60):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(padded(x, w), x @ w @ w)
    # the first call at each bucket runs at its own size too
    assert shapes == [4, 1, 4, 4, 16, 5, 16, 64, 17, 64, 65, 4, 64]


def test_random_sizes_are_right_with_and_without_out(padded: Any, w: torch.Tensor) -> None:
    draw = random.Random(3)
    for i in range(200):
        x = torch.rand(draw.randint(1, 80), 8)
        out = torch.empty(len(x), 8) if i % 2 else None
        got = padded(x, w, out=out)
        torch.testing.assert_close(got, x @ w @ w)
        assert out is None or got is out
    assert set(padded._threads.here.slots) == {4, 16, 64}


def test_results_stay_when_the_next_call_runs(padded: Any, w: torch.Tensor) -> None:
    xs = [torch.rand(3, 8) for _ in range(4)]
    results = [padded(x, w) for x in xs]
    for x, got in zip(xs, results, strict=True):
        torch.testing.assert_close(got, x @ w @ w)


def test_rows_that_depend_on_each_other_are_noticed() -> None:
    buckets = Buckets(libs.chain_signature(), (8,))
    x = torch.rand(3, 8) + 1

    def run(inputs: Any, shapes: Any, outputs: Any) -> list[torch.Tensor]:
        return [inputs[0] / len(inputs[0])]

    class Sizes:
        dims, zero = {"B": 3}, False

    with pytest.raises(LibraryError, match="depend on each other"):
        buckets.call(8, Sizes(), [x, torch.rand(8, 8)], {}, run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("signature", "sizes", "match"),
    [
        (libs.chain_signature(), (0, 4), "sizes from 1"),
        (libs.chain_signature(), 16, r"sizes from 1 such as \(16, 64\), got 16"),
        (libs.chain_signature(), (True, "4"), "sizes from 1"),
        (libs.chain_signature(maximum=8), (4, 16), r"from 0 to 8, got \[16\]"),
        (libs.pair_signature(), (4,), "first dimension of 'out1'"),
    ],
)
def test_sizes_and_libraries_that_do_not_fit(signature: Any, sizes: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Buckets(signature, sizes)


def test_what_is_refused_changes_no_later_call(chain: Path, w: torch.Tensor) -> None:
    run, x = Executor(chain), torch.rand(3, 8)
    with pytest.raises(LibraryError, match="'cuda'"):
        run.use_graphs(buckets=(16,))
    shapes = []
    was = run._threads.here.run
    run._threads.here.run = lambda plan, *rest: (shapes.append(plan.dims["B"]), was(plan, *rest))
    torch.testing.assert_close(run(x, w), x @ w @ w)
    assert shapes == [3]

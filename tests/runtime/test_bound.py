"""Bound tensors: read where they lie, written where they are bound, one set a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tvmcap
from tests.runtime.kinds import KINDS
from tvmcap.base.errors import InputError
from tvmcap.runtime.executor import Executor


@pytest.fixture
def bound(chain: Path, x: torch.Tensor, w: torch.Tensor) -> Any:
    run = tvmcap.load(chain)
    run.bind("x", x)
    run.bind("w", w)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_to_a_bound_tensor_counts(
    chain: Path, kind: str, x: torch.Tensor, w: torch.Tensor
) -> None:
    convert, result_type, back = KINDS[kind]
    run = tvmcap.load(chain)
    run.bind("x", convert(x))
    run.bind("w", convert(w))
    for _ in range(3):
        x.copy_(torch.rand_like(x))
        run.run()
        assert isinstance(run.output(0), result_type)
        torch.testing.assert_close(back(run.output(0)), x @ w @ w)


def test_a_bound_output_receives_the_result(bound: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    outs = [torch.zeros(5, 8) for _ in range(2)]
    for out in (*outs, *outs):
        bound.bind("out0", out.zero_())
        bound.run()
        assert bound.output().data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, x @ w @ w)


def test_kept_outputs_are_reused_and_grow(bound: Any, w: torch.Tensor) -> None:
    places = set()
    for rows in (4096, 1, 7, 4096, 100):
        x = torch.rand(rows, 8)
        bound.bind("x", x)
        bound.run()
        torch.testing.assert_close(bound.output(), x @ w @ w)
        places.add(bound.output().data_ptr())
    assert len(places) == 1 and bound.counts.growths == 0
    small = tvmcap.load(bound.path)
    small.bind("w", w)
    for rows in (1, 2, 3, 4):
        small.bind("x", torch.rand(rows, 8))
        small.run()
    assert small.counts.growths == 2


def test_a_tensor_that_its_owner_moves_stays_as_it_was_bound(
    bound: Any, x: torch.Tensor, w: torch.Tensor
) -> None:
    before = x.clone()
    x.data = torch.rand(3, 8)
    bound.run()
    torch.testing.assert_close(bound.output(), before @ w @ w)


def test_each_thread_binds_for_itself(bound: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    said = []

    def other() -> None:
        try:
            bound.run()
        except InputError as e:
            said.append(str(e))

    bound.run()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert said and "nothing is bound to x, w" in said[0]
    torch.testing.assert_close(bound.output(), x @ w @ w)


def test_a_lazily_negated_view_is_not_bound_as_a_copy(bound: Any) -> None:
    bound.bind("x", torch.rand(5, 8)._neg_view())
    with pytest.raises(InputError, match="has to be copied"):
        bound.run()


def test_what_cannot_be_bound_or_run(bound: Any, chain: Path, w: torch.Tensor) -> None:
    with pytest.raises(InputError, match="did you mean 'out0'"):
        bound.bind("out", w)
    for name in (None, ["x"]):
        with pytest.raises(InputError, match="expected one of x, w, out0"):
            bound.bind(name, w)
    with pytest.raises(InputError, match="expected a run before"):
        tvmcap.load(chain).output()
    bound.run()
    with pytest.raises(InputError, match="number from 0 to 0, got 3"):
        bound.output(3)
    for wrong, match in (
        (torch.rand(8, 5).t(), "used where it lies"),
        (torch.rand(41)[1:].view(5, 8), "used where it lies"),
        (torch.rand(5, 9), "expected size 8"),
        (torch.rand(5, 8).double(), "float32"),
        ("no tensor", "tensor"),
    ):
        bound.bind("x", wrong)
        with pytest.raises(InputError, match=match):
            bound.run()
    x = torch.rand(5, 8)
    bound.bind("x", x)
    bound.bind("out0", x)
    with pytest.raises(InputError, match="memory of its own"):
        bound.run()
    bound.bind("out0", torch.rand(4, 8))
    with pytest.raises(InputError, match="shape"):
        bound.run()


def test_batches_without_elements(bound: Any, w: torch.Tensor) -> None:
    for rows in (0, 3, 0):
        bound.bind("x", torch.rand(rows, 8))
        bound.run()
        assert bound.output().shape == (rows, 8)


def test_nested_arguments_and_several_outputs(nested: Executor) -> None:
    x, y = np.random.default_rng(1).random((2, 5, 8), np.float32)
    nested.bind("data.x", x)
    nested.bind("data.y", y)
    nested.run()
    np.testing.assert_allclose(nested.output(0), x + y, rtol=1e-6)
    np.testing.assert_allclose(nested.output(1), x.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(nested.output(2), np.concatenate([x, y]))

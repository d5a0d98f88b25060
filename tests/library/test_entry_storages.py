"""A host function refuses storages that are smaller than its sizes need, before any kernel."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.hosted import Hosted, filled, tensor
from tests.planned import mlp, numbers, planned

WIDTHS = (8, 16, 16, 4)


def test_a_storage_that_is_too_small_is_refused_before_the_first_kernel(tmp_path: Path) -> None:
    run = Hosted(planned(mlp(WIDTHS)), tmp_path)
    weights = [tensor(numbers(a, b)) for a, b in itertools.pairwise(WIDTHS)]
    out, untouched = filled((9, 4), "float32"), filled((9, 4), "float32").numpy().tobytes()
    enough = run.storages(B=9)
    for i, less in enumerate(run.storages(B=8)):
        storages = [*enough[:i], less, *enough[i + 1 :]]
        with pytest.raises(RuntimeError, match="fewer bytes than the sizes of the call need"):
            run.function(tensor(numbers(9, 8)), *weights, out, *run.constants, *storages, 0)
        assert out.numpy().tobytes() == untouched
    run.function(tensor(numbers(9, 8)), *weights, out, *run.constants, *enough, 0)

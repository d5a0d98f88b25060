"""Values put where a mask says, in a tensor or along its axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capture.running import check
from tests.libs import quick
from tvmcap.base.errors import CaptureError
from tvmcap.capture.export import capture

COLUMNS = torch.tensor([True, False, True, True, False])


def put(mask: Callable[[torch.Tensor], Any], accumulate: bool = False) -> Callable[..., Any]:
    """Return a function of a tensor and of values that puts these where a mask is true."""

    def fn(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        index = mask(x)
        index = index if isinstance(index, tuple) else (index,)
        return x.index_put(tuple(index), values, accumulate=accumulate)

    return fn


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a number": (put(lambda x: x > 0), ()),
    "one value": (put(lambda x: x > 0), (1,)),
    "added": (put(lambda x: x > 0, accumulate=True), ()),
    "whole rows": (put(lambda x: (x > 1).any(-1)), (5,)),
    "the same for each row": (put(lambda x: (x > 1).any(-1)), (1, 5)),
    "matrices": (put(lambda x: (x > 1).any(-1).any(-1)), (1, 3, 1)),
    "no place": (put(lambda x: x > 100), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_values_that_do_not_follow_from_the_places(name: str) -> None:
    fn, shape = CASES[name]
    make = torch.Generator().manual_seed(len(name))
    x, values = torch.randn(4, 3, 5, generator=make), torch.randn(shape, generator=make)
    check(fn, (x, values), (-x[:2], values), dynamic={"x": {0: "B"}})


def test_assignment_along_a_later_axis() -> None:
    def assign(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        z = x * 1
        z[:, COLUMNS] = values
        z[z > 1] = -2.5
        return z

    make = torch.Generator().manual_seed(3)
    x = torch.randn(4, 5, generator=make)
    check(assign, (x, torch.randn(4, 1, generator=make)))


def test_a_value_for_each_place_is_refused() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(4))
    with pytest.raises(CaptureError, match="index_put"):
        capture(put(lambda x: x > 0), (x, torch.ones(int((x > 0).sum()))))


def test_its_gradient() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        z = x * 2
        z[z > 0] = 3.0
        return z * z

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(5), requires_grad=True)
    other = x.detach().clone().requires_grad_()
    quick(fn, x, backward=True)(x).sum().backward()
    fn(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)

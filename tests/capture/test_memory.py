"""How arguments lie in memory: code that reads it gives eager's values, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capture.running import check, compiled, same
from tvmcap.base.config import Config
from tvmcap.base.errors import CaptureError
from tvmcap.capture.export import capture
from tvmcap.capture.training import capture_training


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def prepares(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    return x.view(-1) * 2 + x.numel()


READS: dict[str, Callable[..., Any]] = {
    "as_strided": lambda x: x.as_strided((4, 3), (1, 4)) + 1,
    "as_strided of a result": lambda x: torch.as_strided(x * 2, (4, 3), (3, 1)) + 1,
    "as_strided_scatter": lambda x: x.as_strided_scatter(torch.ones(3), (3,), (2,)),
    "stride": lambda x: x.reshape(-1)[: x.stride(0)] * x.stride(-1),
    "is_contiguous": branches,
    "operator": lambda x: torch.ops.aten.as_strided.default(x, [4, 3], [3, 1]) * 2,
}

OFFSETS: dict[str, Callable[..., Any]] = {
    "storage_offset": lambda x: x + x.storage_offset(),
    "as_strided": lambda x: x.contiguous().as_strided((4, 3), (1, 4), 2) + 1,
}

FREE: dict[str, Callable[..., Any]] = {
    "made contiguous": lambda x: x.contiguous().as_strided((4, 3), (1, 4)) + 1,
    "cloned": lambda x: x.clone(memory_format=torch.contiguous_format).as_strided((3,), (2,), 5),
    "own tensor": lambda x: torch.zeros(4, 6).as_strided((6, 4), (1, 6)) + x.sum(),
    "a product": lambda x: torch.as_strided(x @ x.mT, (3, 2), (1, 3)) * 2,
    "unfold": lambda x: x.unfold(0, 3, 2) * 2,
    "prepares": prepares,
}


def layouts() -> list[torch.Tensor]:
    """Lists tensors of one shape that lie differently in memory."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(6, 8, generator=generator)
    wide = torch.randn(9, 16, generator=generator)
    return [x, x.t().contiguous().t(), wide[3:, ::2], torch.randn(6, 1).expand(6, 8), wide[1:7, :8]]


@pytest.mark.parametrize("name", READS)
def test_a_result_that_follows_from_strides_is_refused(name: str) -> None:
    for x in layouts():
        with pytest.raises(CaptureError, match=r"(?s)arguments lie in memory.*call \.contiguous"):
            capture(READS[name], (x,))


@pytest.mark.parametrize("name", OFFSETS)
def test_a_result_that_follows_from_the_offset_is_refused(name: str) -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)arguments lie in memory.*offset out, or call .clone"
    ):
        capture(OFFSETS[name], (layouts()[0],))


def test_the_error_says_what_reads_and_where() -> None:
    with pytest.raises(CaptureError, match=r"- is_contiguous at .*test_memory\.py:\d+: return x"):
        capture(branches, (layouts()[1],))


@pytest.mark.parametrize("name", FREE)
def test_a_result_that_does_not_serves_every_layout(name: str) -> None:
    first, *others = layouts()
    check(FREE[name], (first,), *((x,) for x in others))


def test_a_dynamic_dimension() -> None:
    dynamic = {"x": {0: "B"}}
    with pytest.raises(CaptureError, match="arguments lie in memory"):
        capture(lambda x: x * x.stride(0), (torch.ones(6, 8),), config=Config(dynamic=dynamic))
    check(prepares, (layouts()[0],), (layouts()[1][:3],), dynamic=dynamic)


def test_a_view_of_a_layout_that_eager_refuses_has_the_values_in_order() -> None:
    run = compiled(capture(lambda x: x.view(-1) * x.dim(), (layouts()[0],)))
    for x in layouts():
        same(run(x), x.reshape(-1) * 2)


def test_gradients_and_parameters() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t() * self.weight.stride(0)

    config = Config(backward=True)
    x = layouts()[0]
    for fn in (READS["stride"], READS["as_strided"], Layer()):
        with pytest.raises(CaptureError, match="arguments lie in memory"):
            capture_training(fn, (x,), None, config)
    capture_training(prepares, (x,), None, config)
    check(Layer().requires_grad_(False), (x,))  # frozen: its strides are known


def test_a_frozen_weight_whose_memory_is_read_is_refused() -> None:
    weight = torch.randn(6, 8).t()
    with pytest.raises(CaptureError, match="as_strided"):
        capture(lambda x: x + weight.as_strided((6, 8), (8, 1)), (torch.ones(6, 8),))

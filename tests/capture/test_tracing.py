"""What is held still while PyTorch traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tvmcap.capture import tracing


@pytest.mark.parametrize("named", [True, False])
def test_the_choice_of_a_convolution_asks_nothing_of_the_batch(named: bool) -> None:
    """Tensors come by position or by name, as PyTorch's version has it."""
    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)
    free = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    x = mode.from_tensor(torch.randn(20, 2, 4, 4), symbolic_context=free)
    w = mode.from_tensor(torch.randn(3, 2, 3, 3))
    rest: dict[str, Any] = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    rest |= {"transposed": False, "output_padding": [0, 0], "groups": 1, "bias": None}
    choose = torch._C._select_conv_backend
    with tracing.any_convolution(), mode:
        freely: Any = torch._C._select_conv_backend
        found = freely(input=x, weight=w, **rest) if named else freely(x, w, **rest)
    assert torch._C._select_conv_backend is choose
    assert not sizes.guards
    with mode:
        assert choose(x, w, **rest) == found
    assert any("16" in str(guard.expr) for guard in sizes.guards)

"""Dynamic dimensions: names, bounds, and examples that torch.export would specialise on."""

from __future__ import annotations

import pytest
import torch
from running import compiled, same

from tvmcap.base.config import Config, Dim
from tvmcap.base.signature import DimSpec
from tvmcap.capture import shapes
from tvmcap.capture.export import capture


@pytest.mark.parametrize("rows", [0, 1, 2, 8])
def test_any_example_size_stays_free(rows):
    weight = torch.randn(8, 8)
    captured = capture(
        lambda x: torch.relu(x @ weight),
        (torch.randn(rows, 8),),
        config=Config(dynamic={0: {0: "B"}}),
    )
    assert captured.signature.inputs[0].shape == ("B", 8)
    x = torch.randn(5, 8)
    same(compiled(captured)(x), torch.relu(x @ weight))


def test_shared_and_nested_names():
    def fn(batch, items):
        return batch["x"] * batch["mask"] + items[0]

    args = ({"x": torch.randn(1, 8), "mask": torch.randn(1, 1)}, [torch.randn(1, 8)])
    dynamic = {
        "batch.x": {0: "B"},
        "batch.mask": {0: Dim("B", min=1, max=64)},
        "items.0": {-2: "B"},
    }
    captured = capture(fn, args, config=Config(dynamic=dynamic))
    assert captured.signature.dims == (DimSpec("B", 1, 64),)
    attrs = captured.mod["main"].attrs
    assert dict(attrs["tir_var_lower_bound"]) == {"B": 1} and dict(
        attrs["tir_var_upper_bound"]
    ) == {"B": 64}
    big = ({"x": torch.randn(6, 8), "mask": torch.randn(6, 1)}, [torch.randn(6, 8)])
    same(compiled(captured)(*big), fn(*big))


def test_zero_is_admitted():
    config = Config(dynamic={"x": {0: Dim("B", min=0)}})
    captured = capture(lambda x: x + 1, (torch.randn(0, 8),), config=config)
    assert captured.signature.dims == (DimSpec("B", 0, None),)


def test_symbols_carry_the_users_names():
    config = Config(dynamic={"x": {0: "rows"}, "y": {1: "columns"}})
    captured = capture(lambda x, y: x @ y, (torch.randn(5, 8), torch.randn(8, 5)), config=config)
    text = captured.mod.script()
    assert "rows" in text and "columns" in text and "s77" not in text
    assert captured.signature.outputs[0].shape == ("rows", "columns")


def test_examples_avoid_coincidences():
    leaves = [("x", torch.empty(8, 8)), ("y", torch.empty(8, 3))]
    free = shapes.resolve({"x": {0: "A"}, "y": {0: "B"}}, ("x", "y"), leaves)
    sizes = shapes.example_sizes(free, leaves)
    assert len({*sizes.values(), 8, 3}) == 4
    bounded = shapes.resolve({"x": {0: Dim("A", max=8)}}, ("x", "y"), leaves)
    assert 2 <= shapes.example_sizes(bounded, leaves)["A"] <= 8


def test_same_tensor_twice_is_two_inputs():
    x = torch.randn(4, 4)
    captured = capture(lambda a, b: a - b, (x, x))
    y = torch.randn(4, 4)
    same(compiled(captured)(x, y), x - y)

"""Inputs are seeded, cover the edges within bounds, and keep to the example's ranges."""

import torch

from tests.verify.fakes import block_case, signature
from tvmcap.verify.inputs import InputSet, draw, edge_sizes, example_sizes, plan_inputs


def test_sets_start_with_the_example_and_stay_in_bounds():
    args, sig = block_case(m=8)
    sets = plan_inputs(sig, args, seed=3)
    assert [(s.kind, s.sizes["B"]) for s in sets[:3]] == [("normal", 8), ("large", 8), ("zeros", 8)]
    assert sorted(s.sizes["B"] for s in sets[3:]) == [1, 2, 13, 127, 128, 129]
    assert len({s.seed for s in sets}) == len(sets)
    bounded = signature({"x": ("float32", ("B", 4))}, [("float32", ("B", 4))], [("B", 2, 40)])
    assert {s["B"] for s in edge_sizes(bounded, {"B": 16}, "quick")} == {2, 13, 16, 40}


def test_two_dimensions_vary_one_at_a_time_and_negative_extents_are_left_out():
    sig = signature(
        {"x": ("float32", ("B", "T"))},
        [("float32", ("B", "T - 2"))],
        [("B", 1, None), ("T", 1, 64)],
    )
    sizes = edge_sizes(sig, {"B": 4, "T": 8}, "quick")
    assert all(s["B"] == 4 or s["T"] == 8 for s in sizes)
    assert min(s["T"] for s in sizes) == 2 and max(s["T"] for s in sizes) == 64


def test_sizes_without_an_example_are_within_bounds():
    sig = signature({"x": ("float32", ("B",))}, [("float32", ("B",))], [("B", 1, 8)])
    assert example_sizes(sig) == {"B": 8}
    assert example_sizes(sig, [torch.zeros(3)]) == {"B": 3}


def test_draws_repeat_and_differ_by_kind():
    args, sig = block_case()
    one = draw(sig, InputSet("normal", {"B": 5}, 7), args)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one, draw(sig, InputSet("normal", {"B": 5}, 7), args), strict=True)
    )
    assert one[0].shape == (5, 64)
    assert abs(float(one[1].std()) - 1 / 8) < 0.02
    large = draw(sig, InputSet("large", {"B": 5}, 7), args)
    assert float(large[0].std()) > 30
    assert not any(t.any() for t in draw(sig, InputSet("zeros", {"B": 5}, 7), args))
    odd = draw(sig, InputSet("nonfinite", {"B": 5}, 7), args)
    assert 0 < int((~odd[0].isfinite()).sum()) <= 3


def test_ranges_follow_the_example():
    shape = (64, 32)
    sig = signature(
        {
            n: (d, shape)
            for n, d in [("i", "int64"), ("m", "bool"), ("p", "float32"), ("k", "float32")]
        },
        [("float32", shape)],
    )
    mask = torch.zeros(shape).masked_fill(torch.rand(shape) < 0.3, float("-inf"))
    like = [torch.randint(5, 9, shape), torch.rand(shape) < 0.9, torch.rand(shape) * 3, mask]
    i, m, p, k = draw(sig, InputSet("normal", {}, 0), like)
    assert int(i.min()) >= 5 and int(i.max()) <= 8 and i.unique().numel() == 4
    assert 0.8 < float(m.float().mean()) < 1
    assert 0 <= float(p.min()) and float(p.max()) <= 3
    assert set(k.unique().tolist()) == {0.0, float("-inf")}


def test_positions_are_not_compared_among_equal_values():
    inputs, dims = {"x": ("float32", ("B", 4))}, [("B", 1, None)]
    values = signature(inputs, [("float32", ("B",))], dims)
    places = signature(inputs, [("int64", ("B",))], dims)
    assert "zeros" in {s.kind for s in plan_inputs(values)}
    assert "zeros" not in {s.kind for s in plan_inputs(places)}

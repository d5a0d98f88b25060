"""Calibration inputs: what fits the signature, and the range of sizes they cover."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tvmcap.base.errors import QuantizeError
from tvmcap.base.signature import DimSpec, Signature, TensorSpec
from tvmcap.verify import samples

LEAF = {"kind": "leaf", "index": 0}
SIGNATURE = Signature(
    inputs=(TensorSpec("x", "float32", ("B", 4)),),
    outputs=(TensorSpec("out0", "float32", ("B", 2)),),
    dims=(DimSpec("B", 2, 64),),
    in_tree={"kind": "tuple", "items": [LEAF]},
    out_tree=LEAF,
    arg_names=("x",),
)


def test_an_input_that_fits_is_copied() -> None:
    x = torch.ones(6, 4)
    (leaf,) = samples.leaves(SIGNATURE, (x,), 0)
    x.zero_()
    assert leaf.shape == (6, 4) and bool((leaf == 1).all())


@pytest.mark.parametrize(
    "args",
    [
        (),
        (torch.ones(6, 4), torch.ones(6, 4)),
        (torch.ones(6, 5),),
        (torch.ones(4),),
        (torch.ones(65, 4),),
        (torch.ones(1, 4),),
        (torch.ones(6, 4, dtype=torch.float16),),
        ("text",),
    ],
)
def test_an_input_that_does_not_fit_is_named(args) -> None:
    with pytest.raises(QuantizeError, match="calibration input 3"):
        samples.leaves(SIGNATURE, args, 3)


def test_an_input_is_bound_as_a_call_of_the_library_is() -> None:
    """Equal names are equal sizes, and what is no tensor has the value it was built with."""
    items = [LEAF, {"kind": "leaf", "index": 1}, {"kind": "const", "value": True}]
    both = replace(
        SIGNATURE,
        inputs=(*SIGNATURE.inputs, TensorSpec("m", "bool", ("B",))),
        in_tree={"kind": "tuple", "items": items},
        arg_names=("x", "m", "causal"),
    )
    x, mask = torch.ones(6, 4), torch.ones(6, dtype=torch.bool)
    for args in ((x, mask), (x.numpy(), mask, True)):
        assert [tuple(t.shape) for t in samples.leaves(both, args, 0)] == [(6, 4), (6,)]
    with pytest.raises(QuantizeError, match=r"input 2 does not fit.*expected B = 6 .*got \[5\]"):
        samples.leaves(both, (x, mask[:5]), 2)
    with pytest.raises(QuantizeError, match="expected True, the value it was built with"):
        samples.leaves(both, (x, mask, False), 0)


def test_an_input_without_elements_measures_nothing() -> None:
    from_zero = replace(SIGNATURE, dims=(DimSpec("B", 0, 64),))
    with pytest.raises(QuantizeError, match=r"input 1 makes outputs without elements \(B=0\)"):
        samples.leaves(from_zero, (torch.ones(0, 4),), 1)
    # beside others an empty tensor may stand: a cache that is empty yet
    both = replace(
        from_zero,
        inputs=(*SIGNATURE.inputs, TensorSpec("cache", "float32", ("T", 4))),
        dims=(*SIGNATURE.dims, DimSpec("T", 0, 64)),
        in_tree={"kind": "tuple", "items": [LEAF, {"kind": "leaf", "index": 1}]},
        arg_names=("x", "cache"),
    )
    one = samples.leaves(both, (torch.ones(6, 4), torch.ones(0, 4)), 0)
    sizes = [[len(t) for t in part] for _, part in samples.spread(both, [one])]
    assert sizes == [[6, 0], [2, 0], [3, 0]]


def test_one_size_is_spread_over_the_declared_range() -> None:
    inputs = [[torch.randn(32, 4)], [torch.randn(32, 4)]]
    found = [leaves for _, leaves in samples.spread(SIGNATURE, inputs)]
    assert sorted(one[0].shape[0] for one in found) == [2, 2, 16, 16, 32, 32]
    assert any(torch.equal(one[0], inputs[1][0][:16]) for one in found)
    assert [name.partition(" (")[0] for name, _ in samples.spread(SIGNATURE, inputs)[:3]] == [
        "calibration input 0",
        "calibration input 1",
        "calibration input 0, cut to B=2",
    ]
    several = [[torch.randn(32, 4)], [torch.randn(8, 4)]]
    assert len(samples.spread(SIGNATURE, several)) == 2


def test_positions_in_a_dimension_are_not_left_without_it() -> None:
    """Reading there is past the end of a tensor."""
    inputs = (TensorSpec("x", "float32", ("T", 4)), TensorSpec("at", "int64", ("N",)))
    dims = DimSpec("T", 0, 64), DimSpec("N", 3, 64)
    signature = replace(SIGNATURE, inputs=inputs, dims=dims)
    x = torch.randn(32, 4)

    def sizes(*at):
        found = samples.spread(signature, [[x, torch.tensor(at)]])
        return sorted((len(one[0]), len(one[1])) for _, one in found)

    assert sizes(20, 2, 0) == [(32, 3)]
    assert sizes(15, 2, 0) == [(16, 3), (32, 3)]
    assert sizes(0, 0, 0) == [(1, 3), (16, 3), (32, 3)]
    assert sizes(32, 2, 0) == [(1, 3), (16, 3), (32, 3)]  # no position among 32


def test_the_last_quarter_is_held_out() -> None:
    inputs = [[torch.zeros(2, 4)] for _ in range(8)]
    seen, held_out = samples.split(inputs)
    assert (len(seen), len(held_out)) == (6, 2)
    assert [len(part) for part in samples.split(inputs[:1])] == [1, 0]
    assert [len(part) for part in samples.split(inputs[:2])] == [1, 1]


def test_the_example_is_measured_on_unless_it_tells_nothing() -> None:
    example = torch.full((5, 4), 3.0) + torch.randn(5, 4)
    ((leaf,),), what = samples.of_example(SIGNATURE, [example], 0)
    assert torch.equal(leaf, example) and what == "example input"
    for blank in (torch.ones(5, 4), torch.zeros(0, 4)):
        drawn, what = samples.of_example(SIGNATURE, [blank], 0)
        again, _ = samples.of_example(SIGNATURE, [blank], 0)
        assert torch.equal(drawn[0][0], again[0][0]) and "drawn" in what
        assert drawn[0][0].numel() > 1 and drawn[0][0].std() > 0

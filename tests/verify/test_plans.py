"""Plans of layers: what given ranges must say, and what layers that are kept still decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from tvmcap.base.errors import QuantizeError
from tvmcap.base.quantization import Quantize
from tvmcap.base.ranges import Range, Ranges
from tvmcap.graph.layers import Layer
from tvmcap.verify.plans import check_ranges, make_plans

STATIC = Quantize(activations="static", smooth=0.5)
SEEN = Range(-4, 4, 2, (4.0, 1.0))


def two_layers():
    """Two layers of one input; the weights of the first decide what it is divided by."""
    x = relax.Var("x", relax.TensorType((3, 2), "float32"))
    weights = np.full((2, 3), 4, np.float32), np.full((2, 5), 0.25, np.float32)
    return [
        Layer(f"{n}.weight", x, None, relax.const(w)) for n, w in zip("ab", weights, strict=True)
    ]


def ranges(*names, **others):
    return Ranges({f"{n}.weight": SEEN for n in names}, clipping=STATIC.clipping, **others)


def test_a_layer_that_is_kept_leaves_the_others_their_clips() -> None:
    """What was divided when the clip was found is divided by the same in the build."""
    found, seen = two_layers(), ranges("a", "b")
    both = make_plans(found, found, STATIC, seen)
    assert both["a.weight"].smooth == both["b.weight"].smooth == (1.0, 0.5)
    rest = {"b.weight": both["b.weight"]}
    assert make_plans(found, found, STATIC, replace(seen, kept=("a.weight",))) == rest
    assert make_plans(found, found[1:], STATIC, seen) == rest  # kept by its name
    assert make_plans(found, found[1:], STATIC, ranges("b"))["b.weight"].smooth == (4.0, 2.0)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (STATIC, ranges("a"), r"do not cover layer 'b\.weight'"),
        (STATIC, ranges("a", "b", "c"), r"of another model: they name layer 'c\.weight'"),
        (Quantize(), ranges(kept=("c",)), r"they name layer 'c', .* has a\.weight, b\.weight"),
        (
            replace(STATIC, smooth=0.4),
            ranges("a", "b"),
            r"clips for .*'smooth': 0\.5.* asks for .*'smooth': 0\.4.*; calibrate again",
        ),
        (STATIC, replace(ranges("a", "b"), clipping={}), "clips for no such scheme"),
        (
            STATIC,
            Ranges({"a.weight": SEEN, "b.weight": replace(SEEN, channels=())}, (), STATIC.clipping),
            "do not cover layer 'b.weight'",
        ),
    ],
)  # fmt: skip
def test_ranges_of_another_model_or_scheme(options, given, message) -> None:
    found = two_layers()
    with pytest.raises(QuantizeError, match=message):
        check_ranges(found, found, options, given)


def test_ranges_that_fit() -> None:
    found = two_layers()
    check_ranges(found, found, STATIC, ranges("a", "b", kept=("a.weight",)))
    check_ranges(found, found[:1], STATIC, ranges("a"))
    check_ranges(found, found, Quantize(smooth=0.9), ranges("a", "b"))
    check_ranges(found, found, Quantize("fp8", "static", 0.5), ranges("a", "b"))
    check_ranges(found, found, Quantize(), Ranges())

"""What verify holds a quantized library to: its noise, on inputs like those it was made for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.verify.fakes import FakeCompiled, block, block_case
from tvmcap.base.config import Config
from tvmcap.base.errors import VerifyError
from tvmcap.base.numerics import compare
from tvmcap.base.quantization import Quantize
from tvmcap.verify.accuracy import hold
from tvmcap.verify.again import pool
from tvmcap.verify.check import verify
from tvmcap.verify.inputs import InputSet, pick


def library(ours, options, loaded=False, calibration=None):
    """Return a quantized library whose code is ``ours``, a batch far from normal, its call."""
    args, sig = block_case(m=40)
    args[0][:, 7] *= 500
    lib = FakeCompiled(ours, block, args, sig, loaded=loaded)
    lib.manifest.quantization = {"options": options.to_json()}
    lib.config = Config(quantize=options, calibration=calibration)
    return lib, args


def noisy(db):
    """Return the block with noise ``db`` below its result."""
    generator = torch.Generator().manual_seed(1)

    def ours(x, w, b):
        y = block(x, w, b)
        noise = torch.randn(y.shape, generator=generator)
        return y + noise * float(y.square().mean().sqrt()) * 10 ** (-db / 20)

    return ours


def test_noise_within_the_budget_passes_and_more_does_not() -> None:
    assert verify(library(noisy(25), Quantize(budget_db=20))[0]).ok
    assert verify(library(noisy(18), Quantize(budget_db=20))[0]).ok  # few numbers: partly luck
    report = verify(library(noisy(8), Quantize(budget_db=20))[0])
    failed = [c for c in report.checks if not c.ok]
    assert {c.kind for c in failed} == {"normal"}
    assert {c.sizes["B"] for c in failed} >= {2, 13, 40, 127, 129}
    with pytest.raises(VerifyError, match=r"dB of 14 .*\n.*budget is 14 dB, 6 below .*budget_db"):
        report.require()
    assert report.to_json()["ok"] is False


@pytest.mark.parametrize("calibrated", [False, True])
def test_inputs_are_of_the_example_or_of_calibration(calibrated) -> None:
    """Values that a static range clips say nothing of a library made for others."""
    seen = []

    def clipped(x, w, b):
        seen.append(x)
        return block(x.clamp(-tops, tops), w, b)

    batch = block_case(m=9)[0]
    given = [batch] if calibrated else None
    lib, args = library(clipped, Quantize(activations="static"), calibration=given)
    source = batch[0] if calibrated else args[0]
    tops = source.abs().amax(0)
    assert verify(lib).ok
    rows = {tuple(row) for row in source.tolist()}
    assert sum({tuple(row) for row in x.tolist()} <= rows for x in seen) >= 6  # not large or zeros


def test_a_static_library_without_inputs_that_suit_it_is_held_to_no_noise() -> None:
    for activations, ok in (("static", True), ("token", False)):
        lib, _ = library(noisy(3), Quantize(activations=activations), loaded=True)
        assert verify(lib, reference=block).ok is ok


def test_draws_are_pooled_by_all_their_noise() -> None:
    want = np.ones(1000, np.float32)
    few, most = (
        hold(compare(y, want, want), y, want, want, 20.0) for y in (want + 0.12, want + 0.01)
    )
    assert not few.ok and most.ok and pool(few, most).ok and pool(most, few).ok
    assert not pool(few, few).ok and pool(few, few).noise == 2 * few.noise
    exact = hold(compare(want, want, want), want, want, want, 20.0)
    assert (
        exact.ok and not pool(exact, hold(compare(-want, want, want), -want, want, want, 20.0)).ok
    )


def test_what_is_as_good_as_eager_needs_no_signal() -> None:
    want, ours = np.zeros(8, np.float32), np.full(8, 1e-9, np.float32)
    result = compare(ours, want, ours)
    assert result.ok and hold(result, ours, want, ours, 20.0).ok
    large = np.full(8, 1.0, np.float32)
    assert not hold(compare(large, want, ours), large, want, ours, 20.0).ok
    assert hold(compare(large, want, ours), large, want, ours, -math.inf).ok


def test_equal_names_are_equal_places() -> None:
    (x, w, b), sig = block_case(m=5)
    picked = pick(sig, InputSet("normal", {"B": 12}, 3), (x, w, b))
    assert picked[0].shape == (12, 64) and picked[1] is not None
    assert torch.equal(picked[1], w) and torch.equal(picked[2], b)
    assert torch.equal(pick(sig, InputSet("normal", {"B": 5}, 3), (x, w, b))[0], x)
    assert pick(sig, InputSet("normal", {"B": 0}, 3), (x, w, b))[0].shape == (0, 64)
    other = pick(sig, InputSet("normal", {"B": 12}, 4), (x, w, b))
    assert not torch.equal(other[0], picked[0])

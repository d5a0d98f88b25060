"""Operators that slice, view, fill or reduce dynamic axes, through the whole front end."""

from __future__ import annotations

import pytest
import torch
from running import same
from torch import nn

import tvmcap
from tvmcap.base.config import Config, Dim
from tvmcap.capture.export import capture

TABLE = torch.randn(128, 16)
WEIGHT = torch.randn(16, 8)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def built(fn, args, dynamic, *others):
    """Capture, build and compare at ``args`` and ``others``.

    A match_cast to a bare dimension makes CanonicalizeBindings run until the process dies, so
    there must be none.
    """
    captured = capture(fn, args, config=Config(dynamic=dynamic))
    assert "match_cast" not in captured.mod.script()
    library = tvmcap.build(fn, args, dynamic=dynamic, target="llvm", tune="none", verify=False)
    for example in (args, *others):
        with torch.no_grad():
            same(library(*example), fn(*example))


def positions(x):
    return x + TABLE[: x.shape[0]], x + TABLE[3 : 3 + x.shape[0]], x - TABLE[-x.shape[0] :]


def test_a_constant_sliced_to_a_dynamic_size():
    dynamic = {0: {0: Dim("S", 2, 100)}}
    built(positions, (torch.randn(5, 16),), dynamic, (torch.randn(100, 16),))


def test_an_argument_sliced_to_a_dynamic_size():
    built(
        lambda x, table: x + table[: x.shape[1]],
        (torch.randn(3, 5, 16), TABLE),
        {0: {1: Dim("S", 2, 128)}},
        (torch.randn(3, 128, 16), TABLE),
    )


def slices(x):
    return {
        "difference": x[1:] - x[:-1],
        "steps": x[1::2],
        "tail": x[-3:],
        "first": x[0],
        "last": x[-1],
        "turned": torch.cat([x[1:], x[:1]]),
    }


def test_slices_of_a_dynamic_axis():
    built(slices, (torch.randn(6, 16),), {0: {0: Dim("B", 4)}}, (torch.randn(9, 16),))


def test_the_last_of_an_inner_dynamic_axis():
    built(lambda x: x[:, -1], (torch.randn(2, 7, 16),), {0: {1: "S"}}, (torch.randn(2, 3, 16),))


def assigns(x):
    y, z = x * 2, x * 3
    y[:-1] = x[1:]
    z[1:] = 0
    return y, z


def test_assignment_to_a_slice_of_a_dynamic_axis():
    built(assigns, (torch.randn(6, 16),), {0: {0: Dim("B", 3)}}, (torch.randn(9, 16),))


def reduces(x):
    return {
        "einsum": torch.einsum("bi,ij->bj", x, WEIGHT),
        "ranges": x + torch.arange(15, -1, -1) + torch.arange(x.shape[0] - 1, -1, -1)[:, None],
        "variance": (x.var(0), x.var(), x.var(0, correction=0), x.std(0, keepdim=True)),
        "repeat": x[:1].repeat(x.shape[0], 1) + x,
    }


def test_reductions_and_products_of_a_dynamic_axis():
    built(reduces, (torch.randn(5, 16),), {0: {0: "B"}}, (torch.randn(9, 16),))


@pytest.mark.filterwarnings("ignore:var")
def test_variance_of_one_row_is_nan():
    built(lambda x: x.var(0), (torch.randn(5, 16),), {0: {0: "B"}}, (torch.randn(1, 16),))


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm(affine):
    layer = nn.InstanceNorm1d(16, affine=affine).eval()
    built(layer, (torch.randn(2, 16, 7),), {0: {0: "B", 2: "S"}}, (torch.randn(4, 16, 9),))


def test_ranges_of_every_kind():
    def fn(x):
        return x + torch.arange(15, -1, -1) + torch.arange(0, 32, 2) + torch.arange(1.6, 0, -0.1)

    built(fn, (torch.randn(5, 16),), None)

"""Weights in common: what layers of them are called, and that they are held and counted once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.quantizing import build, data, sqnr_db


class Tied(nn.Module):
    """One weight in two products, and one of which two parts are used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(64, 64), nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        self.both = nn.Parameter(torch.randn(128, 64) / 8)

    def forward(self, x):
        up, down = self.both.chunk(2)
        y = self.tied(torch.relu(self.first(x)))
        return F.linear(torch.relu(F.linear(y, up)), down)


class Twice(nn.Module):
    """One weight in two convolutions, which are products or nests."""

    def __init__(self, groups):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = (nn.Conv2d(32, 32, 3, padding=1, groups=groups) for _ in range(2))
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.tied(torch.relu(self.first(x)))


class Cross(nn.Module):
    """Queries, and keys with values, from parts of one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cross = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        memory = x[:, :3].tanh()
        return self.cross(x, memory, memory, need_weights=False)[0]


@torch.no_grad()
def test_layers_of_tied_and_split_weights_have_names(tmp_path) -> None:
    model, x = Tied(), data(16, 64, seed=1)
    lib = build(model, x, tmp_path, quantize={"keep": ("both#2",)}, dynamic=None)
    holds = {a.name: a.scheme for a in lib.accuracy.layers}
    quantized = dict.fromkeys(("first.weight", "first.weight#2", "both"), "int8")
    assert holds == {**quantized, "both#2": "kept"}
    assert sqnr_db(model(x), lib(x)) >= 34


def test_layers_of_equal_weights_have_names_of_their_own(tmp_path) -> None:
    """As those of an nn.TransformerEncoder, which copies its layer, before training."""
    first = nn.Linear(64, 64)
    model = nn.Sequential(first, nn.ReLU(), copy.deepcopy(first), nn.ReLU(), copy.deepcopy(first))
    options = {"quantize": {"keep": ("2",)}, "dynamic": None}
    lib = build(model, data(16, 64, seed=1), tmp_path, **options)
    holds = {a.name: a.scheme for a in lib.accuracy.layers}
    assert holds == {"0.weight": "int8", "2.weight": "kept", "4.weight": "int8"}


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "dynamic"), [("int8", {0: {0: "B"}}), ("int8-weight-only", None)]
)
def test_a_tied_weight_is_held_and_counted_once(scheme, dynamic, tmp_path) -> None:
    model, x = Tied(), data(16, 64, seed=1)
    lib = build(model, x, tmp_path, quantize=scheme, dynamic=dynamic)
    report, square, columns = lib.accuracy, 64 * 64, 4 * 64
    assert report.bytes_before == 4 * (square + 128 * 64)
    assert report.bytes_after == square + columns + 128 * (64 + 4)
    assert report.constants_after < 0.32 * report.constants_before  # biases and scales included
    (second,) = (a for a in report.layers if a.name == "first.weight#2")
    assert (second.bytes_before, second.bytes_after) == (0, 0)
    if scheme == "int8":
        assert_packed_once(lib, 1)


@torch.no_grad()
def test_a_tied_weight_is_packed_once(tmp_path) -> None:
    assert_packed_once(build(Tied(), data(16, 64, seed=1), tmp_path), 4)


def assert_packed_once(lib, size: int) -> None:
    """Of ``size`` bytes a weight; beside them biases, scales and corrections of columns."""
    weights = size * (64 * 64 + 128 * 64)
    got = lib.scoreboard(baselines=False).weight_bytes
    assert weights <= got <= weights + 3 * 4 * 4 * 64 + 64


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 8])
def test_tied_convolutions_hold_one_weight(groups, tmp_path) -> None:
    model, x = Twice(groups), data(2, 32, 6, 7, seed=1)
    lib = build(model, x, tmp_path, quantize="int8", dynamic=None)
    bits = 32 * 32 * 9 // groups
    assert bits <= lib.accuracy.constants_after <= bits + 6 * 4 * 32 + 64
    assert lib.accuracy.bytes_after == bits + 4 * 32
    assert sqnr_db(model(x), lib(x)) >= 34


@torch.no_grad()
def test_the_projections_of_cross_attention_are_quantized(tmp_path) -> None:
    model, x = Cross(), data(3, 5, 32, seed=2)
    lib = build(model, x, tmp_path, quantize="int8", dynamic=None)
    assert {a.name: a.scheme for a in lib.accuracy.layers} == {
        "cross.in_proj_weight": "int8",
        "cross.in_proj_weight#2": "int8",
        "cross.out_proj.weight": "int8",
    }
    assert sqnr_db(model(x), lib(x)) >= 34

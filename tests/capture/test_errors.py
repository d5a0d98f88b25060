"""Code and options that cannot be captured: each a clear error that says where and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tvmcap.base.config import Config, Dim
from tvmcap.base.errors import (
    CaptureError,
    ConfigError,
    DataDependentError,
    MutationError,
    UnsupportedOperatorError,
)
from tvmcap.capture.export import capture, fingerprint

X = torch.randn(4, 8)
B = {"x": {0: "B"}}


def branches(x):
    if x.sum() > 0:
        return x
    return -x


def takes_item(x):
    return x * x.sum().item()


def selects(x):
    return x[x > 0]


@pytest.mark.parametrize("fn", [branches, takes_item, selects, lambda x: x * x.tolist()[0][0]])
def test_data_dependent(fn):
    with pytest.raises(DataDependentError, match=r"test_errors\.py:\d+"):
        capture(fn, (X,))


def test_data_dependent_names_the_line():
    with pytest.raises(DataDependentError, match=r"if x\.sum\(\) > 0:"):
        capture(branches, (X,))


def test_every_unsupported_operator_is_listed_at_once():
    def fn(x):
        a = torch.linalg.det(x.view(2, 4, 4))
        return torch.cdist(x, x), a, torch.cdist(x, -x)

    with pytest.raises(UnsupportedOperatorError) as info:
        capture(fn, (X,))
    text = str(info.value)
    assert "_cdist_forward.default (2x)" in text and "det" in text and "torch.cdist(x, x)" in text


@pytest.mark.parametrize("cls", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_dropout_in_training_mode(cls):
    layers = cls(8, 5, 2, dropout=0.5)
    with pytest.raises(CaptureError, match=r"dropout runs in training mode.*model\.eval\(\)"):
        capture(layers, (X,))
    capture(layers.eval(), (X,))


def test_custom_operator():
    @torch.library.custom_op("tvmcap_tests::gelu", mutates_args=())
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    gelu.register_fake(lambda x: torch.empty_like(x))
    with pytest.raises(UnsupportedOperatorError, match=r"tvmcap_tests.*register_op"):
        capture(lambda x: gelu(x), (X,))


def test_torch_cond():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(UnsupportedOperatorError, match=r"torch\.where"):
        capture(fn, (X,))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count += 1
        return x + self.count


def adds_in_place(x):
    x.add_(1)
    return x


def writes_a_slice(x):
    x[:, 0] = 0
    return x


closed = torch.zeros(8)


def changes_a_global(x):
    closed.add_(1)
    return x + closed


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (Counter(), "count"),
        (adds_in_place, "x"),
        (writes_a_slice, "x"),
        (changes_a_global, "closed"),
    ],
)
def test_mutation(fn, name):
    with pytest.raises(MutationError, match=rf"^{name} is changed in place"):
        capture(fn, (X.clone(),))


def test_changes_of_own_tensors_are_fine():
    def fn(x):
        y = x * 2
        y.add_(1)
        y[:, 0] = 0
        return y

    assert capture(fn, (X,)).signature.outputs[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), X),
        (nn.BatchNorm1d(8), X),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
    ],
)
def test_train_mode(model, x):
    with pytest.raises(CaptureError, match=r"\.eval\(\)"):
        capture(model, (x,))
    assert model.training


def test_random_numbers():
    with pytest.raises(CaptureError, match="random"):
        capture(lambda x: x + torch.rand_like(x), (X,))


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"y": {0: "B"}}, "no argument 'y'"),
        ({"xx": {0: "B"}}, "did you mean 'x'"),
        ({"x": {2: "B"}}, "axis 2 does not exist"),
        ({3: {0: "B"}}, "argument 3"),
        ({"x": {0: Dim("B", max=2)}}, "above the maximum"),
        ({"x": {0: "B", 1: "B"}}, "equal names are equal sizes"),
        ({"x": {0: Dim("B", max=8), 1: Dim("B", max=9)}}, "two sets of bounds"),
        ({"x": {0: Dim("B", max=1)}}, "at least 2"),
        ({"x": {0: 4}}, "give a name"),
    ],
)
def test_dynamic_that_does_not_fit(dynamic, words):
    with pytest.raises(ConfigError, match=words):
        capture(lambda x: x + 1, (X,), config=Config(dynamic=dynamic))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x.reshape(4, 2, 4), "B"),
        (lambda x: x.view(x.shape[0] // 2, 2, 8), r"B = 2\*_B must hold"),
        (lambda x: x * 2 if x.shape[0] > 3 else x, r"x\.shape\[0\]"),
    ],
)
def test_code_that_fixes_a_dimension(fn, words):
    with pytest.raises(CaptureError, match=words) as info:
        capture(fn, (X,), config=Config(dynamic=B))
    assert "L['leaves']" not in str(info.value) and "s77" not in str(info.value)


def test_dimensions_that_must_be_equal():
    with pytest.raises(CaptureError, match=r"use the name '[AB]' for [AB] too"):
        capture(lambda x, y: x + y, (X, X), config=Config(dynamic={"x": {0: "A"}, "y": {0: "B"}}))


def test_arguments_that_do_not_fit():
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        capture(lambda x, weight: x @ weight, (X, X.T), config=Config(constants=("weigth",)))
    with pytest.raises(CaptureError, match="do not fit"):
        capture(lambda x: x, (X, X))
    with pytest.raises(CaptureError, match=r"x is a object"):
        capture(lambda x: x, (object(),))
    with pytest.raises(CaptureError, match="returns no tensor"):
        capture(lambda x: 3, (X,))
    with pytest.raises(CaptureError, match="give a function"):
        capture(3, (X,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"could not trace the function at .*test_errors\.py"):
        capture(lambda x: x @ x, (X,))


def test_files(tmp_path):
    with pytest.raises(CaptureError, match="cannot read"):
        capture(tmp_path / "none.pt2")
    (tmp_path / "bad.pt2").write_bytes(b"not a program")
    with pytest.raises(CaptureError, match="cannot read"):
        capture(str(tmp_path / "bad.pt2"))


def test_exported_program_with_fixed_size():
    program = torch.export.export(nn.Linear(8, 4), (X,))
    with pytest.raises(CaptureError, match="export it again"):
        capture(program, config=Config(dynamic={0: {0: "B"}}))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_minimum_that_admits_a_slice_is_named(size):
    with pytest.raises(CaptureError, match=rf"Dim\('B', min={size + 2}\)"):
        capture(lambda x: x[size:], (torch.randn(7, 8),), config=Config(dynamic=B))
    config = Config(dynamic={"x": {0: Dim("B", min=size + 2)}})
    assert capture(lambda x: x[size:], (torch.randn(7, 8),), config=config)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, 2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, device="meta"), "meta tensor"),
        (torch.zeros(2, dtype=torch.uint16), "uint16"),
        (np.array(["a"]), "no dtype of PyTorch"),
    ],
)
def test_tensors_that_no_library_takes(x, words):
    for find in (capture, fingerprint):
        with pytest.raises(CaptureError, match=words):
            find(lambda x: x, (x,))


@pytest.mark.parametrize("args", [X, 3, "x", np.zeros(3)])
def test_arguments_that_are_no_tuple(args):
    for find in (capture, fingerprint):
        with pytest.raises(ConfigError, match=r"expected a tuple .*args=\(x,\)"):
            find(lambda x: x, args)
    with pytest.raises(ConfigError, match="kwargs is a Tensor"):
        capture(lambda x: x, (X,), X)


def test_constants_other_than_the_default_are_required():
    def fn(x, k=2, *, mode="a", flag):
        return x * k

    def required(*args, **kwargs):
        items = capture(fn, args, kwargs).signature.in_tree["items"]
        return [item.get("required", False) for item in items]

    assert required(X, flag=True) == [False, False, False, True]
    assert required(X, 5, flag=True) == [False, True, False, True]
    assert required(X, 2.0, mode="b", flag=True) == [False, True, True, True]

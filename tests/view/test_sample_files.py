"""Files of inputs and outputs: what comes back, and what they cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.libs import chain_signature
from tvmcap.base.errors import InputError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.view import arrays


def scalars() -> Signature:
    """Return one whose second argument and whose result have no dimension."""
    signature = chain_signature()
    one = TensorSpec("w", "float32", ())
    return replace(
        signature,
        inputs=(signature.inputs[0], one),
        outputs=(TensorSpec("out0", "float32", ()),),
    )


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_scalars_come_back_as_scalars(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"sample.{suffix}")
    x, w, out = np.random.rand(3, 8).astype("f"), np.float32(2), np.array(5, "f")
    arrays.write_sample(path, scalars(), [x.T.copy().T, w], {"out0": out})
    inputs, outputs = arrays.read_sample(path, scalars())
    assert [a.shape for a in (*inputs, outputs["out0"])] == [(3, 8), (), ()]
    np.testing.assert_array_equal(inputs[0], x)
    assert (inputs[1], outputs["out0"]) == (w, out)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.ones((3, 8), ml_dtypes.bfloat16), "float32"),  # NumPy reads it back as raw bytes
        (np.zeros((3, 8), [("a", "f4")]), "real numbers"),
        (np.ones((3, 8), "complex64"), "real numbers"),
        (np.full((3, 8), "a"), "real numbers"),
        (np.ones((0, 8), "f"), "none that has elements"),
    ],
)
def test_outputs_that_nothing_can_be_compared_with(tmp_path: Path, out: Any, words: str) -> None:
    path = str(tmp_path / "sample.npz")
    rows, eye = np.ones((len(out), 8), "f"), np.eye(8, dtype="f")
    np.savez(path, x=rows, w=eye, out0=out)
    with pytest.raises(InputError, match=words):
        arrays.read_sample(path, chain_signature())


def test_bfloat16_is_read_from_float32(tmp_path: Path) -> None:
    path, x = str(tmp_path / "sample.npz"), np.full((3, 8), 1.5, ml_dtypes.bfloat16)
    arrays.write_sample(path, chain_signature("bfloat16"), [x, x], {"out0": x.astype("f")})
    inputs, _ = arrays.read_sample(path, chain_signature("bfloat16"))
    assert inputs[0].dtype == ml_dtypes.bfloat16 and np.array_equal(inputs[0], x)

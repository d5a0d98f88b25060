"""Large weights leave the library for a file beside it, and the result stays the same."""

from __future__ import annotations

import itertools
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

from tests.libs import leaves, manifest_for
from tests.planned import TARGET, fused, mlp, mlp_reference
from tvmcap.base.errors import DamagedLibraryError
from tvmcap.base.signature import DimSpec, Signature, TensorSpec
from tvmcap.library import export, lower, weights
from tvmcap.library.plan import plan
from tvmcap.runtime.executor import Executor

WIDTHS = (8, 16, 16, 4)


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(5)
    return [rng.standard_normal(p, dtype=np.float32) / 4 for p in itertools.pairwise(WIDTHS)]


@pytest.fixture(scope="module")
def module(values):
    """An MLP with frozen weights, the second of which it uses twice, planned."""
    mod = mlp((8, 16, 16, 16, 4))
    first, twice, last = (relax.const(v) for v in values)
    named = dict(zip(("w0", "w1", "w2", "w3"), (first, twice, twice, last), strict=True))
    with TARGET:
        return plan(fused(relax.transform.BindParams("main", named)(mod)))


def signature() -> Signature:
    return Signature(
        inputs=(TensorSpec("x", "float32", ("B", 8)),),
        outputs=(TensorSpec("out0", "float32", ("B", 4)),),
        dims=(DimSpec("B"),),
        in_tree=leaves(1),
        out_tree={"kind": "leaf", "index": 0},
        arg_names=("x",),
    )


@pytest.fixture(scope="module")
def library(module, tmp_path_factory) -> Path:
    """The MLP's library with its weights beside it."""
    path = tmp_path_factory.mktemp("weights") / "mlp.so"
    bare, large = weights.lift(module, limit=0)
    export.write(lower.lower(bare, TARGET), path, manifest_for(signature()), large)
    return path


def test_below_the_limit_nothing_changes(module) -> None:
    size = weights.nbytes(module["main"])
    assert weights.lift(module, limit=size) == (module, None)
    assert weights.lift(module) == (module, None)


def test_a_tensor_counts_once(module, values) -> None:
    assert weights.nbytes(module["main"]) == sum(v.nbytes for v in values)


def test_above_the_limit_weights_stand_between_inputs_and_outputs(module, values) -> None:
    bare, large = weights.lift(module, limit=weights.nbytes(module["main"]) - 1)
    names = [p.name for p in bare["main"].params]
    assert names == ["x", *large, "out0"]
    assert not weights.constants(bare["main"])
    found = sorted(np.from_dlpack(v).tobytes() for v in large.values())
    assert set(found) == {v.tobytes() for v in values}
    relax.analysis.well_formed(bare)


def test_the_library_reads_them_from_the_file(library, values) -> None:
    manifest = export.read_manifest(library)
    assert manifest.weights is not None and manifest.weights.file == "mlp.so.safetensors"
    run = Executor(library)
    for rows in (1, 3, 9):
        x = np.random.default_rng(rows).standard_normal((rows, 8), dtype=np.float32)
        wanted = mlp_reference(x, [values[0], values[1], values[1], values[2]])
        np.testing.assert_allclose(run(x), wanted, atol=2e-6)


def test_the_file_is_safetensors(library, values) -> None:
    data = library.with_name("mlp.so.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    bodies = {data[8 + length :][slice(*e["data_offsets"])] for e in header.values()}
    assert bodies == {v.tobytes() for v in values}


def test_a_copy_without_its_weights_says_so(library, tmp_path) -> None:
    alone = tmp_path / "alone.so"
    alone.write_bytes(library.read_bytes())
    with pytest.raises(DamagedLibraryError, match="copy both files"):
        Executor(alone)


def test_other_weights_are_refused(library, tmp_path) -> None:
    export.copy_library(library, tmp_path / "other.so")
    file = tmp_path / "other.so.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedLibraryError, match="sha256 differs"):
        Executor(tmp_path / "other.so")


def test_two_inputs_of_weights_keep_their_order(values, tmp_path) -> None:
    """Two outputs and two weights of one shape: an exchange would show."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    a, b = (np.full((3, 4), v, np.float32) for v in (2.0, 5.0))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit_output(relax.op.add(x, relax.const(a)))
            second = builder.emit_output(relax.op.multiply(x, relax.const(b)))
        builder.emit_func_output(relax.Tuple([first, second]))
    with TARGET:
        bare, large = weights.lift(plan(fused(builder.get())), limit=0)
    spec = TensorSpec("x", "float32", (3, 4))
    outputs = tuple(replace(spec, name=f"out{i}") for i in range(2))
    sig = replace(signature(), inputs=(spec,), outputs=outputs, dims=(), out_tree=leaves(2))
    export.write(lower.lower(bare, TARGET), tmp_path / "two.so", manifest_for(sig), large)
    value = np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)
    total, product = Executor(tmp_path / "two.so")(value)
    np.testing.assert_allclose(total, value + 2)
    np.testing.assert_allclose(product, value * 5)

"""Which PrimFuncs are a matrix product, and what is read of them."""

from __future__ import annotations

import itertools

import pytest
from tvm import te, tirx

from tests.schedules.products import TARGET, product
from tvmcap.base import codegen
from tvmcap.schedules import cpu_gemm, gemm_match, simt_gemm

SIDES = list(itertools.product(["mk", "km"], ["kn", "nk"]))


def test_reads_every_layout() -> None:
    for a_layout, layout in SIDES:
        gemm = gemm_match.read(product(rows=24, a_layout=a_layout, layout=layout))
        assert (gemm.a_layout, gemm.layout) == (a_layout, layout)
        assert (gemm.rows, gemm.n, gemm.k, gemm.batch) == (24, 128, 64, ())
        assert gemm.a_pitch == (64 if a_layout == "mk" else 24)
        assert gemm.b_pitch == (128 if layout == "kn" else 64)


@pytest.mark.parametrize(("a_layout", "layout"), SIDES)
@pytest.mark.parametrize("batch", [(3,), ("H", 2), (1, 3)], ids=str)
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_reads_batches(a_layout, layout, batch, shared) -> None:
    """An operand without the batch is one matrix for all; rows of such a batch are one batch."""
    func = product(a_layout=a_layout, layout=layout, batch=batch, shared=shared)
    gemm = gemm_match.read(func)
    if shared == "b" and a_layout == "mk":
        assert gemm.batch == () and len(gemm.row_dims) == len(batch) + 1
        return
    assert [e if isinstance(e, int) else e.name for e in gemm.batch] == list(batch)
    assert (gemm.a_batched, gemm.b_batched) == (shared != "a", shared != "b")
    assert [e.name for e in gemm.row_dims] == ["B"]


@pytest.mark.parametrize("a_layout", ["mk", "km"])
def test_a_batch_of_one_is_none(a_layout) -> None:
    gemm = gemm_match.read(product(rows=24, a_layout=a_layout, batch=(1, 1)))
    assert gemm.batch == () and gemm.row_dims == (1, 1, 24) and gemm.rows == 24


def test_rows_of_several_dimensions() -> None:
    gemm = gemm_match.read(product(rows=24, lead=("T", 5), batch=(3,)))
    assert gemm.batch == (3,) and len(gemm.row_dims) == 3
    assert gemm_match.evaluate(gemm.rows, {"T": 7}) == 7 * 5 * 24


@pytest.mark.parametrize("symbolic", ["rows", "n", "k"])
@pytest.mark.parametrize("extent", ["T", "8*T"])
def test_any_extent_may_be_symbolic(symbolic, extent) -> None:
    func = product(**{"rows": 24, symbolic: extent})
    gemm = gemm_match.read(func)
    found = getattr(gemm, symbolic)
    assert gemm_match.evaluate(found, {"T": 3}) == (24 if "8" in extent else 3)
    assert gemm_match.is_multiple(found, 8) == gemm_match.is_multiple(found, 4) == ("8" in extent)
    assert gemm.key()[symbolic] == "*"
    assert simt_gemm.match(func, TARGET) is not None
    assert gemm.flops({"T": 2}) == 2 * 24 * 128 * 64 // {"rows": 24, "n": 128, "k": 64}[
        symbolic
    ] * (16 if "8" in extent else 2)


def test_multiples_of_numbers() -> None:
    assert gemm_match.is_multiple(24, 8) and not gemm_match.is_multiple(20, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tf32_is_for_float32_alone_and_a_key_of_its_own(dtype) -> None:
    plain, marked = (product(dtype=dtype, layout="nk", tf32=allowed) for allowed in (False, True))
    assert not gemm_match.read(plain).tf32
    assert gemm_match.read(marked).tf32 == (dtype == "float32")
    keys = [gemm_match.read(f).key() for f in (plain, marked)]
    assert (keys[0] != keys[1]) == (dtype == "float32")
    simt = [simt_gemm.match(f, TARGET).key() for f in (plain, marked)]
    assert simt[0] == simt[1] == keys[0]  # it computes in float32 either way


def test_keys_tell_layouts_and_batches_apart() -> None:
    made = [
        product(batch=(3,), a_layout=a, layout=b, shared=shared, rows=64, n=64, gelu=False)
        for (a, b), shared in itertools.product(SIDES, ["", "a"])
    ]
    keys = {str(gemm_match.read(f).key()) for f in made}
    assert len(keys) == len(made)


def nest(left, right, spatial, k=16, names="abc"):
    """Return ``C[spatial] = sum_k A[left] * B[right]``; letters index, "1" is a dimension of 1."""
    extents = {"b": 3, "h": 2, "m": 24, "n": 40, "k": k, "1": 1}
    a, b = (
        te.placeholder([extents[c] for c in side], "float32", name=name)
        for side, name in ((left, "A"), (right, "B"))
    )
    axis = te.reduce_axis((0, k), name="k")

    def cell(*index):
        at = {**dict(zip(spatial, index, strict=True)), "k": axis, "1": 0}
        return te.sum(a[tuple(at[c] for c in left)] * b[tuple(at[c] for c in right)], axis=axis)

    return te.create_prim_func([a, b, te.compute([extents[c] for c in spatial], cell)])


@pytest.mark.parametrize(
    ("left", "right", "spatial"),
    [
        ("bmk", "bnkh", "bhmn"),
        ("mbk", "bkn", "bmn"),  # heads innermost: no layout of A
        ("bmk", "kbn", "bmn"),
        ("b1mk", "bhkn", "bhmn"),  # broadcast along a part of the batch
        ("bmk", "hkn", "bhmn"),
        ("bhkm", "b1kn", "bhmn"),
        ("mk", "mk", "m"),
        ("mnk", "kn", "mn"),
    ],
)
def test_leaves_alone(left, right, spatial) -> None:
    func = nest(left, right, spatial)
    assert gemm_match.read(func) is None
    assert simt_gemm.match(func, TARGET) is None
    assert cpu_gemm.match(func, codegen.make_target("llvm")) is None


@pytest.mark.parametrize(
    ("left", "right", "spatial", "wanted"),
    [
        ("mk", "k", "m", ("mk", "nk", 1, 24)),  # a matrix and a vector, in either order
        ("k", "kn", "n", ("mk", "kn", 1, 40)),
        ("1mk", "bkn", "bmn", ("mk", "kn", 24, 40)),
        ("b1mk", "b1kn", "b1mn", ("mk", "kn", 24, 40)),
        ("kn", "mk", "mn", ("mk", "kn", 24, 40)),  # the factors the other way round
    ],
)
def test_reads_vectors_and_ones(left, right, spatial, wanted) -> None:
    gemm = gemm_match.read(nest(left, right, spatial))
    assert (gemm.a_layout, gemm.layout, gemm.rows, gemm.n) == wanted


def test_other_reductions_are_none() -> None:
    a = te.placeholder((24, 16), "float32", name="A")
    axis = te.reduce_axis((0, 16), name="k")
    largest = te.compute((24,), lambda i: te.max(a[i, axis] * a[i, axis], axis=axis))
    assert gemm_match.read(te.create_prim_func([a, largest])) is None
    assert gemm_match.read(tirx.PrimFunc([], tirx.Evaluate(0))) is None

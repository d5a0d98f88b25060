"""The Hopper GEMM template: what it takes, what fits the machine, its defaults, its records."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
from dataclasses import replace
from typing import Any

import pytest
from tvm import te, tirx

from tests.schedules.products import TARGET, product
from tvmcap.base import codegen
from tvmcap.base.errors import RecordError
from tvmcap.kernel import spaces
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules import hopper_reasons
from tvmcap.schedules.hopper_gemm import TILES, Knobs
from tvmcap.schedules.hopper_plan import SHARED_BYTES, plan
from tvmcap.schedules.skinny_plan import skinny_bytes

SIDES = list(itertools.product(("mk", "km"), ("kn", "nk")))
TF32 = {"dtype": "float32", "out": "float32", "layout": "nk", "tf32": True}
PROBLEMS: list[dict[str, Any]] = [
    {"n": 4096, "k": 4096},
    {"n": 8, "k": 8},
    {"n": 1000, "k": 520, "layout": "nk", "out": "float32"},
    {"n": 257, "k": 64, "layout": "nk"},
    {"n": 4096, "k": 4096, "rows": "8*T", "a_layout": "km"},
    {"n": 512, "k": 128, "batch": ("H",), "rows": 64},
    {"n": "8*T", "k": 512},
    {"n": 512, "k": "8*T", "layout": "nk"},
    {"n": 512, "k": 512, **TF32},
]


def problem(**shape: Any) -> Any:
    gemm = hopper.match(product(**shape), TARGET)
    assert gemm is not None
    return gemm


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("a_layout", "layout"), SIDES)
def test_takes_a_product_with_its_epilogue(dtype, a_layout, layout) -> None:
    func = product(rows=24, dtype=dtype, a_layout=a_layout, layout=layout)
    gemm = hopper.match(func, TARGET)
    assert gemm is not None and (gemm.a_layout, gemm.layout) == (a_layout, layout)
    assert (gemm.rows, gemm.n, gemm.k) == (24, 128, 64)
    template, found = spaces.find(func, TARGET)
    assert template is hopper.TEMPLATE and found.key() == gemm.key()


@pytest.mark.parametrize("batch", [(3,), ("H", 2)], ids=str)
@pytest.mark.parametrize("shared", [(), ("a",)], ids=str)
def test_takes_batches(batch, shared) -> None:
    gemm = problem(batch=batch, shared=shared, a_layout="km", rows="8*T")
    assert len(gemm.batch) == len(batch) and gemm.a_batched == (not shared) and gemm.b_batched


@pytest.mark.parametrize(("n", "k"), [("8*T", 64), (128, "8*T"), ("8*T", "8*T")])
def test_takes_symbolic_columns_and_depth(n, k) -> None:
    gemm = problem(n=n, k=k)
    assert [isinstance(e, int) for e in (gemm.n, gemm.k)] == [e != "8*T" for e in (n, k)]


def test_takes_tf32_where_it_is_allowed() -> None:
    assert problem(**TF32).tf32 and problem(n=3, k=68, **TF32).n == 3


def mixed(left: str, right: str, sums: str) -> Any:
    """Return a product of two dtypes with sums in a third."""
    x, w = te.placeholder((64, 64), left), te.placeholder((64, 64), right)
    k = te.reduce_axis((0, 64), name="k")

    def cell(i: Any, j: Any) -> Any:
        return te.sum(x[i, k].astype(sums) * w[k, j].astype(sums), axis=k)

    return te.create_prim_func([x, w, te.compute((64, 64), cell)])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float32", "out": "float32"}, "float32 without allow_tf32"),
    ({**TF32, "layout": "kn"}, "K innermost"),
    ({**TF32, "a_layout": "km", "rows": 64}, "K innermost"),
    ({**TF32, "k": 66}, "rows of A of 264 bytes"),
    ({"n": 100}, "rows of B of 200 bytes are no multiple of 16"),
    ({"n": "T"}, "may be no multiple of 16 bytes"),
    ({"k": 60}, "rows of A of 120 bytes"),
    ({"k": "T", "layout": "nk"}, "rows of A of "),
    ({"rows": "T", "a_layout": "km"}, "rows of A of "),
    ({"rows": 20, "a_layout": "km"}, "rows of A of 40 bytes"),
    ({"n": 60, "batch": (2,)}, "rows of B of 120 bytes"),
]


@pytest.mark.parametrize(("shape", "reason"), REFUSED, ids=str)
def test_says_why_it_refuses(shape, reason) -> None:
    func = product(**shape)
    assert hopper.match(func, TARGET) is None
    assert reason in (hopper.TEMPLATE.refuse(func, TARGET) or "")


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        (("float16", "bfloat16", "float32"), "operands of float16 and bfloat16"),
        (("float16", "float16", "float16"), "sums in float16"),
    ],
)
def test_refuses_other_dtypes(dtypes, reason) -> None:
    func = mixed(*dtypes)
    assert hopper.match(func, TARGET) is None
    assert reason in (hopper.TEMPLATE.refuse(func, TARGET) or "")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"kind": "cuda", "arch": "sm_80"}, "sm_80 has no wgmma"),
        ({"kind": "cuda", "arch": "sm_90"}, "without the a of sm_90a"),
        ({"kind": "llvm"}, None),
    ],
    ids=str,
)
def test_refuses_other_machines(target, reason) -> None:
    target = codegen.make_target(target)
    assert hopper.match(product(), target) is None
    said = hopper_reasons.refuse(product(), target)
    assert said is None if reason is None else reason in said


def test_has_no_reason_where_it_serves_or_there_is_no_product() -> None:
    stripped = tirx.PrimFunc([], tirx.Evaluate(0))
    assert hopper.match(stripped, TARGET) is None
    assert hopper_reasons.refuse(stripped, TARGET) is None
    assert hopper_reasons.refuse(product(), TARGET) is None


@functools.cache
def points_of(index: int) -> tuple[Any, list[Knobs]]:
    """Return a problem and its space."""
    gemm = problem(**PROBLEMS[index])
    return gemm, hopper.space(gemm, TARGET)


EACH = pytest.mark.parametrize("index", range(len(PROBLEMS)), ids=lambda i: str(PROBLEMS[i]))


@EACH
def test_the_space_holds_only_what_runs(index) -> None:
    gemm, points = points_of(index)
    assert points and len(set(points)) == len(points)
    limit = int(TARGET.attrs["max_shared_memory_per_block"])
    for knobs in (k for k in points if not k.swapped):
        p = plan(gemm, knobs)
        assert hopper.fits(gemm, knobs)
        assert (knobs.bm, knobs.bn, knobs.groups) in TILES and p.accumulators <= 144
        assert p.cluster <= 8 and p.shared_bytes <= SHARED_BYTES <= limit
        assert knobs.stages == 16 or not hopper.fits(gemm, replace(knobs, stages=knobs.stages + 1))
        assert not knobs.tma_store or (knobs.split == 1 and hopper.stores_through_tma(gemm))
        assert knobs.split == 1 or not isinstance(gemm.k, int) or knobs.split <= p.k_steps
        assert gemm.layout == "nk" or p.group_columns % 64 == 0
    groups = {k.groups for k in points if not k.swapped}
    assert groups == {"rows", "tiles"} | ({"columns"} if gemm.n != 8 else set())


@EACH
def test_operands_are_exchanged_only_where_that_kernel_serves(index) -> None:
    gemm, points = points_of(index)
    swapped = [k for k in points if k.swapped]
    plain = gemm.a_layout == "mk" and not gemm.batch and not gemm.tf32
    assert bool(swapped) == (plain and isinstance(gemm.n, int) and isinstance(gemm.k, int))
    for knobs in swapped:
        assert knobs.bm in (64, 128) and knobs.bn in (8, 16, 32, 64)
        assert knobs.split <= min(knobs.bn, 8) and 2 <= knobs.stages <= 16
        assert skinny_bytes(gemm, knobs) <= SHARED_BYTES
        assert (knobs.cluster_m, knobs.cluster_n, knobs.group) == (1, 1, 1)
        unread = (knobs.persistent, knobs.late, knobs.tma_store, knobs.warm)  # one value each
        assert not any(unread)


GOOD = Knobs(128, 128, 64, 3, "rows", late=True)


@pytest.mark.parametrize(
    "change",
    [
        {"bn": 100},
        {"groups": "columns"},
        {"bm": 256, "bn": 256},
        {"stages": 12},
        {"cluster_m": 3},
        {"cluster_m": 4, "cluster_n": 4},
        {"split": 16, "tma_store": False},
        {"split": 2},  # sums leave straight from registers
        {"bn": 112, "split": 4, "tma_store": False},
        {"bn": 112, "cluster_m": 4},
        {"dependent": False, "warm": True},
        {"split": 2, "tma_store": False, "persistent": False},
        {"groups": "tiles", "persistent": False},
        {"swapped": True},
    ],
    ids=str,
)
def test_what_does_not_fit(change) -> None:
    gemm = problem(n=4096, k=4096, layout="nk")
    assert hopper.fits(gemm, GOOD) and not hopper.fits(gemm, replace(GOOD, **change))


def test_what_fits_depends_on_the_problem() -> None:
    def fits(change: dict[str, Any], **shape: Any) -> bool:
        return hopper.fits(problem(**{"n": 512, "k": 512, **shape}), replace(GOOD, **change))

    assert fits({}, layout="nk") and not fits({}, n=516, layout="nk")  # TMA stores 16 bytes
    assert not fits({}, layout="nk", out="float32") and not fits({}, n="T", layout="nk")
    assert fits({"tma_store": False}, n=516, layout="nk")
    assert fits({"bn": 96}, layout="nk") and not fits({"bn": 96}, layout="kn")
    assert fits({}, n=128) and not fits({}, n=64)  # half of the tile would be empty
    four = {"split": 4, "tma_store": False}
    assert fits(four, k=200) and not fits(four, k=192)  # a CTA without a k step
    assert fits(four, k="8*T")


@EACH
def test_defaults_are_in_the_space(index) -> None:
    gemm, points = points_of(index)
    default, ranged = hopper.default(gemm, TARGET), hopper.ranges(gemm, TARGET)
    assert {default, *(knobs for _, knobs in ranged)} <= set(points)
    bounds = [bound for bound, _ in ranged]
    assert bounds[-1] is None and bounds[:-1] == sorted(set(bounds[:-1]) & set(hopper.RANGES))
    assert len(ranged) <= len(hopper.RANGES)
    assert all(a != b for (_, a), (_, b) in itertools.pairwise(ranged))


def test_few_rows_exchange_the_operands_and_many_do_not() -> None:
    gemm = problem(n=4096, k=4096)
    ranged = hopper.ranges(gemm, TARGET)
    assert ranged[0][1].swapped and not ranged[-1][1].swapped
    assert hopper.default(problem(rows=1, n=4096, k=4096), TARGET).swapped
    assert not hopper.default(problem(rows=8192, n=4096, k=4096), TARGET).swapped


def test_knobs_are_canonical_json() -> None:
    knobs = Knobs(bn=192, groups="rows", late=True)
    text = hopper.TEMPLATE.knobs_to_json(knobs)
    assert hopper.TEMPLATE.knobs_from_json(text) == knobs
    wrong = ("{}", text.replace("192", '"192"'), text.replace("true", "1"), "[]", "nonsense")
    for other in (*wrong, text.replace('"rows"', "1")):
        with pytest.raises(RecordError):
            hopper.TEMPLATE.knobs_from_json(other)


def test_the_key_forgets_rows_and_knows_the_rest() -> None:
    def key(**shape: Any) -> str:
        return str({k: v for k, v in problem(**shape).key().items() if k != "rows"})

    shapes: list[dict[str, Any]] = [{}, {"gelu": False}, {"n": 256}, {"dtype": "float16"}]
    shapes += [{"layout": "nk"}, {"a_layout": "km", "rows": "8*T"}, {"batch": (3,)}, TF32]
    assert len({key(**shape) for shape in shapes}) == len(shapes)
    assert problem().flops({"B": 7}) == 2 * 7 * 128 * 64


def imported(module: str) -> set[str]:
    """Return the modules of schedules/ that a module imports, directly or through them."""
    found, names = set(), [module]
    while names:
        tree = ast.parse(inspect.getsource(importlib.import_module(names.pop())))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            several = [f"{node.module}.{a.name}" for a in node.names]
            here = several if node.module == "tvmcap.schedules" else [node.module]
            new = {n for n in here if n.startswith("tvmcap.schedules.")} - found
            found |= new
            names += new
    return found


READING = {f"tvmcap.schedules.{name}" for name in ("gemm_match", "gemm_axes", "cpu_build")}
"""They read the product off the PrimFunc, whose digest is in a record's key. The estimate and the
reasons choose among settings and problems, and change no kernel."""


def test_the_source_hash_covers_every_module_that_writes_kernels() -> None:
    kernels = {"tvmcap.schedules.hopper_kernel", "tvmcap.schedules.skinny_kernel"}
    writing = kernels.union(*(imported(name) for name in kernels)) - READING
    assert writing == set(hopper.TEMPLATE.modules)
    others = {f"tvmcap.schedules.hopper_{name}" for name in ("estimate", "reasons")}
    assert imported(hopper.__name__) == writing | READING | others

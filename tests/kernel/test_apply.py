"""Apply: a record where one exists, else the template's default, else a rule; and coverage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.planned import TARGET, fused, machine, mlp, mlp_reference, run
from tvmcap.kernel import apply, spaces, tasks, variants
from tvmcap.kernel.records import Record
from tvmcap.library.plan import plan


def record(task, rows, median, knobs=None, trace=None) -> Record:
    """Return a measurement of a task at a size."""
    key = task.key
    sizes = {"rows": rows} if knobs is not None else {"s0": rows}
    return Record(
        kind=key.kind,
        workload=task.workload,
        workload_hash=key.workload_hash,
        sizes=sizes,
        template=key.template,
        template_hash=key.template_hash,
        knobs=None if knobs is None else dict(vars(knobs)),
        trace=trace,
        target={},
        tvm="",
        median_us=median,
        p10_us=median,
        p90_us=median,
        samples=9,
        error=None,
        seed=0,
        date="",
    )


@pytest.fixture(scope="module")
def module():
    """One product, symbolic rows."""
    return fused(mlp((8, 48)))


@pytest.fixture(scope="module")
def task(module):
    (found,) = tasks.extract(module, TARGET, spaces.find)
    return found


@pytest.fixture(scope="module")
def settings(task):
    """Three settings of the template with the least code."""
    points = task.template.space(task.problem, TARGET)
    return sorted(points, key=lambda k: (k.mr * k.nv, k.unroll, k.direct))[:3]


def scheduled(module, records=()):
    coverage: list[apply.Served] = []
    done = apply.schedule(module, TARGET, lambda task: list(records), coverage)
    return done, coverage


def ranges(coverage):
    return list(coverage[0].ranges)


def check(module, sizes) -> None:
    main = machine(plan(module))
    w = np.random.default_rng(1).standard_normal((8, 48), dtype=np.float32) / 3
    for rows in sizes:
        x = np.random.default_rng(rows).standard_normal((rows, 8), dtype=np.float32)
        (got,) = run(main, [x, w], [(rows, 48)])
        np.testing.assert_allclose(got, mlp_reference(x, [w]), atol=5e-6)


def test_without_records_the_default(module) -> None:
    done, (served,) = scheduled(module)
    assert served.served_by == "template:cpu_gemm" and not served.tuned and served.tunable
    assert served.reason == "no record; the template's default" and list(served.ranges) == ["any"]
    assert all(
        f.attrs["tirx.is_scheduled"]
        for f in done.functions.values()
        if isinstance(f, tirx.PrimFunc)
    )
    tvm.ir.assert_structural_equal(done["main"], module["main"])


def test_one_record_decides_around_its_size_and_the_default_elsewhere(
    module, task, settings
) -> None:
    mine = next(k for k in settings if k != task.template.default(task.problem, TARGET))
    default = task.template.knobs_to_json(task.template.default(task.problem, TARGET))
    done, (served,) = scheduled(module, [record(task, 16, 3.0, mine)])
    assert served.tuned and served.reason == ""
    wanted = {"<=4": default, "<=45": task.template.knobs_to_json(mine), "any": default}
    assert served.ranges == wanted  # geometric means of 1, 16, 128
    assert list(served.records) == ["rows=16"] and "3.0 us" in served.records["rows=16"]
    check(done, (1, 4, 5, 40, 45, 46))


def test_the_order_of_records_does_not_matter(module, task, settings) -> None:
    made = [record(task, n, 1.0, settings[k]) for n, k in ((1, 0), (16, 0), (128, 2), (512, 2))]
    for order in (made, made[::-1]):
        done, coverage = scheduled(module, order)
        assert ranges(coverage) == ["<=45", "any"]
        assert coverage[0].ranges["any"] == task.template.knobs_to_json(settings[2])
    names = [g.name_hint for g in done.functions if g.name_hint.endswith("_upto45")]
    assert len(names) == 1
    check(done, (1, 16, 45, 46, 50))


def test_where_the_reduction_varies_its_largest_size_decides(task, settings) -> None:
    """A weight's gradient sums over the rows: the number of its own is fixed."""
    made = [
        replace(record(task, 16, us, settings[k]), sizes={"rows": 16, "s0": size})
        for size, k, us in ((1, 0, 1.0), (1, 1, 2.0), (2048, 1, 30.0), (2048, 2, 20.0))
    ]
    for order in (made, made[::-1]):
        times = apply._times(task, order)
        assert list(times) == [16] and list(times[16].items()) == [
            (settings[2], 20.0),
            (settings[1], 30.0),
        ]


def test_equal_neighbours_share_a_kernel(module, task, settings) -> None:
    made = [record(task, n, 1.0, settings[k]) for n, k in ((1, 0), (16, 0), (128, 1), (512, 1))]
    _, coverage = scheduled(module, made)
    assert ranges(coverage) == ["<=45", "any"]  # sqrt(16 * 128)
    assert len(coverage[0].records) == 4


def test_no_more_variants_than_pay(module, task, settings) -> None:
    """The sizes that are closest share a kernel, the larger one's, until few enough are left."""
    rows = [4**i for i in range(variants.MAX_VARIANTS)]
    rows[-1:] = [rows[-1], rows[-1] + 1, rows[-1] + 2]
    made = [record(task, n, 1.0, settings[i % 2]) for i, n in enumerate(rows)]
    done, coverage = scheduled(module, made)
    assert len(coverage[0].ranges) == variants.MAX_VARIANTS
    bounds = [int(r.removeprefix("<=")) for r in ranges(coverage)[:-1]]
    assert bounds == sorted(set(bounds)) and bounds[-1] < rows[-3]
    last = settings[(len(rows) - 1) % 2]
    assert coverage[0].ranges["any"] == task.template.knobs_to_json(last)
    kernels = [g.name_hint for g, f in done.functions.items() if isinstance(f, tirx.PrimFunc)]
    assert len(kernels) == variants.MAX_VARIANTS


def test_a_static_size_takes_its_own_record_else_a_near_one_else_the_default(settings) -> None:
    mod = fused(mlp((8, 48), rows=20))
    (task,) = tasks.extract(mod, TARGET, spaces.find)
    default = task.template.default(task.problem, TARGET)
    far, near, exact = (
        record(task, n, 1.0, k) for n, k in zip((500, 16, 20), settings, strict=True)
    )
    for records, wanted in (
        ([far, near], settings[1]),
        ([far, near, exact], settings[2]),
        ([far], default),
    ):
        _, (served,) = scheduled(mod, records)
        assert served.ranges == {"any": task.template.knobs_to_json(wanted)}


def test_kernels_of_one_structure_share_a_task_and_a_record() -> None:
    mod = fused(mlp((16, 16, 16, 16)))
    done, coverage = scheduled(mod)
    assert [s.calls for s in coverage] == [3]
    kernels = [f for f in done.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert all(f.attrs["tirx.is_scheduled"] for f in kernels)


def softmax(rows="B"):
    builder = relax.BlockBuilder()
    extent = tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    x = relax.Var("x", relax.TensorType((extent, 64), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.softmax(x))
        builder.emit_func_output(y)
    return fused(builder.get())


def test_a_loop_nest_without_a_record_goes_by_rule() -> None:
    _, (served,) = scheduled(softmax())
    assert (
        served.served_by.startswith("rule:") and served.reason == "no record" and not served.tuned
    )


def test_a_trace_that_does_not_apply_is_reported() -> None:
    mod = softmax()
    (task,) = tasks.extract(mod, TARGET, spaces.find)
    _, (served,) = scheduled(mod, [record(task, 16, 2.0, trace=[["nonsense"], []])])
    assert served.served_by.startswith("rule:") and not served.tuned
    assert served.reason == "no record's trace applies to the symbolic sizes"


def test_what_is_too_small_to_tune_says_so() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.exp(x))
        builder.emit_func_output(y)
    _, (served,) = scheduled(fused(builder.get()))
    assert not served.tunable and served.reason == "too small to tune"
    assert served.to_json()["tuned"] is False


def test_a_batch_is_no_rows(settings) -> None:
    """The variant of a batched product is chosen by the rows of one product, as its records are."""
    builder = relax.BlockBuilder()
    n = tirx.Var("B", "int64")
    x = relax.Var("x", relax.TensorType((6, n, 8), "float32"))
    w = relax.Var("w", relax.TensorType((6, 8, 32), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(y)
    mod = fused(builder.get())
    (task,) = tasks.extract(mod, TARGET, spaces.find)
    points = task.template.space(task.problem, TARGET)
    made = [record(task, 4, 1.0, points[0]), record(task, 64, 9.0, points[-1])]
    done, _ = scheduled(mod, made)
    conditions = [
        b.value.cond
        for block in plan(done)["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.If)
    ]
    (condition,) = conditions
    rng = np.random.default_rng(0)
    main = machine(plan(done))
    for rows in (3, 16, 17):
        a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((6, rows, 8), (6, 8, 32)))
        (got,) = run(main, [a, b], [(6, rows, 32)])
        np.testing.assert_allclose(got, a.astype(np.float64) @ b, atol=1e-5)
    assert "6" not in str(condition).split("<=")[0]

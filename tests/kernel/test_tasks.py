"""Tasks: what is worth tuning, at which sizes, under which key."""

from __future__ import annotations

import fake_template as fake
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from tests.schedules.products import TARGET, product
from tvmcap.kernel import check, database, measure, prim_func, tasks
from tvmcap.schedules import gemm_match, simt_gemm


def no_template(func, target):
    return None


def extract(mod, find=no_template):
    return tasks.extract(mod, fake.target(), find)


def test_names_of_variables_and_functions_do_not_matter() -> None:
    (a,) = extract(fake.module(name="B"))
    (b,) = extract(fake.module(name="tokens"))
    (c,) = extract(fake.module(k=64))
    assert a.key == b.key
    assert a.key != c.key
    assert (
        tasks.make_task(a.func.with_attr("global_symbol", "other"), fake.target(), no_template).key
        == a.key
    )


def test_template_key_covers_static_and_symbolic_rows() -> None:
    (symbolic,) = extract(fake.module(), fake.find)
    (static,) = extract(fake.module(rows=16), fake.find)
    assert symbolic.key == static.key
    assert symbolic.key.template == "fake" and symbolic.key.template_hash
    assert symbolic.record_sizes({"B": 16}) == static.record_sizes({}) == {"rows": 16}


def product_task(**case):
    func = product(**{"dtype": "float32", "layout": "nk", **case})
    return tasks.make_task(func, TARGET, lambda f, target: (simt_gemm.TEMPLATE, gemm_match.read(f)))


def test_tf32_is_another_task_and_bound_or_sent_it_stays_so() -> None:
    plain, allowed = (product_task(tf32=v, rows="B") for v in (False, True))
    assert plain.key != allowed.key and plain.workload["tf32"] != allowed.workload["tf32"]
    bound = tasks.bind(allowed, {"B": 24})
    sent = tvm.ir.load_json(tvm.ir.save_json(bound))
    for func in (bound, sent):
        gemm = gemm_match.read(func)
        assert gemm.tf32 and gemm.rows == 24
    args = {task: measure.Workload(task, {"B": 24}, 0).args for task in (plain, allowed)}
    assert {check.precision(a) for a in args[plain]} == {"float32"}
    assert {check.precision(a) for a in args[allowed]} == {"tf32"}
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((64, 2048)), rng.standard_normal((2048, 64))
    exact = (x @ w).astype(np.float32)
    x10, w10 = ((a.astype(np.float32).view(np.int32) & -(1 << 13)).view(np.float32) for a in (x, w))
    assert check.mismatch(x10 @ w10, exact, "tf32") is None
    x7 = (x.astype(np.float32).view(np.int32) & -(1 << 18)).view(np.float32)
    assert check.mismatch(x7 @ w10, exact, "tf32") is not None


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ({"rows": "B"}, [{"rows": 24}]),
        ({"rows": 16, "n": "B"}, [{"rows": 16, "s0": 24}]),
        ({"rows": 16, "k": "8*B"}, [{"rows": 16, "s0": 24}]),
        ({"rows": "B", "lead": ("B",)}, [{"rows": 576}]),
        ({"rows": "B", "n": "T"}, [{"rows": 24, "s1": 7}]),
    ],
    ids=str,
)
def test_records_name_the_sizes_that_are_no_part_of_the_rows(case, wanted) -> None:
    task = product_task(**case, gelu=False)
    sizes = {v.name: {"B": 24, "T": 7}[v.name] for v in task.vars}
    assert [task.record_sizes(sizes)] == wanted
    assert database.sizes_of(task, wanted[0]) in (sizes, None if "lead" in case else sizes)


def test_equal_kernels_are_one_task_with_a_count() -> None:
    (task,) = extract(fake.module(k=32, n=32, calls=3))
    assert task.count == 3


def test_equal_problems_of_other_rows_are_tasks_of_one_key() -> None:
    a, b = fake.module(rows=16), fake.module(rows=32)
    mod = tvm.IRModule({})
    for prefix, part in (("a", a), ("b", b)):
        kernel = tvm.ir.GlobalVar(f"{prefix}_matmul")
        mod[kernel] = part["matmul"]
        renamed = tvm_ffi.structural_map(
            part["main"],
            (tvm.ir.GlobalVar, lambda g, to=kernel: to if g.name_hint == "matmul" else g),
        )
        mod[prefix] = renamed.with_attr("global_symbol", prefix)
    found = extract(mod, fake.find)
    assert [t.record_sizes({}) for t in found] in (
        [{"rows": 16}, {"rows": 32}],
        [{"rows": 32}, {"rows": 16}],
    )
    assert found[0].key == found[1].key


def test_sizes_keep_to_the_bounds() -> None:
    (task,) = extract(fake.module())
    assert task.sizes() == [{"B": 1}, {"B": 16}, {"B": 64}]
    assert task.sizes({"B": [3, 5]}) == [{"B": 3}, {"B": 5}]
    assert extract(fake.module(rows=16))[0].sizes() == [{}]


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (1, None, [1, 16, 128, 512]),
        (1, 8192, [1, 16, 128, 512]),
        (20, 100, [100]),
        (600, 900, [900]),
    ],
)
def test_representative_sizes(low: int, high: int | None, expected: list[int]) -> None:
    (task,) = extract(fake.module())
    bounds = {"B": (low, high)}
    assert [
        s["B"] for s in tasks.make_task(task.func, fake.target(), no_template, bounds).sizes()
    ] == expected


def test_small_elementwise_kernels_are_not_tasks() -> None:
    def relu(rows: int) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((rows, 1024), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                out = builder.emit_output(builder.emit(relax.op.nn.relu(x)))
            builder.emit_func_output(out)
        return relax.transform.LegalizeOps()(builder.get())

    assert extract(relu(4)) == []
    assert len(extract(relu(1024))) == 1


def test_bind_gives_static_code_and_leaves_the_task_alone() -> None:
    (task,) = extract(fake.module())
    before = tvm.ir.save_json(task.func)
    bound = tasks.bind(task, {"B": 7})
    assert [int(e) for e in bound.params[0].shape] == [7, 32]
    assert prim_func.size_vars(bound) == []
    assert tvm.ir.save_json(task.func) == before
    x, w = (
        np.random.default_rng(0).standard_normal((7, 32)),
        np.random.default_rng(1).standard_normal((32, 48)),
    )
    args = [tvm.runtime.tensor(a.astype("float32")) for a in (x, w, np.zeros((7, 48)))]
    tvm.compile(tvm.IRModule({"main": bound.with_attr("global_symbol", "main")}), fake.target())[
        "main"
    ](*args)
    np.testing.assert_allclose(args[2].numpy(), x @ w, rtol=1e-4, atol=1e-4)


def test_sizes_of_an_expression_of_variables() -> None:
    b, t = tirx.Var("b", "int64"), tirx.Var("t", "int64")
    free = [tasks.SizeVar("b", b), tasks.SizeVar("t", t)]
    assert tasks.evaluate(b * t + 1, free, {"b": 3, "t": 5}) == 16


def test_work_counts_operations_and_bytes() -> None:
    (task,) = extract(fake.module())
    flops, nbytes = tasks.work(task, {"B": 16})
    assert flops == pytest.approx(2 * 16 * 32 * 48)
    assert nbytes == 4 * (16 * 32 + 32 * 48 + 16 * 48)


def test_schedules_change_what_they_were_made_from() -> None:
    """A trap of this TVM that ``features.copy_func`` is there for: fails when TVM mends it."""
    (task,) = extract(fake.module())
    before = tvm.ir.save_json(task.func)
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": task.func.with_attr("global_symbol", "main")}))
    sch.parallel(sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])[0])
    assert tvm.ir.save_json(task.func) != before

"""Kernels and bytes are counted from the module, before and after planning, at any sizes."""

import json

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.verify.fakes import signature
from tvmcap.base.errors import LibraryError
from tvmcap.graph import fuse
from tvmcap.library import plan
from tvmcap.view.kernels import launches, size_of, table
from tvmcap.view.traffic import count, itemsize, weight_like

SIGNATURE = signature(
    {"x": ("float32", ("B", 64)), "w": ("float32", (64, 48)), "b": ("float32", (48,))},
    [("float32", ("B", 48))],
    [("B", 1, 512)],
)


@I.ir_module
class Block:
    @R.function
    def main(
        x: R.Tensor(("B", 64), "float32"),
        w: R.Tensor((64, 48), "float32"),
        b: R.Tensor((48,), "float32"),
    ) -> R.Tensor(("B", 48), "float32"):
        with R.dataflow():
            h = R.matmul(x, w)
            a = R.add(h, b)
            y = R.nn.relu(a)
            z = R.nn.softmax(y)
            R.output(z)
        return z


@pytest.fixture(scope="module")
def unfused():
    return fuse.legalize(Block)


def row(batch):
    """Bytes of one activation of the block."""
    return batch * 48 * 4


@pytest.mark.parametrize("batch", [1, 10, 512])
def test_unfused_fused_and_planned_agree_with_a_count_by_hand(unfused, batch):
    x, weights = batch * 64 * 4, (64 * 48 + 48) * 4
    for mod, moved, kernels in (
        (unfused, x + 7 * row(batch), 4),
        (fuse.fuse(unfused), x + 3 * row(batch), 2),
    ):
        for form in (mod, plan.plan(mod)):
            traffic = count(table(form, SIGNATURE), SIGNATURE, {"B": batch})
            assert (traffic.launches, len(traffic.kernels)) == (kernels, kernels)
            assert traffic.activations == moved and traffic.weight_reads == weights
            assert traffic.hbm_bytes == moved + weights
            assert traffic.ratio == pytest.approx(moved / row(batch))
            assert sum(k.read_bytes + k.write_bytes for k in traffic.kernels) == moved + weights


def test_planned_peak_is_storage_and_outputs(unfused):
    assert count(table(unfused, SIGNATURE), SIGNATURE, {"B": 10}).peak_planned is None
    planned = table(plan.plan(fuse.fuse(unfused)), SIGNATURE)
    assert count(planned, SIGNATURE, {"B": 10}).peak_planned == 2 * row(10)


def test_the_table_is_json_and_names_what_schedules(unfused):
    stored = json.loads(json.dumps(table(plan.plan(unfused), SIGNATURE)))
    traffic = count(stored, SIGNATURE, {"B": 3}, {"matmul": "template:cpu_gemm"})
    assert traffic.kernels[0].scheduled_by == "template:cpu_gemm"
    assert (
        traffic.kernels
        == count(
            table(unfused, SIGNATURE), SIGNATURE, {"B": 3}, {"matmul": "template:cpu_gemm"}
        ).kernels
    )


def test_only_the_variant_that_runs_is_counted(unfused):
    mod = fuse.fuse(unfused)
    gvar = next(g for g in mod.get_global_vars() if "matmul" in g.name_hint)
    builder = relax.BlockBuilder(mod)
    builder.add_func(mod[gvar].with_attr("global_symbol", "small"), "small")
    builder.update_func(gvar, mod[gvar].with_attr("tvmcap.variants", [[128, "small"]]))
    rows = table(plan.plan(builder.get()), SIGNATURE)
    names = {b: [k.name for k in count(rows, SIGNATURE, {"B": b}).kernels] for b in (1, 128, 129)}
    assert names[1] == names[128] == ["small", "softmax"]
    assert names[129] == [gvar.name_hint, "softmax"]


def test_a_variant_is_scheduled_by_what_schedules_its_task(unfused):
    mod = fuse.fuse(unfused)
    gvar = next(g for g in mod.get_global_vars() if "matmul" in g.name_hint)
    small = f"{gvar.name_hint}_upto128"
    builder = relax.BlockBuilder(mod)
    builder.add_func(mod[gvar].with_attr("global_symbol", small), small)
    builder.update_func(gvar, mod[gvar].with_attr("tvmcap.variants", [[128, small]]))
    rows, by = table(plan.plan(builder.get()), SIGNATURE), {gvar.name_hint: "template:t"}
    for batch, name in ((1, small), (129, gvar.name_hint)):
        kernel = count(rows, SIGNATURE, {"B": batch}, by).kernels[0]
        assert (kernel.name, kernel.scheduled_by) == (name, "template:t")


def test_frozen_weights_count_once_and_as_weights():
    import numpy as np

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tvm.tirx.Var("B", "int64"), 8), "float32"))
    weight = relax.const(np.ones((8, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            h = builder.emit(relax.op.matmul(x, weight))
            y = builder.emit_output(relax.op.matmul(h, weight))
        builder.emit_func_output(y)
    mod = fuse.legalize(builder.get())
    sig = signature({"x": ("float32", ("B", 8))}, [("float32", ("B", 8))], [("B", 1, None)])
    traffic = count(table(mod, sig), sig, {"B": 2})
    assert traffic.weight_bytes == 256 and traffic.weight_reads == 512
    assert traffic.activations == 4 * 64


def test_sizes_are_written_as_signatures_write_them():
    b, t = tvm.tirx.Var("B", "int64"), tvm.tirx.Var("T", "int64")
    from tvmcap.base.signature import evaluate

    for expr, value in [
        (b * 4 + 1, 29),
        ((b + 3) // 4 * t, 10),
        (tvm.tirx.max(b, t) - b % 4, 4),
        (tvm.tirx.IntImm("int64", 9), 9),
    ]:
        assert evaluate(size_of(expr), {"B": 7, "T": 5}) == value


def test_a_missing_size_is_an_error(unfused):
    with pytest.raises(LibraryError, match="B"):
        count(table(unfused, SIGNATURE), SIGNATURE, {})


def test_device_kernels_of_a_primfunc_are_its_thread_nests(unfused):
    func = unfused["softmax"]
    assert launches(func) == 1
    sch = tvm.s_tir.Schedule(func)
    for block in [c for c in sch.get_child_blocks(sch.get_sblock("root"))]:
        sch.bind(sch.get_loops(block)[0], "blockIdx.x")
    nests = len(sch.get_child_blocks(sch.get_sblock("root")))
    assert nests > 1 and launches(sch.mod["main"]) == nests


def test_weights_among_arguments():
    assert weight_like(SIGNATURE) == [False, True, True]
    static = signature(
        {"x": ("float32", (16, 64)), "w": ("float32", (64, 48)), "m": ("float32", ())},
        [("float32", (16, 48))],
    )
    assert weight_like(static) == [False, True, True]


def test_item_sizes():
    names = ("float32", "bfloat16", "bool", "int64", "float8_e4m3fn", "uint8")
    assert [itemsize(n) for n in names] == [4, 2, 1, 8, 1, 1]

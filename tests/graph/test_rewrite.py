"""The walk that graph passes share: rebinding values, outputs through aliases and tuples."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.graph.rewrite import is_op, outputs_of, rebuild


@I.ir_module
class Source:
    @R.function
    def main(
        x: R.Tensor(("B", 4), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 4), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            y: R.Tensor((B, 4), "float32") = R.exp(x)
            halves = R.split(y, 2, axis=1)
            left: R.Tensor((B, 2), "float32") = halves[0]
            both = R.concat((left, left), axis=1)
            alias: R.Tensor((B, 4), "float32") = both
            out = (alias, left)
            R.output(out)
        return out


@I.ir_module
class SineForExp:
    @R.function
    def main(
        x: R.Tensor(("B", 4), "float32"),
    ) -> R.Tuple(R.Tensor(("B", 4), "float32"), R.Tensor(("B", 2), "float32")):
        B = T.int64()
        with R.dataflow():
            y: R.Tensor((B, 4), "float32") = R.sin(x)
            halves = R.split(y, 2, axis=1)
            left: R.Tensor((B, 2), "float32") = halves[0]
            both: R.Tensor((B, 4), "float32") = R.concat((left, left), axis=1)
            first: R.Tensor((B, 4), "float32") = both
            second: R.Tensor((B, 2), "float32") = left
            R.output(first, second)
        return (first, second)


@I.ir_module
class Single:
    @R.function
    def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        R.func_attr({"tir_var_upper_bound": {"B": 7}})
        with R.dataflow():
            y: R.Tensor((2,), "float32") = R.exp(x)
            z: R.Tensor((2,), "float32") = y
            R.output(z)
        return z


def sine_for_exp(builder, value):
    return relax.op.sin(value.args[0]) if is_op(value, "exp") else None


def negate_second(builder, i, output):
    return builder.emit(relax.op.negative(output)) if i == 1 else output


def origin(mod, var):
    """Follow aliases to the value behind a variable."""
    values = {b.var: b.value for block in mod["main"].body.blocks for b in block.bindings}
    while isinstance(var, relax.Var):
        var = values[var]
    return var


def test_outputs_are_seen_through_aliases_and_tuples() -> None:
    both, left = outputs_of(Source["main"])
    assert is_op(origin(Source, both), "concat")
    assert isinstance(origin(Source, left), relax.TupleGetItem)
    (only,) = outputs_of(Single["main"])
    assert only.name == "y"


def test_rebinds_what_emit_changes() -> None:
    tvm.ir.assert_structural_equal(rebuild(Source, sine_for_exp), SineForExp)


def test_changes_nothing_else() -> None:
    again = rebuild(SineForExp, lambda builder, value: None)
    tvm.ir.assert_structural_equal(again, SineForExp)


def test_attributes_other_functions_and_the_module_stay() -> None:
    mod = tvm.IRModule(
        {"main": Single["main"], "helper": SineForExp["main"].with_attr("global_symbol", "helper")},
        attrs={"note": 3},
    )
    done = rebuild(mod, sine_for_exp)
    assert done.attrs["note"] == 3
    assert dict(done["main"].attrs["tir_var_upper_bound"]) == {"B": 7}
    tvm.ir.assert_structural_equal(done["helper"], mod["helper"])


def test_finish_changes_one_output() -> None:
    done = rebuild(Source, lambda builder, value: None, negate_second)
    first, second = outputs_of(done["main"])
    assert is_op(origin(done, first), "concat") and is_op(origin(done, second), "negative")
    relax.analysis.well_formed(done)


def test_is_op() -> None:
    call = relax.op.exp(relax.Var("x", relax.TensorType((2,), "float32")))
    assert is_op(call, "sin", "exp") and not is_op(call, "sin")
    assert not is_op(None, "exp") and not is_op(call.args[0], "exp")

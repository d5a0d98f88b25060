"""Canonicalize folds constants, shares subexpressions, drops dead code, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.graph import canonicalize as passes

TARGET = tvm.target.Target({"kind": "llvm"})


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        with R.dataflow():
            c: R.Tensor((), "float32") = R.add(R.const(1.0, "float32"), R.const(2.0, "float32"))
            p: R.Tensor((B, 4), "float32") = R.exp(x)
            q: R.Tensor((B, 4), "float32") = R.exp(x)
            dead: R.Tensor((B, 4), "float32") = R.sin(x)  # noqa: F841
            alias: R.Tensor((B, 4), "float32") = p
            s: R.Tensor((B, 4), "float32") = R.add(alias, q)
            y: R.Tensor((B, 4), "float32") = R.multiply(s, c)
            R.output(y)
        return y


@I.ir_module
class Canonical:
    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        with R.dataflow():
            c: R.Tensor((), "float32") = R.add(R.const(1.0, "float32"), R.const(2.0, "float32"))
            p: R.Tensor((B, 4), "float32") = R.exp(x)
            s: R.Tensor((B, 4), "float32") = R.add(p, p)
            y: R.Tensor((B, 4), "float32") = R.multiply(s, c)
            R.output(y)
        return y


@I.ir_module
class Folded:
    @R.function
    def main(x: R.Tensor(("B", 4), "float32")) -> R.Tensor(("B", 4), "float32"):
        B = T.int64()
        with R.dataflow():
            p: R.Tensor((B, 4), "float32") = R.exp(x)
            s: R.Tensor((B, 4), "float32") = R.add(p, p)
            y: R.Tensor((B, 4), "float32") = R.multiply(s, R.const(3.0, "float32"))
            R.output(y)
        return y


@I.ir_module
class NothingToDo:
    """Alike but for one argument: what CSE must keep apart, and an argument nobody reads."""

    @R.function
    def main(x: R.Tensor(("B", 4), "float32"), unused: R.Tensor((3,), "float32")) -> R.Tuple(
        R.Tensor(("B", 4), "float32"), R.Tensor(("B", 4), "float32")
    ):
        B = T.int64()
        with R.dataflow():
            p: R.Tensor((B, 4), "float32") = R.add(x, R.const(1.0, "float32"))
            q: R.Tensor((B, 4), "float32") = R.add(x, R.const(2.0, "float32"))
            out: R.Tensor((B, 4), "float32") = R.exp(q)
            R.output(p, out)
        return (p, out)


def test_shares_and_drops() -> None:
    with TARGET:
        tvm.ir.assert_structural_equal(passes.canonicalize(Before), Canonical)


def test_folds() -> None:
    with TARGET:
        tvm.ir.assert_structural_equal(passes.fold(Canonical), Folded)


def test_folds_the_parts_of_a_split_constant() -> None:
    """As the projections of keys and values are of one weight; parts of parts, too."""
    whole = np.arange(24, dtype=np.float32).reshape(3, 8)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            halves = builder.emit(relax.op.split(relax.const(whole), 2, axis=1))
            turned = builder.emit(relax.op.permute_dims(builder.emit(halves[1])))
            parts = builder.emit(relax.op.split(turned, [1], axis=0))
            own = builder.emit(relax.op.split(x, 2, axis=1))  # no constant, and stays
            y = builder.emit(relax.op.matmul(builder.emit(own[0]), relax.const(whole[:, :4].T)))
            out = builder.emit_output(relax.op.add(y, builder.emit(parts[0])))
        builder.emit_func_output(out)
    with TARGET:
        bindings = passes.fold(builder.get())["main"].body.blocks[0].bindings
    names = [getattr(getattr(b.value, "op", None), "name", "item") for b in bindings]
    assert names == ["relax.split", "item", "relax.matmul", "relax.add"]
    np.testing.assert_array_equal(bindings[-1].value.args[1].value.numpy(), whole[:, 4:5].T)


@pytest.mark.parametrize("step", [passes.canonicalize, passes.fold])
def test_leaves_alone(step) -> None:
    with TARGET:
        tvm.ir.assert_structural_equal(step(NothingToDo), NothingToDo)
        tvm.ir.assert_structural_equal(step(Folded), Folded)


@pytest.mark.parametrize("step", [passes.canonicalize, passes.fold])
def test_keeps_attributes_of_main(step) -> None:
    main = Before["main"].with_attr("tir_var_upper_bound", {"B": 64})
    mod = tvm.IRModule({"main": main}, attrs={"note": 1})
    with TARGET:
        done = step(mod)
    assert dict(done["main"].attrs["tir_var_upper_bound"]) == {"B": 64} and done.attrs["note"] == 1

"""Which space serves a kernel, and how a weight is packed for it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from tests.planned import TARGET, fused, mlp
from tvmcap.base import codegen
from tvmcap.kernel import spaces
from tvmcap.kernel.template import Template
from tvmcap.schedules import TEMPLATES


def primfunc(mod):
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func


def test_the_first_template_that_matches(monkeypatch) -> None:
    asked = []

    def template(name, problem):
        def match(func, target):
            asked.append(name)
            return problem

        return Template(name, dict, match, *[lambda *a: []] * 4, ())

    first, second, third = template("a", None), template("b", 1), template("c", 2)
    monkeypatch.setattr(spaces, "TEMPLATES", (first, second, third))
    assert spaces.find(None, None) == (second, 1) and asked == ["a", "b"]
    monkeypatch.setattr(spaces, "TEMPLATES", (first,))
    assert spaces.find(None, None) is None


def test_names_of_templates_are_distinct() -> None:
    assert len({t.name for t in TEMPLATES}) == len(TEMPLATES)


def test_a_matrix_product_and_what_is_none() -> None:
    found = spaces.find(primfunc(fused(mlp((8, 16)))), TARGET)
    assert found is not None and found[0].name == "cpu_gemm"
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.softmax(x))
        builder.emit_func_output(y)
    assert spaces.find(primfunc(fused(builder.get())), TARGET) is None


@pytest.mark.parametrize(("k", "n"), [(3, 5), (16, 64), (7, 130)])
@pytest.mark.parametrize("mcpu", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_a_packed_weight_gives_the_same_product(k, n, mcpu) -> None:
    """Packed for any CPU; computed on this one, as the loop nest that the expression is."""
    rng = np.random.default_rng(k * n)
    x, w = (rng.standard_normal(s, dtype=np.float32) for s in ((4, k), (k, n)))
    target = codegen.make_target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    lhs = relax.TensorType((4, k), "float32")
    packed, expression = spaces.pack_weight(tvm.runtime.tensor(w), lhs, "float32", target)
    assert packed.flags.c_contiguous and packed.dtype == w.dtype
    args = [te.placeholder((4, k), "float32"), te.placeholder(packed.shape, "float32")]
    func = te.create_prim_func([*args, expression(*args)])
    kernel = tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"]
    out = tvm.runtime.tensor(np.full((4, n), np.nan, np.float32))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(packed), out)
    np.testing.assert_allclose(out.numpy(), x.astype(np.float64) @ w, atol=1e-5)


def test_on_the_gpu_weights_stay() -> None:
    weight = tvm.runtime.tensor(np.zeros((8, 8), np.float32))
    lhs = relax.TensorType((4, 8), "float32")
    assert spaces.pack_weight(weight, lhs, "float32", codegen.make_target("cuda:sm_90a")) is None

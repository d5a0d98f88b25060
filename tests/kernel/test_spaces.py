"""Which space serves a kernel, and how a weight is packed for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from tests.planned import TARGET, fused, mlp
from tests.schedules.products import product
from tvmcap.base import codegen
from tvmcap.kernel import spaces
from tvmcap.kernel.template import Template
from tvmcap.schedules import TEMPLATES, hopper_gemm, hopper_reasons


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
    func = te.create_prim_func([*args, expression("mk")(*args)])
    kernel = tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"]
    out = tvm.runtime.tensor(np.full((4, n), np.nan, np.float32))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(packed), out)
    np.testing.assert_allclose(out.numpy(), x.astype(np.float64) @ w, atol=1e-5)


def test_on_the_gpu_weights_stay() -> None:
    weight = tvm.runtime.tensor(np.zeros((8, 8), np.float32))
    lhs = relax.TensorType((4, 8), "float32")
    assert spaces.pack_weight(weight, lhs, "float32", codegen.make_target("cuda:sm_90a")) is None


REFUSED = [
    ({"k": 100}, "sm_90a", "rows of A of 200 bytes are no multiple of 16 bytes, which TMA needs"),
    ({"n": 1001}, "sm_90a", "rows of B of 2002 bytes are no multiple of 16 bytes, which TMA needs"),
    ({"dtype": "float32"}, "sm_90a", "float32 without allow_tf32"),
    ({}, "sm_80", "sm_80 has no wgmma"),
    ({}, "sm_90", "sm_90 has no wgmma without the a of sm_90a"),
    ({}, "sm_90a", None),
]


@pytest.mark.parametrize(("case", "arch", "reason"), REFUSED)
def test_why_the_hopper_template_does_not_serve(case, arch, reason) -> None:
    target = codegen.make_target({"kind": "cuda", "arch": arch})
    func = product(**case, target=target)
    assert hopper_reasons.refuse(func, target) == reason
    assert (hopper_gemm.match(func, target) is None) == (reason is not None)


def test_reasons_of_the_templates_before_the_one_that_serves(monkeypatch) -> None:
    def template(name, problem, reason):
        made = Template(name, dict, lambda *a: problem, *[lambda *a: []] * 4, ())
        return dataclasses.replace(made, refuse=None if reason is None else lambda *a: reason)

    silent, first = template("silent", None, None), template("a", None, "rows of 3 bytes")
    serving, after = template("b", 1, "unheard"), template("c", None, "unheard")
    monkeypatch.setattr(spaces, "TEMPLATES", (silent, first, serving, after))
    assert spaces.refusals(None, None) == "no a: rows of 3 bytes"
    monkeypatch.setattr(spaces, "TEMPLATES", (serving, first))
    assert spaces.refusals(None, None) == ""


def test_no_product_and_no_gpu_need_no_reason() -> None:
    func = primfunc(fused(mlp((8, 16))))
    assert hopper_reasons.refuse(func, TARGET) is None
    copy = te.create_prim_func([te.placeholder((4,), name="x")])
    assert hopper_reasons.refuse(copy, codegen.make_target("cuda:sm_80")) is None

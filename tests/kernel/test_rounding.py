"""Roundings to 16 bits in kernels of a GPU: none twice, each in one instruction."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.script import tirx as T

from tests.schedules.hopper import bodies
from tests.schedules.products import TARGET, source_of
from tvmcap.base import codegen
from tvmcap.kernel.rounding import _ROUND, single_roundings
from tvmcap.schedules import hopper_gemm as hopper


def kernel(half: str, *, done: bool, kept: bool) -> tirx.PrimFunc:
    """Round ``a + 1`` to 16 bits, keep it as float32, and use it as if it had to be rounded again.

    ``done``: as the pass leaves it. ``kept``: every store to the registers is rounded.
    """

    def rounded(value: Any) -> Any:
        if done and half == "bfloat16":
            name = "tvmcap_round_bf16"
            return T.cuda.func_call(name, value, source_code=_ROUND, return_type="float32")
        return T.Cast("float32", T.Cast(half, value))

    def again(cell: Any) -> Any:
        return cell if done and kept else rounded(cell)

    @T.prim_func(check_well_formed=False)
    def func(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")) -> None:
        cell = T.alloc_buffer((1,), "float32", scope="local")
        for i in range(4):
            cell[0] = rounded(a[i] + T.float32(1))
            if not kept:
                cell[0] = cell[0] * T.float32(3)
            b[i] = again(cell[0]) * T.float32(2)

    return func


def passed(func: tirx.PrimFunc, target: Any) -> tirx.PrimFunc:
    """Return what the pass makes of a function for a target."""
    mod = single_roundings(tvm.IRModule({"main": func.with_attr("target", target)}))
    return mod["main"].without_attr("target")


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_what_registers_hold_rounded_is_not_rounded_again(half: str, kept: bool) -> None:
    before, after = (kernel(half, done=done, kept=kept) for done in (False, True))
    tvm.ir.assert_structural_equal(passed(before, TARGET), after, map_free_vars=True)


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_75"])
def test_targets_without_the_instruction_keep_their_casts(target: str) -> None:
    before = kernel("bfloat16", done=False, kept=False)
    tvm.ir.assert_structural_equal(passed(before, codegen.make_target(target)), before)


def test_a_layer_that_keeps_its_linear_part_rounds_it_once() -> None:
    """GELU of what is saved for the backward: once an element, before both outputs."""
    rows, axis = tirx.Var("B", "int64"), te.reduce_axis((0, 64), name="k")
    x, w = (te.placeholder(shape, "bfloat16") for shape in ((rows, 64), (64, 128)))

    def term(i: Any, j: Any) -> Any:
        return x[i, axis].astype("float32") * w[axis, j].astype("float32")

    total = te.compute((rows, 128), lambda i, j: te.sum(term(i, j), axis=axis))
    saved = te.compute((rows, 128), lambda i, j: total[i, j].astype("bfloat16"))
    wide = te.compute((rows, 128), lambda i, j: saved[i, j].astype("float32"))
    out = te.compute(
        (rows, 128), lambda i, j: (wide[i, j] * te.tanh(wide[i, j])).astype("bfloat16")
    )
    func = te.create_prim_func([x, w, saved, out])
    problem = hopper.match(func, TARGET)
    knobs = hopper.Knobs()  # tiles of 128 x 128, each of a group of 128 threads
    (body,) = bodies(source_of(hopper.lower(func, problem, knobs, TARGET))).values()
    assert body.count("tvmcap_round_bf16(") == 128
    assert "((nv_bfloat16)" not in body

"""Vendor: each matmul a kernel that calls torch, transposes read in place, all else untouched."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from tvmcap.graph import vendor


def module(build, *shapes, dtype="float32"):
    """Return ``main`` of some tensors; a string in a shape is a symbolic extent."""
    builder = relax.BlockBuilder()
    names = {e: tirx.Var(e, "int64") for shape in shapes for e in shape if isinstance(e, str)}
    args = [
        relax.Var(f"x{i}", relax.TensorType([names.get(e, e) for e in s], dtype))
        for i, s in enumerate(shapes)
    ]
    with builder.function("main", args):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *args))
        builder.emit_func_output(out)
    return builder.get()


def operators(mod) -> list[str]:
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [b.value.op.name for b in bindings if isinstance(b.value, relax.Call)]


def packed(mod) -> list[tuple[int, int]]:
    """List the transposes of the calls of torch."""
    found = []
    for func in mod.functions.values():
        if isinstance(func, tirx.PrimFunc) and vendor.calls(func):
            text = func.script()
            assert text.count("T.call_packed") == 1 and vendor.MATMUL in text
            assert func.attrs["tirx.is_scheduled"]
            flags = text[text.index("T.call_packed") :].split("\n")[0].rstrip(")").split(", ")
            found.append(tuple(int("True" in f or f.strip() == "1") for f in flags[-2:]))
    return found


def test_a_product_is_a_call_and_its_epilogue_is_left() -> None:
    mod = module(lambda emit, x, w: relax.op.exp(emit(relax.op.matmul(x, w))), ("B", 8), (8, 4))
    done = vendor.leave_matmuls(mod)
    assert operators(done) == ["relax.call_tir", "relax.exp"] and packed(done) == [(0, 0)]
    relax.analysis.well_formed(done)


@pytest.mark.parametrize("axes", [None, [1, 0]])
def test_transposes_are_read_in_place(axes) -> None:
    mod = module(
        lambda emit, x, w: relax.op.matmul(x, emit(relax.op.permute_dims(w, axes))),
        ("B", 8),
        (4, 8),
    )
    done = vendor.leave_matmuls(mod)
    assert operators(done) == ["relax.call_tir"] and packed(done) == [(0, 1)]


def test_other_orders_are_not_taken_for_a_transpose() -> None:
    mod = module(
        lambda emit, x, w: relax.op.matmul(x, emit(relax.op.permute_dims(w, [1, 2, 0]))),
        (3, 5, 8),
        (4, 3, 8),
    )
    done = vendor.leave_matmuls(mod)
    assert operators(done) == ["relax.permute_dims", "relax.call_tir"]
    assert packed(done) == [(0, 0)]


def test_sums_in_float32_are_torchs_own_rounding() -> None:
    def bare(emit, x, w):
        wide = emit(relax.op.matmul(x, w, out_dtype="float32"))
        return relax.op.astype(wide, "bfloat16")

    done = vendor.leave_matmuls(module(bare, ("B", 8), (8, 4), dtype="bfloat16"))
    assert operators(done) == ["relax.call_tir"]
    assert str(done["main"].ret_ty.dtype.dtype) == "bfloat16"


def test_what_is_no_matmul_stays() -> None:
    mod = module(lambda emit, x: relax.op.exp(emit(relax.op.nn.relu(x))), ("B", 8))
    assert operators(vendor.leave_matmuls(mod)) == operators(mod) == ["relax.nn.relu", "relax.exp"]

"""Codegen: alignment of pointers, the compiler's words in errors, GPUs that are not here."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.planned import TARGET, machine, mlp, mlp_reference, planned
from tvmcap.base import codegen
from tvmcap.base.errors import BuildError
from tvmcap.library import cross, lower


@I.ir_module
class ForAnotherDevice:
    """A kernel of GPU threads, which a CPU has none of."""

    @T.prim_func(private=True, s_tir=True)
    def threads(x: T.Buffer((4,), "float32"), o: T.Buffer((4,), "float32")):
        for i in T.thread_binding(4, thread="threadIdx.x"):
            with T.sblock("o"):
                vi = T.axis.spatial(4, i)
                o[vi] = x[vi]

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), out: R.Tensor((4,), "float32")) -> R.Tuple():
        cls = ForAnotherDevice
        _ = cls.threads(x, out)
        return R.tuple()


def alignments(func):
    nodes = json.loads(tvm.ir.save_json(func))["nodes"]
    return {
        n["data"]["data_alignment"]
        for n in nodes
        if isinstance(n.get("data"), dict) and "data_alignment" in n["data"]
    }


def at_offset(array, offset):
    """Return the array's values at an address that is ``offset`` above a multiple of 64."""
    import tvm_ffi

    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert view.ctypes.data % 64 == offset
    return tvm_ffi.from_dlpack(view)


def test_promises_16_bytes_and_changes_nothing_else() -> None:
    (func,) = (
        f for f in planned(mlp((8, 8))).functions.values() if isinstance(f, tvm.tirx.PrimFunc)
    )
    assert alignments(func) == {64}
    done = lower.promise_alignment(func)
    assert 16 in alignments(done)
    assert [str(p.ty.dtype) for p in done.params] == [str(p.ty.dtype) for p in func.params]
    assert lower.promise_alignment(done) is lower.promise_alignment(done, 64) is done


@pytest.mark.parametrize("offset", [0, 16, 32, 48])
def test_runs_on_pointers_aligned_to_16_bytes(offset, kernel) -> None:
    rng = np.random.default_rng(offset)
    x, w = (rng.standard_normal(s, dtype=np.float32) for s in ((13, 24), (24, 40)))
    out = at_offset(np.full((13, 40), np.nan, np.float32), offset)
    kernel(at_offset(x, offset), at_offset(w, offset), out)
    np.testing.assert_allclose(np.from_dlpack(out), mlp_reference(x, [w]), atol=2e-5)


@pytest.fixture(scope="module")
def kernel():
    return machine(planned(mlp((24, 40))))


def test_the_compilers_words_are_kept() -> None:
    with pytest.raises(BuildError, match=r"code generation for llvm failed: \S+") as caught:
        lower.compile_module(ForAnotherDevice, TARGET)
    assert str(caught.value).split(": ", 1)[1] in str(caught.value.__cause__)


def test_a_gpu_that_is_not_here_compiles_apart(monkeypatch) -> None:
    monkeypatch.setattr(codegen, "gpu_architecture", lambda: None)
    mod = planned(mlp((8, 8)))
    target = codegen.make_target("cuda:sm_80")
    apart = lower.lower(mod, target)
    assert isinstance(apart, cross.Apart) and apart.mod is mod
    assert apart.target["arch"] == "sm_80" and apart.target["kind"] == "cuda"


def test_the_executable_is_whole() -> None:
    assert isinstance(lower.lower(planned(mlp((8, 8))), TARGET), relax.VMExecutable)

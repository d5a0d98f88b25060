"""What a host function calls, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.hosted import Hosted, calls_of, filled, tensor
from tests.library.test_plan import Before, variants
from tests.planned import TARGET, mlp, mlp_reference, module, numbers, planned
from tvmcap.base.errors import ContractError
from tvmcap.library import entry
from tvmcap.library.plan import plan


@pytest.fixture
def hosted(tmp_path):
    return lambda mod: Hosted(mod, tmp_path)


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (0, np.zeros((3, 9), np.float32)),  # another width
        (0, np.zeros((3, 8), np.float64)),
        (0, np.zeros(24, np.float32)),
        (4, np.zeros((2, 4), np.float32)),  # an output of other rows
        (5, np.zeros(400, np.float32)),  # a storage that is no bytes
        (7, 1.5),  # the index of the device
        (2, None),
    ],
)
def test_what_does_not_fit_raises(hosted, at: int, wrong) -> None:
    run = hosted(planned(mlp((8, 16, 16, 4))))
    pairs = itertools.pairwise((8, 16, 16, 4))
    x, weights = numbers(3, 8), [numbers(*pair) / pair[0] ** 0.5 for pair in pairs]
    out = filled((3, 4), "float32")
    args = [tensor(x), *map(tensor, weights), out, *run.storages(B=3), 0]
    with pytest.raises((TypeError, ValueError, RuntimeError), match="main_in_arena"):
        run.function(
            *args[:at], tensor(wrong) if hasattr(wrong, "shape") else wrong, *args[at + 1 :]
        )
    with pytest.raises((TypeError, ValueError, RuntimeError), match="main_in_arena"):
        run.function(*args[:-1])
    run.function(*args)
    np.testing.assert_allclose(out.numpy(), mlp_reference(x, weights), atol=2e-6)


def test_a_binding_that_is_no_kernel_is_refused() -> None:
    done = module(lambda b, x: [b.emit(relax.op.exp(x))], ("B", 3))
    with pytest.raises(ContractError, match=r"entry: \w+ is bound to what is no kernel: .*exp"):
        entry.add(done, TARGET)


@I.ir_module
class Apart:
    """A kernel that is compiled apart from the module and called twice by its name."""

    @T.prim_func
    def twice(xh: T.handle, oh: T.handle):
        B = T.int64()
        x = T.match_buffer(xh, (B, T.int64(16)))
        o = T.match_buffer(oh, (B, T.int64(16)))
        for i, j in T.grid(B, T.int64(16)):
            o[i, j] = x[i, j] + x[i, j]

    @R.function
    def main(x: R.Tensor(("B", 16), "float32")) -> R.Tensor(("B", 16), "float32"):
        B = T.int64()
        cls = Apart
        with R.dataflow():
            a = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((B, 16), "float32"))
            y = R.call_tir(cls.twice, (a,), out_ty=R.Tensor((B, 16), "float32"))
            R.output(y)
        return y


def test_entries_share_a_kernel_that_is_compiled_apart(hosted) -> None:
    done = plan(Apart)
    functions = {**dict(done.functions.items()), tvm.ir.GlobalVar("again"): done["main"]}
    run = hosted(tvm.IRModule(functions, attrs=done.attrs))
    x = numbers(3, 16)
    (got,) = run([x], [(3, 16)], B=3)
    np.testing.assert_array_equal(got, 4 * x)
    again, out = run.named("again_in_arena"), filled((3, 16), "float32")
    again(tensor(x), out, *run.storages(B=3), 0)
    np.testing.assert_array_equal(out.numpy(), 4 * x)


@pytest.mark.parametrize("which", ["layers", "variants", "views"])
def test_it_calls_nothing_but_kernels(which: str) -> None:
    """So that a call allocates nothing: what allocates is a call, too."""

    def viewed(b, x, w):
        product = b.emit(relax.op.matmul(x, w))
        return [b.emit(relax.op.reshape(product, (product.ty.shape.values[0] * 4,)))]

    done, wanted = {
        "layers": lambda: (planned(mlp((16, 16, 16))), 2),
        "variants": lambda: (plan(variants(Before)), 12),
        "views": lambda: (planned(module(viewed, ("B", 4), (4, 4))), 1),
    }[which]()
    kernels = {g.name_hint for g, f in done.functions.items() if isinstance(f, tirx.PrimFunc)}
    called = calls_of(done)
    assert set(called) <= kernels and called.total() == wanted

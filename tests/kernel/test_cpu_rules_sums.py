"""Long sums of the loop-nest rule are exact, and single values and sizes find their place."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from tests.kernel.test_cpu_rules import TARGET, B, compiled, fused, randn
from tests.schedules import gemm
from tvmcap.kernel import cpu_rules
from tvmcap.kernel.intrinsics import expand

torch = pytest.importorskip("torch")

#: name: function, shape of the example, sizes of a symbolic first dimension.
SUMS = {
    "first": (lambda x: x.sum(0), (6000, 40), (1, 17, 5999)),
    "middle": (lambda x: x.sum(1), (2, 6000, 40), (1, 5)),
    "last": (lambda x: x.sum(-1), (3, 40001), (1, 9)),
    "two": (lambda x: x.sum((0, 2)), (300, 20, 37), (1, 301)),
    "outer_two": (lambda x: x.sum((0, 1)), (3000, 3, 40), (1, 501)),
    "all": (lambda x: x.sum(), (301, 333), (1, 500)),
    "few": (lambda x: x.sum(0), (6001, 3), (1, 16, 999)),
    "squares": (lambda x: (x * x).sum(1), (2, 6000, 40), (1, 5)),
}


@pytest.mark.parametrize("name", SUMS)
def test_error_of_long_sums(name):
    """The error is below what one chain of additions gives, and no worse than PyTorch's."""
    fn, shape, sizes = SUMS[name]
    main = compiled(fn, (randn(*shape),), ({0: B},))
    for size in (shape[0], *sizes):
        x = randn(size, *shape[1:]) + 1
        want = fn(x.double())
        error = (main(x) - want).abs().max()
        assert error <= 2 * (fn(x) - want).abs().max() + want.abs().max() * 2**-23


@pytest.mark.parametrize("axis", [0, 1])
def test_running_sums(axis):
    """A running sum of any length is right to the last bit but one."""
    mod = fused(lambda x: x.cumsum(axis), (randn(300, 1000),), ({0: B},))
    with TARGET:
        mod = relax.backend.DispatchSortScan()(mod)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod.update_func(name, expand(cpu_rules.schedule(func, TARGET)))
    main = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())["main"]
    for size in (1, 2, 300):
        x = randn(size, 1000) + 1
        want = x.double().cumsum(axis)
        torch.testing.assert_close(
            torch.from_numpy(main(x).numpy()).double(), want, rtol=2**-23, atol=0
        )


def test_infinite_and_overflowing_sums():
    """Infinities, NaN and overflow come out as in PyTorch, and do not spread to other elements."""
    for fn, shape in ((lambda x: x.sum(1), (2, 100, 40)), (lambda x: x.sum(-1), (4, 3001))):
        main = compiled(fn, (randn(*shape),), ({0: B},))
        x = randn(*shape)
        x.flatten()[[5, 700]] = torch.tensor([float("inf"), float("nan")])
        x[1] = 3e38
        torch.testing.assert_close(main(x), fn(x), equal_nan=True, atol=1e-4, rtol=1e-4)


def test_one_bfloat16_value_in_all_lanes():
    """A value repeated along the last axis is stored right."""

    def build(bb, x):
        return bb.emit(relax.op.broadcast_to(bb.emit(relax.op.expand_dims(x, 2)), (5, 33, 8)))

    func = gemm.fused([((5, 33), "bfloat16")], build)
    x, out = randn(5, 33).bfloat16(), torch.empty(5, 33, 8, dtype=torch.bfloat16)
    gemm.compiled(expand(cpu_rules.schedule(func, TARGET)))(x, out)
    assert torch.equal(out, x[:, :, None].expand(5, 33, 8))


@T.prim_func(private=True, s_tir=True)
def first_row(
    x: T.Buffer((T.int64(1), T.int64(6)), "float32"),
    n: T.int64,
    y: T.Buffer((T.int64(6),), "float32"),
):
    """A reshape with a size among its parameters, as where the source has a computed extent."""
    for i in range(T.int64(6)):
        with T.sblock("squeeze"):
            vi = T.axis.spatial(T.int64(6), i)
            y[vi] = x[T.int64(0), vi]


def test_reshape_with_a_size_among_its_parameters():
    """The copy is between the tensors, wherever the sizes stand."""
    func = cpu_rules.schedule(first_row, TARGET).with_attr("global_symbol", "main")
    assert func.attrs[cpu_rules.RESHAPE]
    x, out = randn(1, 6), torch.zeros(6)
    tvm.compile(tvm.IRModule({"main": func}), TARGET)["main"](x, 9, out)
    assert torch.equal(out, x[0])

"""TVMScript is parsed without a search for the source of every frame of the stack."""

import inspect

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmcap.kernel import tvmscript

tvmscript.quicken()


@pytest.fixture(autouse=True)
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("searched for the source of the stack")

    monkeypatch.setattr(inspect, "getouterframes", fail)


def test_a_macro_finds_its_parser() -> None:
    factor = T.float32(3)

    @T.inline
    def scale(x):
        x[0] = x[0] * factor

    @T.prim_func(private=True)
    def main(x: T.Buffer((1,), "float32")):
        scale(x)
        scale(x)

    assert main.script().count("T.float32(3") == 2


def test_a_macro_outside_of_a_kernel_says_so() -> None:
    @T.inline
    def alone(x):
        x[0] = T.float32(0)

    with pytest.raises(RuntimeError, match="expands this macro"):
        alone(None)


def test_functions_of_a_module_are_told_from_those_alone() -> None:
    size = 4

    @I.ir_module
    class Module:
        @T.prim_func(private=True)
        def double(x: T.Buffer((size,), "float32"), y: T.Buffer((size,), "float32")):
            for i in range(size):
                y[i] = x[i] * T.float32(2)

        @R.function
        def main(x: R.Tensor((size,), "float32")) -> R.Tensor((size,), "float32"):
            cls = Module
            return R.call_tir(cls.double, (x,), out_ty=R.Tensor((size,), "float32"))

    @R.function(private=True)
    def alone(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return x

    assert {g.name_hint for g in Module.get_global_vars()} == {"double", "main"}
    assert isinstance(alone, tvm.relax.Function)


def test_the_stack_is_the_standard_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ours, wanted = tvmscript._stack(), inspect.stack()
    own, theirs = ([(f.frame, f.function, f.filename) for f in s[1:]] for s in (ours, wanted))
    assert own == theirs
    assert ours[0].code_context == wanted[0].code_context is not None

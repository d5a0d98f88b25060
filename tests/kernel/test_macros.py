"""Macros of kernels are expanded without reading the sources of the stack."""

import inspect

import pytest
import tvm
from tvm.script import tirx as T

import tvmcap.kernel.epilogue  # noqa: F401  what kernels with macros import


def doubled() -> tvm.tirx.PrimFunc:
    @T.inline
    def double(x):
        x[0] = x[0] * T.float32(2)

    @T.prim_func(private=True)
    def main(x: T.Buffer((1,), "float32")):
        double(x)
        double(x)

    return main


def test_a_macro_finds_its_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], inspect.getouterframes

    def spy(frame, *args: object) -> list:
        read.append(frame.f_code.co_name)
        return original(frame, *args)

    monkeypatch.setattr(inspect, "getouterframes", spy)
    assert doubled().script().count("T.float32(2") == 2
    assert set(read) == {"prim_func"}  # the function's decorator, and none of its macros


def test_a_macro_outside_of_a_kernel_says_so() -> None:
    @T.inline
    def alone(x):
        x[0] = T.float32(0)

    with pytest.raises(RuntimeError, match="expands this macro"):
        alone(None)

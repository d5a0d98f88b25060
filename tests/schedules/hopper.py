"""Hopper kernels of many settings in one module: how they are written, compiled and counted."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import te, tirx

from tests.schedules.products import TARGET, product
from tvmcap.base import codegen
from tvmcap.kernel import tir_pipeline
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_gemm import Knobs


@dataclass(frozen=True)
class Case:
    """A setting and the product it serves.

    ``shape`` are the arguments of ``product``, or of ``two_outputs`` where ``outs`` names their
    dtypes; ``sizes`` are the values of the symbolic dimensions to run with.
    """

    name: str
    knobs: Knobs
    shape: dict[str, Any] = field(default_factory=dict)
    outs: tuple[str, ...] = ()
    sizes: tuple[dict[str, int], ...] = ()

    @functools.cached_property
    def func(self) -> Any:
        """The fused PrimFunc."""
        return two_outputs(self.outs, **self.shape) if self.outs else product(**self.shape)

    @functools.cached_property
    def lowered(self) -> Any:
        """The kernel; the setting must be one that fits."""
        gemm = hopper.match(self.func, TARGET)
        assert gemm is not None and hopper.fits(gemm, self.knobs), self
        kernel = hopper.lower(self.func, gemm, self.knobs, TARGET)
        return kernel.with_attr("global_symbol", self.name)


def two_outputs(outs: tuple[str, ...], n: int, k: int, dtype: str = "bfloat16") -> Any:
    """Return the PrimFunc of ``u = x @ w + b`` and ``gelu(u)``."""
    rows, axis = tirx.Var("B", "int64"), te.reduce_axis((0, k), name="k")
    x, w, b = (te.placeholder(shape, dtype) for shape in ((rows, k), (k, n), (n,)))

    def term(i: Any, j: Any) -> Any:
        return x[i, axis].astype("float32") * w[axis, j].astype("float32")

    def gelu(v: Any) -> Any:
        return 0.5 * v * (1.0 + te.tanh(0.7978845608 * (v + 0.044715 * v * v * v)))

    total = te.compute((rows, n), lambda i, j: te.sum(term(i, j), axis=axis))
    plain = te.compute((rows, n), lambda i, j: total[i, j] + b[j].astype("float32"))
    first = te.compute((rows, n), lambda i, j: plain[i, j].astype(outs[0]))
    second = te.compute((rows, n), lambda i, j: gelu(plain[i, j]).astype(outs[1]))
    return te.create_prim_func([x, w, b, first, second])


def compiled(cases: list[Case]) -> Any:
    """Compile all cases to one module; its CUDA source goes through nvcc when it is exported."""
    kernels = {case.name: case.lowered for case in cases}
    with TARGET:
        return tvm.compile(tvm.IRModule(kernels), target=TARGET, tir_pipeline=tir_pipeline.TIRX)


def bodies(source: str) -> dict[str, str]:
    """Take the CUDA source apart: each kernel's definition by the name of its function."""
    parts = source.split('extern "C" __global__')[1:]
    named = {re.search(r"(\w+)_kernel\(", part): part for part in parts if "{" in part}
    return {match.group(1): part for match, part in named.items() if match}


@dataclass(frozen=True)
class Resources:
    """What ptxas gives a kernel; bytes and registers of a thread."""

    stack: int
    spilled: int
    registers: int


def resources(source: str, folder: Any) -> tuple[dict[str, Resources], str]:
    """Return the resources of every kernel, and what ptxas says of wgmma (nothing is best)."""
    (folder / "kernels.cu").write_text(source)
    command = [str(codegen.find_nvcc()), "-cubin", "-arch=sm_90a", "-std=c++17", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-diag-suppress", "177,1046", "-o", "kernels.cubin", "kernels.cu"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        stack, *spilled = re.findall(r"(\d+) bytes (?:stack frame|spill)", part)
        registers = re.findall(r"Used (\d+) registers", part)
        name = part[: part.index("_kernel'")]
        found[name] = Resources(int(stack), sum(map(int, spilled)), int(registers[0]))
    notes = [line for line in done.stderr.splitlines() if "wgmma" in line or "(C75" in line]
    return found, "\n".join(notes)

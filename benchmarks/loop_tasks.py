"""Loop nests that the cost model of CPUs learns from and is tested on: float32, 100 MFLOP or more.

Each is a function of tensor expressions, as the fused kernel of a program would be: a product, a
batch of products or a convolution, with what follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import te, topi

from tvmcap.kernel import tasks

DTYPE = "float32"
PORTABLE = "x86-64-v3"
"""The processor (AVX2) whose records are transferred to this one."""


def _relu(value: Any) -> Any:
    return te.max(value, tvm.tirx.const(0, DTYPE))


def _silu(value: Any) -> Any:
    return value / (tvm.tirx.const(1, DTYPE) + tvm.tirx.exp(-value))


_AFTER: dict[str, Callable[[Any], Any]] = {"relu": _relu, "silu": _silu}


def matmul(m: int, k: int, n: int, epilogue: str) -> Any:
    """Return x [m, k] times w [k, n], a bias, and an activation or the sum with a residual."""
    x, w = te.placeholder((m, k), DTYPE, "x"), te.placeholder((k, n), DTYPE, "w")
    b, r = te.placeholder((n,), DTYPE, "b"), te.placeholder((m, n), DTYPE, "r")
    axis = te.reduce_axis((0, k), "k")
    product = te.compute((m, n), lambda i, j: te.sum(x[i, axis] * w[axis, j], axis), "product")
    if epilogue == "residual":
        out = te.compute((m, n), lambda i, j: product[i, j] + b[j] + r[i, j], "out")
        return te.create_prim_func([x, w, b, r, out])
    after = _AFTER[epilogue]
    out = te.compute((m, n), lambda i, j: after(product[i, j] + b[j]), "out")
    return te.create_prim_func([x, w, b, out])


def batched(batch: int, m: int, k: int, n: int) -> Any:
    """Return x [batch, m, k] times w [batch, k, n], with a factor."""
    x = te.placeholder((batch, m, k), DTYPE, "x")
    w = te.placeholder((batch, k, n), DTYPE, "w")
    axis = te.reduce_axis((0, k), "k")
    shape = (batch, m, n)
    product = te.compute(
        shape, lambda a, i, j: te.sum(x[a, i, axis] * w[a, axis, j], axis), "product"
    )
    factor = tvm.tirx.const(0.125, DTYPE)
    out = te.compute(shape, lambda a, i, j: product[a, i, j] * factor, "out")
    return te.create_prim_func([x, w, out])


def conv2d(channels: int, side: int, filters: int, kernel: int, stride: int) -> Any:
    """Return x [1, channels, side, side] with filters [filters, channels, kernel, kernel]; relu."""
    x = te.placeholder((1, channels, side, side), DTYPE, "x")
    w = te.placeholder((filters, channels, kernel, kernel), DTYPE, "w")
    y = topi.nn.conv2d(x, w, stride, kernel // 2, 1, "NCHW")
    return te.create_prim_func([x, w, topi.nn.relu(y)])


_KINDS: dict[str, Callable[..., Any]] = {"matmul": matmul, "batched": batched, "conv2d": conv2d}
TASKS: dict[str, tuple[Any, ...]] = {
    "matmul-128x768x768-relu": ("matmul", 128, 768, 768, "relu"),
    "matmul-128x3072x768-silu": ("matmul", 128, 3072, 768, "silu"),
    "matmul-64x1024x1024-residual": ("matmul", 64, 1024, 1024, "residual"),
    "matmul-512x512x512-relu": ("matmul", 512, 512, 512, "relu"),
    "matmul-256x512x1000-relu": ("matmul", 256, 512, 1000, "relu"),
    "matmul-196x384x1536-silu": ("matmul", 196, 384, 1536, "silu"),
    "matmul-1024x256x320-residual": ("matmul", 1024, 256, 320, "residual"),
    "matmul-100x2048x512-relu": ("matmul", 100, 2048, 512, "relu"),
    "batched-12x256x64x256": ("batched", 12, 256, 64, 256),
    "batched-16x256x256x64": ("batched", 16, 256, 256, 64),
    "batched-32x128x128x128": ("batched", 32, 128, 128, 128),
    "batched-4x384x96x384": ("batched", 4, 384, 96, 384),
    "conv2d-64x56-64x3": ("conv2d", 64, 56, 64, 3, 1),
    "conv2d-128x28-128x3": ("conv2d", 128, 28, 128, 3, 1),
    "conv2d-64x56-256x1": ("conv2d", 64, 56, 256, 1, 1),
    "conv2d-256x14-512x3s2": ("conv2d", 256, 14, 512, 3, 2),
    "conv2d-128x28-256x3s2": ("conv2d", 128, 28, 256, 3, 2),
    "conv2d-3x224-64x7s2": ("conv2d", 3, 224, 64, 7, 2),
}


@functools.cache
def target(cores: int, arch: str | None = None) -> Any:
    """Return the target of this processor, or of ``arch``, for kernels on so many cores."""
    from tvmcap.base.codegen import make_target

    own = arch or str(tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")())
    return make_target({"kind": "llvm", "mcpu": own, "num-cores": cores})


@functools.cache
def task(name: str, target: Any) -> tasks.Task:
    """Return a task as a loop nest, whatever template would serve it.

    It is kept, for a measurer knows the reference of a task as long as the task lives.
    """
    kind, *arguments = TASKS[name]
    func = _KINDS[kind](*arguments).with_attr("global_symbol", name.replace("-", "_"))
    return tasks.make_task(func, target, lambda func, target: None)


def named(names: Sequence[str]) -> list[str]:
    """Return names of tasks, all where none is given; exits where one is unknown."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise SystemExit(f"no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    return list(names or TASKS)

"""Plan, compile and run small Relax modules, and the memory their intermediates need at least."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tvmcap.base import codegen
from tvmcap.base.signature import evaluate
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.graph.rewrite import outputs_of
from tvmcap.library import lower
from tvmcap.library.plan import plan

TARGET = codegen.make_target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})


def fused(mod: Any) -> Any:
    """Return the module as the plan takes it."""
    with TARGET:
        return fuse(legalize(mod))


def planned(mod: Any) -> Any:
    with TARGET:
        return plan(fused(mod))


def machine(mod: Any) -> Any:
    """Compile a planned module; returns its ``main``."""
    return relax.VirtualMachine(lower.lower(mod, TARGET), tvm.cpu())["main"]


def run(
    main: Any, inputs: Sequence[Any], shapes: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[Any]:
    """Call ``main`` with outputs full of NaN; returns them."""
    outputs = [tvm.runtime.tensor(np.full(shape, np.nan, dtype)) for shape in shapes]
    main(*(tvm.runtime.tensor(np.ascontiguousarray(x)) for x in inputs), *outputs)
    return [o.numpy() for o in outputs]


def calls(mod: Any) -> list[Any]:
    """List the calls of main, in order."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [b.value for b in bindings if isinstance(b.value, relax.Call)]


def live_bytes(mod: Any, sizes: Mapping[str, int]) -> int:
    """Return the largest sum of intermediates alive at once in a fused module.

    A kernel's inputs are alive beside its output; arguments, constants and outputs of main, which
    belong to the caller, do not count.
    """
    main = mod["main"]
    bindings = [b for block in main.body.blocks for b in block.bindings]
    alias = {b.var: b.value for b in bindings if isinstance(b.value, relax.Var)}

    def root(var: Any) -> Any:
        while var in alias:
            var = alias[var]
        return var

    kernels = [b for b in bindings if isinstance(b.value, relax.Call)]
    outputs = {root(v) for v in outputs_of(main)}
    born = {b.var: i for i, b in enumerate(kernels) if b.var not in outputs}
    last = {
        root(v): i
        for i, b in enumerate(kernels)
        for v in relax.analysis.free_vars(b.value)
        if root(v) in born
    }
    return max(
        (
            sum(nbytes(v.ty, sizes) for v in born if born[v] <= i <= last.get(v, born[v]))
            for i in range(len(kernels))
        ),
        default=0,
    )


def nbytes(ty: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a tensor type."""
    count = np.dtype(str(ty.dtype)).itemsize
    for extent in ty.shape.values:
        count *= int(extent) if isinstance(extent, tirx.IntImm) else sizes[extent.name]
    return count


def module(
    make: Callable[..., Any],
    *shapes: Sequence[int | str],
    names: Sequence[str] = (),
    dtype: str = "float32",
) -> Any:
    """Build ``main`` from ``make(builder, *inputs)`` and one shape an input, named x0, x1, ...

    Strings are symbolic extents.
    """
    builder = relax.BlockBuilder()
    sizes = {e: tirx.Var(e, "int64") for shape in shapes for e in shape if isinstance(e, str)}
    params = [
        relax.Var(name, relax.TensorType([sizes.get(e, e) for e in shape], dtype))
        for name, shape in zip(names or [f"x{i}" for i in range(len(shapes))], shapes, strict=True)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            results = [builder.emit_output(r) for r in make(builder, *params)]
        builder.emit_func_output(relax.Tuple(results) if len(results) > 1 else results[0])
    return builder.get()


def numbers(*shape: int, seed: int = 0) -> Any:
    """Return random float32 numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def planned_bytes(mod: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of storage that the plan allocates."""
    storage = mod.attrs["tvmcap.storage"]
    return sum(int(v) * evaluate(str(k) or 1, sizes) for k, v in storage.items())


def mlp(widths: Sequence[int], rows: int | str = "B", residual: bool = False) -> Any:
    """Build ``x -> gelu(x @ w) ...``, one product a pair of widths.

    ``residual`` adds the layer's input where it fits.
    """
    pairs = list(itertools.pairwise(widths))

    def layers(builder: Any, h: Any, *weights: Any) -> list[Any]:
        for weight, (before, after) in zip(weights, pairs, strict=True):
            product = builder.emit(relax.op.nn.gelu(builder.emit(relax.op.matmul(h, weight))))
            add = residual and before == after
            h = builder.emit(relax.op.add(product, h)) if add else product
        return [h]

    names = ["x", *(f"w{i}" for i in range(len(pairs)))]
    return module(layers, (rows, widths[0]), *pairs, names=names)


def mlp_reference(x: Any, weights: Sequence[Any], residual: bool = False) -> Any:
    """Compute ``mlp`` in float64."""
    import torch

    h = torch.from_numpy(x).double()
    for weight in weights:
        product = torch.nn.functional.gelu(h @ torch.from_numpy(weight).double())
        h = product + h if residual and h.shape == product.shape else product
    return h.numpy()

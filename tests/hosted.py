"""The host function of a planned module: compiled, written, loaded and called on memory of ours."""

from __future__ import annotations

import itertools
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from tests.planned import TARGET
from tvmcap.base.signature import evaluate
from tvmcap.library import arena, entry, lower

_NUMBER = itertools.count()
#: What a host function does beside calling: addresses, numbers, and memory of its own stack.
_PLAIN = {"address_of", "buffer_data", "reinterpret", "tvm_stack_alloca"}
_PLAIN |= {"tvm_struct_get", "tvm_struct_set"}


class Hosted:
    """A module's host function.

    Attributes
    ----------
    function: the native function of ``main``, as the library's file holds it.
    constants: tensors that it takes after the outputs.
    sizes: bytes of each storage that it takes after those.
    """

    def __init__(self, mod: Any, folder: Path) -> None:
        path = folder / f"hosted{next(_NUMBER)}.so"  # the system loads a name once
        lower.lower(entry.add(mod, TARGET), TARGET).export_library(str(path))
        assert not undefined_kernels(path), "the system ends the process for one that is called"
        self._code = tvm_ffi.load_module(str(path))
        self.function = self.named("main_in_arena")
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        self.constants = tuple(machine["main_constants"]())
        self.sizes = arena.sizes(mod)

    def named(self, name: str) -> Any:
        """Return another function of the file."""
        return self._code.get_function(name, query_imports=True)

    def storages(self, **dims: int) -> list[Any]:
        """Return storages for sizes, every byte 255: a NaN of each floating dtype."""
        needs = [int(evaluate(size, dims)) for size in self.sizes]
        return [tensor(np.full(max(1, n), 255, np.uint8)) for n in needs]

    def __call__(
        self,
        inputs: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[str] = (),
        **dims: int,
    ) -> list[Any]:
        """Call it with outputs of these shapes, whose bytes are 255; returns them.

        ``dtypes`` of the outputs are float32 where not given, ``dims`` what storages depend on.
        """
        dtypes = dtypes or ["float32"] * len(shapes)
        outputs = [filled(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        values = map(tensor, inputs)
        self.function(*values, *outputs, *self.constants, *self.storages(**dims), 0)
        return [out.numpy() for out in outputs]


def undefined_kernels(path: Path) -> list[str]:
    """List the symbols of TVM's functions that a library needs and nothing defines."""
    listed = subprocess.run(["nm", "-D", "-u", path], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.startswith("__tvm_ffi_")]


def dtype_of(name: str) -> Any:
    """Return NumPy's dtype of a name, of bfloat16 too."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def tensor(values: Any) -> Any:
    """Return an array as a compact tensor."""
    return tvm.runtime.tensor(np.ascontiguousarray(values))


def filled(shape: Sequence[int], dtype: str) -> Any:
    """Return a tensor whose bytes are 255."""
    width = dtype_of(dtype).itemsize
    raw = np.full((*shape[:-1], shape[-1] * width), 255, np.uint8)
    return tensor(raw.view(dtype_of(dtype)))


def calls_of(mod: Any) -> Counter[str]:
    """Count what the host function of a module calls, by name, allocations included."""
    func = entry.add(mod, TARGET)["main_in_arena"]
    counted: Counter[str] = Counter()

    def see(call: Any) -> None:
        name = call.op.name.removeprefix("tirx.")
        if name == "tvm_call_cpacked_lowered":
            counted[str(call.args[0].value)] += 1
        elif name not in _PLAIN:
            counted[name] += 1

    def allocated(statement: Any) -> None:
        counted["an allocation"] += 1

    tvm_ffi.structural_walk(func.body, [(tvm.ir.Call, see), (tirx.AllocBuffer, allocated)])
    return counted

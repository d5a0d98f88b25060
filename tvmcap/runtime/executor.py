"""Executor: a library as a callable."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmcap.base.errors import InputError, LibraryError
from tvmcap.base.manifest import read_manifest
from tvmcap.base.signature import Signature, unflatten
from tvmcap.runtime.binding import Plan, Shape, flatten_call, flatten_outputs, is_plain, make_plan
from tvmcap.runtime.frameworks import Copies, DLPackTensors
from tvmcap.runtime.loader import Library, configure_threads, empty, ffi
from tvmcap.runtime.machine import check_machine
from tvmcap.runtime.numpy_tensors import NumpyTensors
from tvmcap.runtime.torch_tensors import TorchTensors
from tvmcap.runtime.trace import Trace, trace_call
from tvmcap.runtime.vendor import provide

_PLANS_KEPT = 1024


class Executor:
    """A loaded library: torch tensors, NumPy arrays or DLPack objects in, the same kind out.

    Arguments are passed without a copy where they are contiguous and aligned to 16 bytes, else
    copied (``copies`` counts them). Results are new tensors, or written to ``out=``. Several
    threads may call at once: on a CPU each has a virtual machine and a thread pool of its own, on a
    GPU they take turns (the work itself is asynchronous).

    Parameters
    ----------
    path : the library; its weights file, where it has one, lies beside it.
    device : index of the GPU, for a library built for one.
    entry : the function of the library to call and its signature; by default the one of its own.

    Raises
    ------
    DamagedLibraryError, IncompatibleLibraryError
        Before anything of the file is loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: int = 0,
        entry: tuple[str, Signature] | None = None,
    ) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        name, self.signature = entry or ("main", self.manifest.signature)
        check_machine(self.manifest, device)
        provide(self.manifest.needs, self.path)
        self._library = Library(self.path, self.manifest, device)
        self._weights = self._library.weights
        cuda = self.manifest.target["kind"] == "cuda"
        self._machine = (_CudaMachine if cuda else _CpuMachine)(self._library, name)
        self._copies = Copies()
        self._frameworks: dict[type, Any] = {}
        self._plans: dict[tuple[type, tuple[Shape, ...]], Plan] = {}
        self._plain = is_plain(self.signature)
        self._count = len(self.signature.arg_names)
        self._single = self.signature.out_tree["kind"] == "leaf"

    @property
    def copies(self) -> int:
        """Inputs copied so far because they were not contiguous or not aligned."""
        return self._copies.count

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function on tensors of its signature; ``out`` receives the result where given.

        Raises InputError for arguments that do not fit the signature.
        """
        framework, values, plan = self._bind(args, kwargs)
        if out is None:
            results, targets = framework.outputs(plan)
        else:
            results = [out] if self._single else flatten_outputs(self.signature, out)
            targets = framework.check_out(results, plan)
            _check_overlap(values, targets, plan)
        if plan.zero:
            values, targets = self._compact(values), self._compact(targets)
        if not plan.skip:
            try:
                self._machine.run(*values, *self._weights, *targets)
            except Exception as e:
                raise self._failure(plan, e) from e
        return results[0] if self._single else unflatten(self.signature.out_tree, results)

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], Plan]:
        """Return the framework of a call, the tensors to pass, and what their shapes imply."""
        if kwargs or not self._plain or len(args) != self._count:
            args = flatten_call(self.signature, args, kwargs)
        kind = type(args[0]) if args else type(None)
        framework = self._frameworks.get(kind) or self._framework_for(args)
        values, shapes = framework.inputs(args)
        plan = self._plans.get((kind, shapes))
        if plan is None:
            plan = self._make_plan(framework, shapes)
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[kind, shapes] = plan
        return framework, values, plan

    def _framework_for(self, leaves: Sequence[Any]) -> Any:
        """Choose by the first tensor; without any, torch's where torch is in use, else NumPy's."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        first = leaves[0] if leaves else None
        if torch is not None and (isinstance(first, torch.Tensor) or not leaves):
            make: type = TorchTensors
        elif not leaves or (numpy is not None and isinstance(first, numpy.ndarray | numpy.generic)):
            make = NumpyTensors
        else:
            make = DLPackTensors
        framework = self._frameworks.get(make) or make(
            self.signature, self._library.device, self._copies
        )
        self._frameworks[make] = self._frameworks[type(first)] = framework
        return framework

    def _make_plan(self, framework: Any, shapes: tuple[Shape, ...]) -> Plan:
        plan = make_plan(self.signature, shapes, lambda dtype: int(ffi().dtype(dtype).itemsize))
        return replace(plan, recipe=framework.recipe(plan))

    def _compact(self, tensors: Sequence[Any]) -> list[Any]:
        """Replace tensors without elements, whose strides the kernels would refuse."""
        compact = []
        for tensor in tensors:
            if 0 in tensor.shape:
                dtype = str(ffi().from_dlpack(tensor).dtype)
                tensor = empty(tuple(tensor.shape), dtype, self._library.device)
            compact.append(tensor)
        return compact

    def _failure(self, plan: Plan, error: Exception) -> Exception:
        if plan.zero:
            return InputError(
                f"a size of 0 cannot be run on this target (sizes {dict(plan.dims)}); original: "
                f"{error}"
            )
        return LibraryError(
            f"{self.path}: a kernel of the library failed (sizes {dict(plan.dims)}); build it "
            "again, and report it "
            f"if it fails again; original: {error}"
        )

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run one call and return the kernels it launched and the peak of intermediates' memory."""
        framework, values, plan = self._bind(args, kwargs)
        targets = framework.outputs(plan)[1]
        if plan.skip:
            return Trace((), 0)
        if plan.zero:
            values, targets = self._compact(values), self._compact(targets)
        try:
            return self._machine.trace(*values, *self._weights, *targets)
        except Exception as e:
            raise self._failure(plan, e) from e

    def kernel_launches(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Run one call and return the names of the kernels it launched, in order."""
        return self.trace(*args, **kwargs).kernels

    def peak_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Run one call and return the bytes of its outputs and of intermediates alive at once."""
        _, _, plan = self._bind(args, kwargs)
        return self.trace(*args, **kwargs).intermediate_bytes + sum(plan.output_bytes)


def _check_overlap(values: Sequence[Any], targets: Sequence[Any], plan: Plan) -> None:
    """Refuse results that share memory with an argument or each other."""
    taken = [(value.data_ptr(), size) for value, size in zip(values, plan.input_bytes, strict=True)]
    for target, size in zip(targets, plan.output_bytes, strict=True):
        start = target.data_ptr()
        if any(start < other + other_size and other < start + size for other, other_size in taken):
            raise InputError(
                "out: expected memory of its own, got memory shared with an argument or another "
                "output"
            )
        taken.append((start, size))


class _CpuMachine(threading.local):
    """A virtual machine and a thread pool a calling thread; code and weights are shared."""

    def __init__(self, library: Library, entry: str) -> None:
        configure_threads()
        self._library, self._entry = library, entry
        self.run = library.new_vm()[entry]

    def trace(self, *tensors: Any) -> Trace:
        vm = self._library.new_vm()
        return trace_call(vm, lambda: vm[self._entry](*tensors))


class _CudaMachine:
    """One virtual machine, as each keeps its own weights; one call at a time, on its stream."""

    _last_stream: dict[int, Any] = {}
    _lock = threading.RLock()

    def __init__(self, library: Library, entry: str) -> None:
        self._device = library.device
        self._vm = library.new_vm()
        self._main = self._vm[entry]

    def run(self, *tensors: Any) -> None:
        torch = sys.modules.get("torch")
        with self._lock:
            if torch is None:
                self._main(*tensors)
                return
            stream = torch.cuda.current_stream(self._device.index)
            self._follow(torch, stream)
            with ffi().use_raw_stream(self._device, stream.cuda_stream):
                self._main(*tensors)

    def _follow(self, torch: Any, stream: Any) -> None:
        """Order this call after one on another stream: both may get the same intermediates."""
        index = self._device.index
        last = self._last_stream.get(index, stream)
        if last.cuda_stream != stream.cuda_stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(last)
        self._last_stream[index] = stream

    def trace(self, *tensors: Any) -> Trace:
        with self._lock:
            return trace_call(self._vm, lambda: self.run(*tensors))

"""TVM's runtime without its compiler: shared libraries, thread pool, library files, weights."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import sys
import threading
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

from tvmcap.base import cudart
from tvmcap.base.codegen import find_cudart
from tvmcap.base.errors import ConfigError, IncompatibleLibraryError, LibraryError, ToolchainError
from tvmcap.base.folders import temporary_folder
from tvmcap.base.manifest import Manifest, stored_digest
from tvmcap.base.tensors import read_tensors
from tvmcap.runtime.machine import usable_cores

_log = logging.getLogger("tvmcap")
# TVM's allocators (tvm/runtime/memory/memory_manager.h)
_NAIVE, _POOLED = 1, 2
_SHARE_CORES = -3
_DEVICE_TYPES = {"llvm": 1, "cuda": 2}
_thread = threading.local()


@lru_cache(maxsize=1)
def ffi() -> Any:
    """Return ``tvm_ffi`` with libtvm_runtime in the process; TVM's own package is not imported."""
    import tvm_ffi

    suffix = "dylib" if sys.platform == "darwin" else "so"
    _open_shared(_tvm_folder() / f"libtvm_runtime.{suffix}")
    _open_shared(_tvm_folder() / f"libtvm_runtime_extra.{suffix}")  # sorting, on the CPU
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    return tvm_ffi


@lru_cache(maxsize=1)
def load_cuda_runtime() -> None:
    """Bring TVM's CUDA side library into the process, after the libcudart that it needs."""
    ffi()  # brings libtvm_ffi.so and libtvm_runtime.so, which the side library links
    path = _tvm_folder() / "libtvm_runtime_cuda.so"
    for name in (cudart.NAME, str(find_cudart() or "")):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            break
    _open_shared(path)


def _tvm_folder() -> Path:
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError("TVM's runtime is not installed: pip install apache-tvm")
    return Path(spec.submodule_search_locations[0]) / "lib"


def _open_shared(path: Path) -> None:
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as e:
        raise ToolchainError(
            f"cannot load {path} ({e}); tvmcap doctor shows what this machine lacks"
        ) from e


def configure_threads() -> int:
    """Give the calling thread a pool of all usable cores, or ``TVM_NUM_THREADS``; return its size.

    TVM keeps one pool a calling thread, by default of half the cores, and binds pool and caller to
    fixed ones, the caller's later threads included. Here every thread may run on every core that
    the process may use.
    """
    count: int | None = getattr(_thread, "count", None)
    if count is None:
        cores = usable_cores()
        wanted = _threads_asked_for() or len(cores)
        pool = [str(cores[i % len(cores)]) for i in range(wanted)]
        allowed = (
            [str(core) for core in sorted(os.sched_getaffinity(0))]
            if hasattr(os, "sched_getaffinity")
            else pool
        )
        configure = ffi().get_global_func("runtime.config_threadpool")
        configure(
            _SHARE_CORES, wanted, pool
        )  # the length of the first list is the size of the pool
        configure(_SHARE_CORES, wanted, allowed)
        count = _thread.count = int(ffi().get_global_func("runtime.NumThreads")())
        if count != wanted:
            _log.warning(
                "kernels run on %d threads, not %d: TVM's pool of this thread was made earlier",
                count,
                wanted,
            )
    return count


def _threads_asked_for() -> int | None:
    text = os.environ.get("TVM_NUM_THREADS")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"TVM_NUM_THREADS={text!r}: give a number of threads from 1, or leave it unset for "
            "all cores"
        )
    return int(text)


def _after_fork() -> None:
    """Run kernels on the only thread of a forked child, which lacks the pool's others."""
    if getattr(_thread, "count", None) is not None:
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        ffi().get_global_func("runtime.config_threadpool")(_SHARE_CORES, 1, cores)
        _thread.count = 1


class Library:
    """A library file in this process: its code, and its weights on the device.

    Every virtual machine made of it shares the code and the weights beside it; those inside are
    shared on a CPU.
    """

    def __init__(self, path: Path, manifest: Manifest, device: int = 0) -> None:
        kind = manifest.target["kind"]
        if kind == "cuda":
            load_cuda_runtime()
        self._device = ffi().device({"llvm": "cpu"}.get(kind, kind), device)
        self._device_type = _DEVICE_TYPES[kind]
        # an arena is made once, and its memory goes back to the device, after all work there
        self._allocator = _POOLED if kind == "llvm" else _NAIVE
        self._code: _Code | None = _code(path)
        self.weights = _load_weights(path, manifest, self._device)

    @property
    def device(self) -> Any:
        """The ``tvm_ffi.Device`` that the library runs on."""
        return self._device

    def close(self) -> None:
        """Let go of code and weights, which are freed once no virtual machine uses them."""
        self.weights = ()
        self._code = None

    def new_vm(self) -> Any:
        """Return a virtual machine, for one thread at a time."""
        code = self._code  # which another thread may take away
        if code is None:
            raise LibraryError("this library was closed; load it again")
        vm = code.module["vm_load_executable"]()
        args = [self._device_type, self._device.index, self._allocator]
        if self._device_type != 1:
            args += [1, 0, _POOLED]  # shapes are computed on the host
        vm["vm_initialization"](*args)
        return vm

    def function(self, name: str) -> Any:
        """Return a host function of the code; AttributeError where there is none."""
        if self._code is None:
            raise LibraryError("this library was closed; load it again")
        return self._code.module.get_function(name, query_imports=True)


class _Code:
    """The code of one file. All libraries of the file share it.

    The dynamic linker gives two loads of a file one set of global variables, and TVM's host code
    keeps the handles of its GPU kernels in them: unloading the module that filled them would leave
    the other module with dangling handles.
    """

    def __init__(self, module: Any, digest: bytes) -> None:
        self.module, self.digest = module, digest


_codes: weakref.WeakValueDictionary[tuple[int, int], _Code] = weakref.WeakValueDictionary()
_codes_lock = threading.Lock()


def _code(path: Path) -> _Code:
    with open(path, "rb") as file:  # what is opened stays one file, whatever takes its name
        opened = Path(f"/proc/self/fd/{file.fileno()}")
        if not opened.exists():
            opened = path.resolve()
        stat = opened.stat()
        identity = (stat.st_dev, stat.st_ino)  # a mapped file keeps its inode
        digest = stored_digest(opened)
        with _codes_lock:
            code = _codes.get(identity)
            if code is None:
                code = _codes[identity] = _Code(_load(path, opened), digest)
    if code.digest != digest:
        raise LibraryError(
            f"{path}: was written over in place while its former code is in use here: write a new "
            "version to another file and rename that, as lib.export does, and load it again"
        )
    return code


def _load(path: Path, opened: Path) -> Any:
    """Load under a new name: dlopen answers a known name with the file it first stood for."""
    with temporary_folder("tvmcap-") as folder:
        alias = folder / "library.so"
        alias.symlink_to(opened)
        try:
            return ffi().load_module(str(alias), keep_module_alive=False)
        except Exception as e:
            raise IncompatibleLibraryError(
                f"{path}: this system cannot load the library ({e}); build it on this kind of "
                "system"
            ) from e


def _load_weights(path: Path, manifest: Manifest, device: Any) -> tuple[Any, ...]:
    if manifest.weights is None:
        return ()
    file = path.resolve().with_name(manifest.weights.file)
    stored = read_tensors(file, manifest.weights.sha256)
    missing = [name for name in manifest.weights.names if name not in stored]
    if missing:
        raise LibraryError(
            f"{file}: lacks the weights {', '.join(missing)}; build and export the library again"
        )
    return tuple(_to_device(*stored[name], device) for name in manifest.weights.names)


def _to_device(dtype: str, shape: tuple[int, ...], data: memoryview, device: Any) -> Any:
    """Return a tensor of mapped bytes: where they lie if a kernel may read them, else a copy."""
    import numpy as np

    source = ffi().from_dlpack(np.frombuffer(data, np.uint8))
    view = ffi().get_global_func("runtime.TVMTensorCreateView")(
        source, shape, ffi().dtype(dtype), 0
    )
    if device.type == "cpu" and source.data_ptr() % 16 == 0:
        return view
    tensor = empty(shape, dtype, device)
    ffi().get_global_func("runtime.TVMTensorCopyFromTo")(view, tensor)
    return tensor


def empty(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """Return a new, compact ``tvm_ffi.Tensor``; LibraryError where the memory cannot be had."""
    allocate = ffi().get_global_func("runtime.TVMTensorAllocWithScope")
    try:
        return allocate(shape, ffi().dtype(dtype), device, None)
    except Exception as e:
        cudart.forget_error()
        raise LibraryError(
            f"no memory on {device} for a tensor of {dtype}{list(shape)}: free some, or use "
            f"smaller sizes; original: {e}"
        ) from e

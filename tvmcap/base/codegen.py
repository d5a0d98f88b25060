"""Targets: what "llvm" or "cuda" means on this machine, and where its compilers are."""

from __future__ import annotations

import ctypes
import difflib
import functools
import glob
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmcap.base.errors import ConfigError, ToolchainError

#: Bytes of shared memory that a thread block may have, by architecture (CUDA C++ Programming Guide,
#: technical specifications per compute capability: "maximum amount of shared memory per thread
#: block").
SHARED_MEMORY = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_90a": 232448,
    "sm_100": 232448,
    "sm_100a": 232448,
}
DEFAULT_ARCH = "sm_90a"


def gpu_capability(device: int = 0) -> tuple[int, int]:
    """Return a GPU's compute capability, major and minor; raises LookupError that says what lacks.

    It asks the driver itself, so that neither torch nor TVM is imported.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise LookupError("this machine has no NVIDIA driver") from e
    count, handle = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise LookupError("the driver finds no GPU here")
    if driver.cuDeviceGet(ctypes.byref(handle), device):
        raise LookupError(f"expected a GPU with index below {count.value}, got {device}")
    major, minor = ctypes.c_int(), ctypes.c_int()
    # CUdevice_attribute 75 and 76: compute capability, major and minor (cuda.h)
    for attribute, value in ((75, major), (76, minor)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle):
            raise LookupError("the driver does not tell the GPU's compute capability")
    return major.value, minor.value


def gpu_architecture() -> str | None:
    """Return GPU 0's architecture, such as ``"sm_90a"``, or None without a usable GPU."""
    try:
        major, minor = gpu_capability()
    except LookupError:
        return None
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compute_capability(target: Any) -> int:
    """Return ten times the compute capability of a cuda target: 90 for ``"sm_90a"``."""
    return int("".join(c for c in str(target.arch) if c.isdigit()))


def target_data(spec: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Spell a target out as the JSON object that TVM's ``Target`` takes.

    Parameters
    ----------
    spec : "llvm", "cuda", "cuda:sm_80", a JSON object, or None: cuda where a GPU is, else llvm.

    Raises
    ------
    ConfigError
        For a kind other than llvm and cuda, or a field that is no target field.
    """
    if spec is None:
        spec = "cuda" if gpu_architecture() else "llvm"
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        try:
            spec = json.loads(spec)
        except json.JSONDecodeError as e:
            raise ConfigError(f"target {spec!r} is not a JSON object: {e}") from e
    data = dict(spec) if isinstance(spec, Mapping) else _from_name(str(spec))
    kind = data.get("kind")
    if kind == "llvm":
        return (
            {"num-cores": os.cpu_count() or 1, **data}
            if "mcpu" in data
            else {**_host_cpu(), **data}
        )
    if kind == "cuda":
        arch = data.get("arch") or gpu_architecture() or DEFAULT_ARCH
        base = {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": SHARED_MEMORY.get(arch, 49152),
            "thread_warp_size": 32,
            "registers_per_block": 65536,
        }
        return {**base, **data}
    raise ConfigError(f"target kind {kind!r}: tvmcap builds for 'llvm' and 'cuda'")


def _from_name(name: str) -> dict[str, Any]:
    kind, _, arch = name.partition(":")
    if kind not in ("llvm", "cuda") or " " in name:
        raise ConfigError(
            f"target {name!r}: use 'llvm', 'cuda', 'cuda:sm_80', 'llvm:znver4', "
            'or a JSON object such as {"kind": "llvm", "mcpu": "x86-64-v3"}'
        )
    if not arch:
        return {"kind": kind}
    return {"kind": kind, "arch" if kind == "cuda" else "mcpu": arch}


@functools.cache
def _host_cpu() -> dict[str, Any]:
    import tvm  # noqa: F401  (registers target.llvm_get_system_cpu)
    import tvm_ffi

    cpu = tvm_ffi.get_global_func("target.llvm_get_system_cpu")()
    return {"kind": "llvm", "mcpu": str(cpu), "num-cores": os.cpu_count() or 1}


def make_target(spec: str | Mapping[str, Any] | None) -> Any:
    """Build TVM's Target (with an llvm host for cuda); raises ConfigError where TVM refuses it."""
    from tvm.target import Target

    data = target_data(spec)
    try:
        if data["kind"] == "cuda":
            return Target(Target(data), host=Target({"kind": "llvm"}))
        target = Target(data)
    except Exception as e:
        raise ConfigError(f"TVM refuses the target {data}: {e}") from e
    if "mtriple" not in data and data["mcpu"] not in _known_cpus():
        near = difflib.get_close_matches(data["mcpu"], _known_cpus(), n=3)
        raise ConfigError(
            f"target: mcpu: expected the name of a CPU that LLVM knows, such as "
            f"{', '.join(near or ('x86-64-v3', 'znver4'))}, got {data['mcpu']!r}"
        )
    return target


@functools.cache
def _known_cpus() -> frozenset[str]:
    """Name the CPUs of this architecture that LLVM knows; for others it builds generic code."""
    import tvm_ffi
    from tvm.target import Target

    listed = tvm_ffi.get_global_func("target.llvm_get_cpu_archlist")(Target({"kind": "llvm"}))
    return frozenset({"generic", *(str(name) for name in listed)})


def export_target(target: Any) -> dict[str, Any]:
    """Spell a TVM target out as the JSON object that ``make_target`` takes, without its host."""
    data = {str(k): v for k, v in target.export().items() if k in _TARGET_FIELDS}
    return {k: int(v) if isinstance(v, int) else str(v) for k, v in data.items()}


_TARGET_FIELDS = (
    *("kind", "arch", "mcpu", "mattr", "num-cores", "thread_warp_size", "registers_per_block"),
    *("max_threads_per_block", "max_shared_memory_per_block"),
)


def describe(target: Any) -> dict[str, Any]:
    """Say what a machine needs to run code for a target: its fields, and llvm's CPU features."""
    data = export_target(target)
    if data["kind"] == "llvm":
        import tvm_ffi

        features = tvm_ffi.get_global_func("target.llvm_get_cpu_features")(target)
        data["features"] = sorted(str(f) for f in features)
    return data


def _package_folder(*parts: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [Path(root, "cu13", *parts) for root in roots]


def find_nvcc() -> Path | None:
    """Find nvcc on PATH, in $CUDA_HOME, in /usr/local/cuda, or in pip's nvidia-cuda-nvcc."""
    on_path = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [Path(on_path)] if on_path else []
    places += [Path(home, "bin", "nvcc") for home in homes if home]
    places += _package_folder("bin", "nvcc")
    return next((p for p in places if p.is_file()), None)


def find_cudart() -> Path | None:
    """Find libcudart.so.13, which TVM's CUDA runtime links, in pip's packages or /usr/local."""
    patterns = [str(p) for p in _package_folder("lib", "libcudart.so.13")]
    patterns += [
        "/usr/local/cuda*/lib64/libcudart.so.13",
        "/usr/local/cuda*/targets/*/lib/libcudart.so.13",
    ]
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    return Path(found[0]) if found else None


def require_linker() -> str:
    """Return the C compiler that links libraries, or raise ToolchainError that says what to do."""
    from tvm.support.cc import get_cc

    compiler = get_cc()
    if compiler is None or shutil.which(compiler) is None:
        raise ToolchainError(
            f"expected a C compiler to link the library with, got {compiler!r}: install gcc or "
            "clang, or set CC "
            "to one (tvmcap doctor checks it)"
        )
    return str(compiler)


def require_nvcc() -> Path:
    """Return nvcc, or raise ToolchainError that says how to get it."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise ToolchainError(
            "building for cuda needs nvcc 13, and none is on PATH, in $CUDA_HOME, /usr/local/cuda "
            "or this environment; pip install 'tvmcap[cuda]' brings one"
        )
    return nvcc


def use_nvcc() -> None:
    """Compile CUDA source with the nvcc that tvmcap found, to a cubin, with IEEE arithmetic.

    TVM's default, NVRTC with --use_fast_math, loses fp32 accuracy (tanh to 5e-4) and needs one more
    package.
    """
    import tvm_ffi
    from tvm.support import nvcc

    folder = str(require_nvcc().parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["TVM_CUDA_NVCC_NO_FAST_MATH"] = "1"

    def compile_source(code: str) -> bytearray:
        return bytearray(nvcc.compile_cuda(code, target_format="cubin", compiler="nvcc"))

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_source, override=True)

"""doctor: what this machine has of what tvmcap needs, what is wrong, and how to mend it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvmcap.base import codegen
from tvmcap.runtime.machine import cpu_flags, usable_cores

TVM = "0.27.0.post1"
#: apache-tvm-ffi from 0.1.15 on crashes this TVM in its first ``save_json``.
FFI = ((0, 1, 14), (0, 1, 15))
TORCH = ((2, 11), (2, 14))
_PIN = "pip install 'apache-tvm==0.27.0.post1' 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'"


@dataclass(frozen=True)
class Finding:
    """One check: ``status`` is "ok", "warn" (something is slower or absent) or "error"."""

    name: str
    status: str
    detail: str
    cure: str = ""

    def to_json(self) -> dict[str, str]:
        """Return plain JSON data."""
        return asdict(self)


def diagnose(log_dir: str | None = None, cache_dir: str | None = None) -> list[Finding]:
    """Run every check; none raises. ``log_dir`` and ``cache_dir`` are as in ``Config``."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _abi_pair,
        _generators,
        _cpu,
        _linker,
        _gpu,
        _cuda_compilers,
        lambda: _folder("compile cache", _cache_folder(cache_dir), "cache_dir"),
        lambda: _folder("tuning records", _log_folder(log_dir), "log_dir"),
        _shipped_records,
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as e:
            name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
            findings.append(Finding(name, "error", f"the check itself failed: {e!r}", "report it"))
    return findings


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``"0.1.14.post1"`` is ``(0, 1, 14)``."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Finding]:
    good = (3, 10) <= sys.version_info[:2] <= (3, 13)
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    cure = "" if good else "use Python 3.10 to 3.13"
    yield Finding("python", "ok" if good else "error", system, cure)


def _packages() -> Iterator[Finding]:
    for package, needed in (
        ("torch", TORCH),
        ("xgboost", ((3, 2), (4,))),
        ("numpy", ((1, 26), (3,))),
    ):
        found = _version(package) or (_version("xgboost-cpu") if package == "xgboost" else None)
        low, high = (".".join(map(str, bound)) for bound in needed)
        cure = f"pip install '{package}>={low},<{high}'"
        if found is None:
            use = {"torch": "building", "xgboost": "tuning", "numpy": "everything"}[package]
            yield Finding(package, "error", f"not installed; {use} needs it", cure)
        elif needed[0] <= release(found) < needed[1]:
            yield Finding(package, "ok", found)
        else:
            yield Finding(package, "warn", f"{found}; tried with {low} up to {high}", cure)


def _abi_pair() -> Iterator[Finding]:
    tvm, ffi = _version("apache-tvm"), _version("apache-tvm-ffi")
    if tvm is None:
        yield Finding("tvm", "error", "apache-tvm is not installed", _PIN)
    elif tvm != TVM:
        yield Finding("tvm", "error", f"{tvm}, but tvmcap is made for {TVM}", _PIN)
    else:
        yield Finding("tvm", "ok", tvm)
    yield ffi_finding(ffi)


def ffi_finding(ffi: str | None) -> Finding:
    """Judge the version of apache-tvm-ffi: its ABI has to be the one TVM was compiled with."""
    if ffi is None:
        return Finding("tvm ffi", "error", "apache-tvm-ffi is not installed", _PIN)
    if FFI[0] <= release(ffi) < FFI[1]:
        return Finding("tvm ffi", "ok", ffi)
    detail = f"{ffi} crashes apache-tvm {TVM}; it needs >=0.1.14.post0,<0.1.15"
    return Finding("tvm ffi", "error", detail, _PIN)


def _generators() -> Iterator[Finding]:
    """Ask TVM in a process of its own: where the ABI does not fit, importing it crashes."""
    code = (
        "import tvm, tvm_ffi; f = lambda n: tvm_ffi.get_global_func(n, allow_missing=True);"
        "print(f('target.build.llvm') is not None, f('target.build.cuda') is not None,"
        " f('target.llvm_version_major')())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"signal {-done.returncode}"]
        yield Finding("code generators", "error", f"import tvm fails: {lines[-1]}", _PIN)
        return
    llvm, cuda, version = done.stdout.split()[-3:]
    have = [f"llvm {version}"] * (llvm == "True") + ["cuda"] * (cuda == "True")
    status = "ok" if llvm == "True" else "error"
    note = "" if cuda == "True" else "; cuda comes in where its driver is"
    cure = "" if llvm == "True" else _PIN
    yield Finding("code generators", status, ", ".join(have) + note, cure)


def _cpu() -> Iterator[Finding]:
    cores, total = len(usable_cores()), os.cpu_count() or 1
    wide = [
        name
        for name in ("avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd")
        if name in cpu_flags()
    ]
    yield Finding(
        "cpu", "ok", f"{cores} of {total} cores usable; {' '.join(wide) or 'no vector flags'}"
    )
    threads = os.environ.get("TVM_NUM_THREADS")
    if threads is None or threads == str(cores):
        yield Finding("threads", "ok", f"{cores}")
    else:
        cure = f"unset TVM_NUM_THREADS, or set it to {cores}"
        yield Finding("threads", "warn", f"TVM_NUM_THREADS={threads} with {cores} cores", cure)


def _linker() -> Iterator[Finding]:
    names = (os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang++", "clang", "cc")
    found = next((path for n in names if n and (path := shutil.which(n))), None)
    if found is None:
        cure = "install gcc (apt install g++) or clang, or set CC"
        yield Finding("C compiler", "error", "none: libraries cannot be linked", cure)
        return
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
    yield Finding("C compiler", "ok", (done.stdout.splitlines() or [found])[0])


def _gpu() -> Iterator[Finding]:
    arch = codegen.gpu_architecture()
    if arch is None:
        detail = "none with a usable driver: builds for cuda are cross-compiled and not verified"
        yield Finding("gpu", "ok", detail)
        return
    driver = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    version = (driver.value // 1000, driver.value % 1000 // 10)
    text = f"{arch}, driver for CUDA {version[0]}.{version[1]}"
    if version < (13, 0):
        yield Finding("gpu", "error", text, "install an NVIDIA driver for CUDA 13 (580 or newer)")
    else:
        yield Finding("gpu", "ok", text)
    torch_sees = importlib.util.find_spec("torch") is not None and _torch_cuda()
    if torch_sees is False:
        cure = "pip install torch with CUDA 13 (https://pytorch.org/get-started)"
        yield Finding("torch cuda", "warn", "this torch has no CUDA: nothing can be verified", cure)


def _torch_cuda() -> bool:
    torch: Any = importlib.import_module("torch")
    return bool(torch.cuda.is_available())


def _cuda_compilers() -> Iterator[Finding]:
    nvcc = codegen.find_nvcc()
    if nvcc is not None:
        yield _nvcc_version(str(nvcc))
    else:
        status = "warn" if codegen.gpu_architecture() else "ok"
        cure = "pip install 'tvmcap[cuda]', or put nvcc 13 on PATH"
        yield Finding("nvcc", status, "none: target='cuda' cannot be built here", cure)
    nvrtc = [n for n in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so") if _loads(n)]
    bindings = _version("cuda-bindings")
    parts = [*nvrtc[:1], *([f"cuda-bindings {bindings}"] if bindings else [])]
    yield Finding("nvrtc", "ok", ", ".join(parts) or "none (nvcc is what builds use)")


def _nvcc_version(nvcc: str) -> Finding:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if match is None:
        return Finding("nvcc", "error", f"{nvcc} does not run", "pip install 'tvmcap[cuda]'")
    detail = f"{match[1]}.{match[2]}, {nvcc}"
    if int(match[1]) < 13:
        cure = "put nvcc 13 on PATH, or pip install 'tvmcap[cuda]' and take this one off PATH"
        return Finding("nvcc", "warn", f"{detail}; tvmcap is tried with 13", cure)
    return Finding("nvcc", "ok", detail)


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        return False


def _cache_folder(cache_dir: str | None) -> Path:
    from platformdirs import user_cache_path

    chosen = cache_dir or os.environ.get("TVMCAP_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else user_cache_path("tvmcap")


def _log_folder(log_dir: str | None) -> Path:
    from platformdirs import user_data_path

    chosen = log_dir or os.environ.get("TVMCAP_LOG_DIR")
    return Path(chosen).expanduser() if chosen else user_data_path("tvmcap") / "tuning_logs"


def _folder(name: str, folder: Path, option: str) -> Iterator[Finding]:
    """Write a file where the folder is, or in the nearest folder above that exists."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    cure = f"make it writable, or choose another: --{option} or TVMCAP_{option.upper()}"
    if not place.is_dir():
        yield Finding(name, "error", f"{folder}: {place} is no folder", cure)
        return
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as e:
        yield Finding(name, "error", f"{folder} cannot be written: {e.strerror}", cure)
        return
    free = shutil.disk_usage(place).free / 2**30
    status = "ok" if free >= 1 else "warn"
    more = "" if free >= 1 else "free some disk space: a library with large weights takes gigabytes"
    yield Finding(name, status, f"{folder} ({free:.1f} GiB free)", more)


def _shipped_records() -> Iterator[Finding]:
    """Count the records that ship, and those that a change of a template has made useless."""
    code = "import sys; sys.modules['torch'] = None\n"  # which tvm_ffi would import, in seconds
    code += "from tvmcap.kernel.stores import stale_shipped; print(*stale_shipped())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        yield Finding("shipped records", "error", f"cannot be read: {lines[-1]}", _PIN)
        return
    yield shipped_finding(*map(int, done.stdout.split()[-2:]))


def shipped_finding(count: int, stale: int) -> Finding:
    """Judge the number of shipped records and of those for other source of a template."""
    if stale == 0:
        return Finding("shipped records", "ok", f"{count} for the templates")
    detail = f"{stale} of {count} are for other source of a template, and not used"
    return Finding("shipped records", "warn", detail, "tune again, or use a release as it shipped")

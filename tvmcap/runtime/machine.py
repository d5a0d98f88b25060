"""Whether a library can run on this machine, told from its manifest before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tvmcap.base import codegen
from tvmcap.base.errors import IncompatibleLibraryError
from tvmcap.base.manifest import Manifest

_log = logging.getLogger("tvmcap")

#: LLVM's name of a CPU feature, where /proc/cpuinfo has another. Features that neither table knows
#: are not checked.
_X86 = {
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
    **{
        name: name
        for name in (
            "ssse3 popcnt movbe avx avx2 fma fma4 f16c bmi2 adx gfni vaes vpclmulqdq avx512f "
            "avx512cd avx512bw "
            "avx512dq avx512vl avx512ifma avx512vbmi"
        ).split()
    },
}
_ARM = {
    "neon": "asimd",
    "fp16": "asimdhp",
    "fullfp16": "asimdhp",
    "dotprod": "asimddp",
    "lse": "atomics",
    "sve": "sve",
    "sve2": "sve2",
    "i8mm": "i8mm",
    "bf16": "bf16",
}
_FEATURES = {"x86_64": _X86, "aarch64": _ARM}


def check_machine(manifest: Manifest, device: int = 0) -> None:
    """Raise IncompatibleLibraryError, naming what differs, where the library cannot run here."""
    check_version(manifest.versions.get("tvm"))
    target = manifest.target
    if target["kind"] == "cuda":
        try:
            capability = codegen.gpu_capability(device)
        except LookupError as e:
            raise IncompatibleLibraryError(
                f"the library is for a CUDA GPU; {e}: build with target='llvm' to run on the CPU"
            ) from e
        check_arch(str(target.get("arch")), capability)
    elif target["kind"] == "llvm":
        check_features(target.get("features") or (), cpu_flags())
    else:
        raise IncompatibleLibraryError(
            f"expected a library for 'llvm' or 'cuda', got {target['kind']!r}: build it again"
        )


def check_version(built_with: str | None) -> None:
    """Compare TVM's version at build with the one installed; a post-release counts as the same."""
    try:
        here = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        _log.info(
            "the version of TVM here is unknown (no package metadata); the library was built "
            "with %s",
            built_with,
        )
        return
    if _release(built_with) != _release(here):
        raise IncompatibleLibraryError(
            f"TVM differs: the library was built with {built_with}, here is {here}; build it "
            "again, or "
            f"pip install apache-tvm=={built_with}"
        )


def _release(version: str | None) -> str:
    return re.split(r"\.post|\+", version or "unknown")[0]


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU in /proc/cpuinfo; empty on a platform without it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def check_features(needed: Iterable[str], flags: frozenset[str]) -> None:
    """Compare the CPU features the code may use (LLVM's names) with the flags of this CPU."""
    names = _FEATURES.get(platform.machine())
    if names is None or not flags:
        _log.info("CPU features are not checked on %s %s", platform.system(), platform.machine())
        return
    missing = sorted(
        name
        for name in (n.lstrip("+") for n in needed)
        if name in names and names[name] not in flags
    )
    if missing:
        raise IncompatibleLibraryError(
            f"CPU features differ: the library may use {', '.join(missing)}, which this CPU "
            "lacks; build it here, or "
            "for the oldest CPU it shall run on, such as target={'kind': 'llvm', 'mcpu': "
            "'x86-64-v3'}"
        )


def check_arch(arch: str, capability: tuple[int, int]) -> None:
    """Check that a GPU runs a cubin for ``arch``: sm_90 on 9.0 and later 9.x, sm_90a on 9.0 alone.

    From the CUDA C++ Programming Guide, "Binary Compatibility" and "Feature Set Compiler Targets".
    """
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    here = f"sm_{capability[0]}{capability[1]}"
    if match is None:
        raise IncompatibleLibraryError(
            f"expected an arch such as 'sm_90a' in the manifest, got {arch!r}: build it again"
        )
    major, minor, only = int(match[1]), int(match[2]), match[3] == "a"
    if capability[0] != major or capability[1] < minor or (only and capability[1] != minor):
        raise IncompatibleLibraryError(
            f"GPU architecture differs: the library's code is for {arch}, this GPU is {here}; "
            f"build it for {here} "
            "(target={'kind': 'cuda', 'arch': '"
            + here
            + "'}), or with target='llvm' to run on the CPU"
        )


def usable_cores() -> list[int]:
    """CPUs that this process may use, no more than its cgroup's quota of CPU time pays for."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    cpus = sorted(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cpus[: max(1, math.ceil(int(quota) / int(period)))]
    except (OSError, ValueError):
        return cpus

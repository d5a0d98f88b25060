"""Fingerprint: which machine and software a tuning record holds for."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from tvmcap.base.codegen import make_target

_EXACT = ("kind", "arch", "features", "cores")
_IF_KNOWN = ("name", "units")


def tvm_version() -> str:
    """Return the version of TVM in use."""
    return str(tvm.__version__)


def fingerprint(target: Any) -> dict[str, Any]:
    """Describe a target and, where it is this machine, the processor: JSON data.

    Keys: kind, arch (mcpu or sm), features (mattr, sorted), cores (threads a CPU kernel may use;
    None on a GPU), and, None where this machine is not the target: name (of the CPU or card), units
    (SMs), memory_gib. A fingerprint itself, as a record holds it, is returned as it is.
    """
    if isinstance(target, Mapping):
        return dict(target)
    attrs = {str(k): v for k, v in target.attrs.items()}
    kind = str(target.kind.name)
    is_cpu = kind == "llvm"
    arch = str(attrs.get("mcpu" if is_cpu else "arch", ""))
    cores = int(attrs.get("num-cores", os.cpu_count() or 1)) if is_cpu else None
    base = {
        "kind": kind,
        "arch": arch,
        "features": sorted(str(a) for a in attrs.get("mattr", ())),
        "cores": cores,
    }
    found = _cpu(arch) if is_cpu else _gpu(kind)
    return {**base, **found}


def target_of(recorded: Mapping[str, Any]) -> Any:
    """Return TVM's Target that a fingerprint is of; raises ConfigError where TVM knows it not."""
    if recorded.get("kind") != "llvm":
        return make_target({"kind": recorded.get("kind"), "arch": recorded.get("arch")})
    features = {"mattr": recorded["features"]} if recorded.get("features") else {}
    cpu = {"kind": "llvm", "num-cores": recorded.get("cores"), **features}
    if not recorded.get("arch"):  # what any processor of LLVM's default runs
        return tvm.target.Target(cpu)
    return make_target({**cpu, "mcpu": recorded["arch"]})


def same_target(recorded: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Whether a record's target is this one; what either side does not know is not compared."""
    if any(recorded.get(k) != mine.get(k) for k in _EXACT):
        return False
    return all(recorded.get(k) in (None, mine.get(k)) or mine.get(k) is None for k in _IF_KNOWN)


@functools.cache
def _cpu(arch: str) -> dict[str, Any]:
    unknown = {"name": None, "units": None, "memory_gib": None}
    if arch and arch != _host_cpu():
        return unknown
    name = None
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        name = next((value.strip() for key, value in lines if key.strip() == "model name"), None)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"name": name, "units": None, "memory_gib": round(memory)}


def _host_cpu() -> str:
    get = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName", allow_missing=True)
    return str(get()) if get is not None else ""


@functools.cache
def _gpu(kind: str) -> dict[str, Any]:
    device = tvm.device(kind, 0)
    if not device.exist:
        return {"name": None, "units": None, "memory_gib": None}
    memory = device.total_global_memory  # starts CUDA, which the driver's name needs
    return {
        "name": str(device.device_name),
        "units": int(device.multi_processor_count),
        "memory_gib": round(memory / 2**30) if memory else None,
    }

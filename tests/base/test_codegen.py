"""Targets: what a name means here, what is refused, and where compilers are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvmcap.base import codegen
from tvmcap.base.errors import ConfigError, ToolchainError


def test_llvm_is_this_cpu() -> None:
    data = codegen.target_data("llvm")
    assert data["kind"] == "llvm" and data["num-cores"] == os.cpu_count()
    assert data["mcpu"] not in ("", "native", "generic")
    target = codegen.make_target("llvm")
    assert target.kind.name == "llvm" and str(target.attrs["mcpu"]) == data["mcpu"]


def test_names_and_objects() -> None:
    assert codegen.target_data("llvm:znver4")["mcpu"] == "znver4"
    assert codegen.target_data('{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 3}') == {
        "kind": "llvm",
        "mcpu": "x86-64-v3",
        "num-cores": 3,
    }
    cuda = codegen.target_data("cuda:sm_80")
    assert (cuda["arch"], cuda["max_threads_per_block"], cuda["max_shared_memory_per_block"]) == (
        "sm_80",
        1024,
        166912,
    )
    assert (
        codegen.target_data({"kind": "cuda", "arch": "sm_90a", "max_threads_per_block": 512})[
            "max_threads_per_block"
        ]
        == 512
    )
    assert (
        codegen.target_data({"kind": "cuda", "arch": "sm_61"})["max_shared_memory_per_block"]
        == 49152
    )


def test_the_default_follows_the_machine(monkeypatch) -> None:
    monkeypatch.setattr(codegen, "gpu_architecture", lambda: None)
    assert codegen.target_data(None)["kind"] == "llvm"
    assert codegen.target_data("cuda")["arch"] == codegen.DEFAULT_ARCH
    monkeypatch.setattr(codegen, "gpu_architecture", lambda: "sm_89")
    assert codegen.target_data(None)["arch"] == codegen.target_data("cuda")["arch"] == "sm_89"


@pytest.mark.parametrize(
    "spec",
    [
        "rocm",
        "llvm -mcpu=znver4",
        "",
        {"arch": "sm_80"},
        {"kind": "metal"},
        '{"kind": ',
        {"kind": "llvm", "mcp": "x"},
        {"kind": "llvm", "mcpu": 3},
        "llvm:zzz",
        {"kind": "llvm", "mcpu": "native"},
    ],
    ids=str,
)
def test_what_is_refused(spec) -> None:
    with pytest.raises(ConfigError, match="target"):
        codegen.make_target(spec)


def test_an_unknown_cpu_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"mcpu: expected .*x86-64-v3.*, got 'x86-64-v33'"):
        codegen.make_target({"kind": "llvm", "mcpu": "x86-64-v33"})
    assert codegen.make_target("llvm:generic").kind.name == "llvm"


@pytest.mark.parametrize(
    "spec", ["llvm", "cuda:sm_90a", {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 3}], ids=str
)
def test_export_is_what_make_target_takes(spec) -> None:
    target = codegen.make_target(spec)
    data = codegen.export_target(target)
    assert codegen.export_target(codegen.make_target(data)) == data
    assert str(codegen.make_target(data)) == str(target)


def test_describe_lists_cpu_features() -> None:
    wide = codegen.describe(codegen.make_target("llvm:x86-64-v3"))
    assert {"avx2", "fma"} <= {f.lstrip("+") for f in wide["features"]}
    assert "avx2" not in codegen.describe(codegen.make_target("llvm:x86-64"))["features"]
    assert "features" not in codegen.describe(codegen.make_target("cuda:sm_80"))


def test_no_driver_is_no_gpu(without_gpu) -> None:
    assert codegen.gpu_architecture() is None


@pytest.mark.parametrize(
    ("count", "device", "wanted"),
    [(2, 1, (8, 6)), (2, 2, "index below 2, got 2"), (0, 0, "finds no GPU")],
)
def test_the_driver_tells_a_gpu_by_its_index(count, device, wanted, monkeypatch) -> None:
    class Driver:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuInit(self, flags):
            return 0

        def cuDeviceGetCount(self, out):
            out._obj.value = count
            return 0

        def cuDeviceGet(self, out, index):
            out._obj.value = index
            return int(index >= count)

        def cuDeviceGetAttribute(self, out, attribute, handle):
            assert handle.value == device
            out._obj.value = {75: 8, 76: 6}[attribute]
            return 0

    monkeypatch.setattr("ctypes.CDLL", Driver)
    if isinstance(wanted, tuple):
        assert codegen.gpu_capability(device) == wanted
        return
    with pytest.raises(LookupError, match=wanted):
        codegen.gpu_capability(device)


@pytest.mark.gpu
def test_the_gpu_here() -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    assert (codegen.gpu_architecture() or "").rstrip("a") == f"sm_{major}{minor}"


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_on_path_comes_first(tmp_path, monkeypatch) -> None:
    mine, home = (
        executable(tmp_path / "bin" / "nvcc"),
        executable(tmp_path / "cuda" / "bin" / "nvcc"),
    )
    monkeypatch.setenv("PATH", str(mine.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert codegen.find_nvcc() == codegen.require_nvcc() == mine
    mine.unlink()
    assert codegen.find_nvcc() == home


def test_no_nvcc_says_what_brings_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(codegen, "find_nvcc", lambda: None)
    with pytest.raises(ToolchainError, match=r"pip install 'tvmcap\[cuda\]'"):
        codegen.require_nvcc()


def test_pips_packages_are_found() -> None:
    nvcc, cudart = codegen.find_nvcc(), codegen.find_cudart()
    assert nvcc is not None and nvcc.is_file() and os.access(nvcc, os.X_OK)
    assert cudart is not None and cudart.name == "libcudart.so.13"

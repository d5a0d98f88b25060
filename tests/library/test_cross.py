"""Cross-compilation: a cubin and no source, without a GPU, and the error of loading it here."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import tvm
from tvm import tirx

import tvmcap
from tests.hosted import undefined_kernels
from tvmcap.base import codegen
from tvmcap.base.errors import BuildError, IncompatibleLibraryError, LibraryError, ToolchainError
from tvmcap.base.manifest import read_manifest
from tvmcap.kernel import tir_pipeline
from tvmcap.library import cross

EM_CUDA = 190


def elf_images(data: bytes, machine: int) -> list[int]:
    """Offsets of the ELF headers for a machine inside a file."""
    found, at = [], data.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == machine:
            found.append(at)
        at = data.find(b"\x7fELF", at + 1)
    return found


def cuda_source(lib) -> str:
    """Return the CUDA source of a library's kernels, as code generation writes it."""
    target = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})
    kernels = {
        g.name_hint: f for g, f in lib.module.functions.items() if isinstance(f, tirx.PrimFunc)
    }
    named = {name: f.with_attr("global_symbol", name) for name, f in kernels.items()}
    with target:
        return str(
            tvm.compile(tvm.IRModule(named), target=target, tir_pipeline=tir_pipeline.TIRX)
            .mod.imports[0]
            .inspect_source()
        )


def test_the_library_holds_a_cubin_and_no_source(hopper_block) -> None:
    data = hopper_block.path.read_bytes()
    assert len(elf_images(data, EM_CUDA)) == 1
    for source in (b"__global__", b"#include", b"__launch_bounds__", b"wgmma.mma_async"):
        assert source not in data
    assert b"_kernel" in data


def test_the_host_function_finds_every_kernel_in_the_library(hopper_block) -> None:
    names = subprocess.run(
        ["nm", "-D", hopper_block.path], capture_output=True, text=True, check=True
    )
    assert "T __tvm_ffi_main_in_arena\n" in names.stdout
    assert undefined_kernels(hopper_block.path) == []


def test_one_kernel_a_call(hopper_block) -> None:
    manifest = hopper_block.manifest
    assert manifest.kernels_per_call == 1
    assert (
        len(manifest.coverage) == 1 and manifest.coverage[0]["served_by"] == "template:hopper_gemm"
    )
    assert manifest.target["kind"] == "cuda" and manifest.target["arch"] == "sm_90a"
    assert read_manifest(hopper_block.path) == manifest


def test_the_kernel_uses_tensor_cores_and_tma(hopper_block) -> None:
    source = cuda_source(hopper_block)
    kernels = [part for part in source.split('extern "C" __global__')[1:] if "{" in part]
    assert len(kernels) == len(hopper_block.manifest.coverage[0]["ranges"])
    for kernel in kernels:
        assert re.search(r"m64n\d+k16_f32_bf16_bf16", kernel)
        assert "cp_async_bulk_tensor_g2s" in kernel
        assert "tvmcap_logistic2(" in kernel  # the epilogue is in the kernel
    assert "wgmma.mma_async" in source and "cp.async.bulk.tensor.2d.shared::cluster" in source


def test_not_verified_and_not_runnable_here(hopper_block, without_gpu) -> None:
    assert hopper_block.manifest.verified is False
    assert hopper_block.executor is None
    with pytest.raises(LibraryError, match=r"cannot run here: .*target='llvm'"):
        hopper_block(None, None, None)
    with pytest.raises(IncompatibleLibraryError, match=r"no NVIDIA driver.*target='llvm'"):
        tvmcap.load(hopper_block.path)
    assert "cannot run here" in hopper_block.explain()


def test_an_export_is_the_same_file(hopper_block, tmp_path) -> None:
    out = hopper_block.export(tmp_path / "block.so")
    assert out.read_bytes() == hopper_block.path.read_bytes()


def test_a_failing_child_says_why(tmp_path) -> None:
    apart = cross.Apart(
        tvm.IRModule({}), {"kind": "cuda", "arch": "sm_90a", "thread_warp_size": "many"}
    )
    with pytest.raises(BuildError, match=r"cross-compiling for sm_90a failed: .*ConfigError"):
        apart.export_library(str(tmp_path / "none.so"))
    assert not (tmp_path / "none.so").exists()


def test_without_nvcc_the_error_says_what_brings_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(codegen, "find_nvcc", lambda: None)
    with pytest.raises(ToolchainError, match=r"tvmcap\[cuda\]"):
        cross.Apart(tvm.IRModule({}), {"kind": "cuda", "arch": "sm_90a"}).export_library(
            str(tmp_path / "none.so")
        )


def test_the_stand_in_stays_in_the_child(hopper_block) -> None:
    loaded = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line
    ]
    assert not any(tempfile.gettempdir() in line for line in loaded)

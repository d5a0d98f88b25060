"""Writing and copying libraries: one file or two, whole or not at all."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import libs
from tvmcap.base.errors import BuildError, DamagedLibraryError, LibraryError, ToolchainError
from tvmcap.base.manifest import read_manifest
from tvmcap.base.tensors import read_tensors, write_tensors
from tvmcap.library import export
from tvmcap.runtime.executor import Executor


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library with its weights inside."""
    return libs.write_chain(tmp_path_factory.mktemp("export") / "chain.so")


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """Return the weights of ``scale``; the second is too short to align the one after it."""
    generator = np.random.default_rng(1)
    return {"w": generator.random(8, np.float32), "b": generator.random(3, np.float32)}


def run_scale(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Check the library of ``scale`` on fresh inputs."""
    x = np.random.default_rng(2).random((5, 8), np.float32)
    np.testing.assert_allclose(Executor(path)(x), x * weights["w"] + weights["b"][2], rtol=1e-6)


def test_one_file_with_a_manifest(chain: Path) -> None:
    assert [p.name for p in chain.parent.iterdir()] == ["chain.so"]
    assert read_manifest(chain).signature == libs.chain_signature()
    assert chain.stat().st_mode & current_mask() == 0
    assert chain.stat().st_mode & 0o600 == 0o600


def current_mask() -> int:
    """Return the process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_large_weights_lie_beside(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    path = libs.write_scale(tmp_path / "scale.so", weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scale.so", "scale.so.safetensors"]
    kept = read_manifest(path).weights
    assert kept is not None and kept.names == ("w", "b") and kept.file == "scale.so.safetensors"
    run_scale(path, weights)


def test_the_weights_file_is_safetensors(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {
        "odd": np.arange(3, dtype=np.int8),
        "w": np.random.default_rng(0).random((16, 4)),
        "flag": np.array([True]),
    }
    write_tensors(tmp_path / "w.safetensors", tensors)
    loaded = safetensors.load_file(tmp_path / "w.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    names = "float32 float16 bfloat16 float64 int64 int32 int16 int8 uint8 bool"
    names += " float8_e4m3fn float8_e5m2"
    tensors = {name: (torch.rand(3, 5) * 9).to(getattr(torch, name)) for name in names.split()}
    tensors["empty"] = torch.empty(0, 3)
    digest = write_tensors(tmp_path / "w.safetensors", tensors)
    stored = read_tensors(tmp_path / "w.safetensors", digest)
    for name, tensor in tensors.items():
        dtype, shape, data = stored[name]
        assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert bytes(data) == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_changed_or_missing_weights_are_damage(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    path = libs.write_scale(tmp_path / "scale.so", weights)
    file = export.weights_path(path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedLibraryError, match="not the weights of this library"):
        Executor(path)
    file.unlink()
    with pytest.raises(DamagedLibraryError, match="copy both files"):
        Executor(path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 1 << 60) + b"{}"]
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    import hashlib

    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedLibraryError):
        read_tensors(path, hashlib.sha256(content).hexdigest())


def test_offsets_outside_the_file_are_damage(tmp_path: Path) -> None:
    import hashlib

    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}
    ).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(16)
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedLibraryError, match="not a safetensors file"):
        read_tensors(path, hashlib.sha256(content).hexdigest())


GLOBAL = """
import ctypes, sys, numpy as np, torch
import tvm_ffi.libinfo
from tvmcap.runtime.executor import Executor
from tvmcap.runtime.loader import ffi
ffi()
ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
print(float(Executor(sys.argv[2])(torch.ones(2, 2))[0, 0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about the dynamic linker of Linux")
def test_kernels_of_one_name_that_are_global_are_not_called(tmp_path: Path) -> None:
    paths = []
    for add in (1, 2):
        built = libs.quick(lambda x, add=add: (x * 3).relu() + add, torch.ones(2, 2))
        paths.append(tmp_path / f"{add}.so")
        built.export(paths[-1])
    names = [Executor(path).kernel_launches(torch.ones(2, 2)) for path in paths]
    assert names[0] == names[1]
    command = [sys.executable, "-c", GLOBAL, *map(str, paths)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 5


def test_copying(chain: Path, tmp_path: Path) -> None:
    export.copy_library(chain, tmp_path / "copy.so")
    assert (tmp_path / "copy.so").read_bytes() == chain.read_bytes()
    export.copy_library(tmp_path / "copy.so", tmp_path / "copy.so")  # onto itself
    assert read_manifest(tmp_path / "copy.so") == read_manifest(chain)


def test_copying_takes_the_weights_along(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    source = libs.write_scale(tmp_path / "scale.so", weights)
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "block.so"
    export.copy_library(source, target)
    assert sorted(p.name for p in target.parent.iterdir()) == ["block.so", "block.so.safetensors"]
    source.unlink()
    export.weights_path(source).unlink()
    run_scale(target, weights)


def test_copying_without_the_weights_is_an_error(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    source = libs.write_scale(tmp_path / "scale.so", weights)
    export.weights_path(source).unlink()
    with pytest.raises(LibraryError, match="are missing; copy both files"):
        export.copy_library(source, tmp_path / "block.so")
    assert not (tmp_path / "block.so").exists()


def test_copying_a_damaged_library_is_an_error(chain: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(chain.read_bytes()[:-1])
    with pytest.raises(DamagedLibraryError):
        export.copy_library(damaged, tmp_path / "copy.so")


def test_places_that_cannot_be_written(chain: Path, tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"does not exist; make it first"):
        export.copy_library(chain, tmp_path / "missing" / "block.so")
    with pytest.raises(LibraryError, match=r"it is a folder; give a file name"):
        export.copy_library(chain, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(LibraryError, match="cannot write"):
        export.copy_library(chain, tmp_path / "file" / "block.so")


def test_a_folder_without_permission(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tvmcap.base.manifest.os.open", refuse)
    with pytest.raises(LibraryError, match="Permission denied; choose a folder"):
        export.copy_library(chain, tmp_path / "block.so")


def test_no_compiler_to_link_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = libs.compile_module(libs.chain_module())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match="install gcc or clang"):
        export.write(executable, tmp_path / "block.so", libs.manifest_for(libs.chain_signature()))
    monkeypatch.setenv("CC", str(tmp_path / "gcc-99"))
    with pytest.raises(ToolchainError, match="gcc-99"):
        export.write(executable, tmp_path / "block.so", libs.manifest_for(libs.chain_signature()))
    assert not list(tmp_path.iterdir())


def test_a_linker_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("CXX", "false")
    executable = libs.compile_module(libs.chain_module())
    with pytest.raises(BuildError, match="linking the library with false failed"):
        export.write(executable, tmp_path / "block.so", libs.manifest_for(libs.chain_signature()))
    assert not list(tmp_path.iterdir())

"""A library without Python: the C++ program, and the folder that runs on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tvmcap
from tests import libs
from tvmcap.base.codegen import find_cudart
from tvmcap.base.errors import ConfigError, DamagedLibraryError, ToolchainError
from tvmcap.cli import main
from tvmcap.package import package
from tvmcap.view import arrays

SOURCE = Path(__file__).parent.parent / "examples" / "cpp"


def block(x, w, b):
    return torch.relu(x @ w + b), (x * 2).sum(-1)


def block_args(dtype=torch.float32, device="cpu"):
    shapes = ((4, 32), (32, 48), (48,))
    return [torch.randn(s).to(device, dtype) / 4 for s in shapes]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a library, and a sample from PyTorch."""
    folder = tmp_path_factory.mktemp("cpp")
    args = block_args()
    lib = libs.quick(block, *args, dynamic={"x": {0: "B"}}, constants=("w",))
    lib.export(folder / "block.so")
    x = torch.randn(7, 32)
    outputs = [t.numpy() for t in block(x, *args[1:])]
    names = {f"out{i}": a for i, a in enumerate(outputs)}
    path = str(folder / "sample.safetensors")
    arrays.write_sample(path, lib.signature, [x.numpy(), args[2].numpy()], names)
    return folder


def wheel(name):
    import importlib.util

    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program, compiled by the plain line of its README."""
    path = tmp_path_factory.mktemp("program") / "run"
    tvm, ffi = wheel("tvm") / "lib", wheel("tvm_ffi")
    command = [
        shutil.which("g++") or "clang++",
        "-O1",
        "-std=c++17",
        "-Wall",
        "-Werror",
        str(SOURCE / "run.cpp"),
    ]
    command += ["-o", str(path), f"-I{ffi}/include", f"-L{tvm}", f"-L{ffi}/lib"]
    command += ["-Wl,--no-as-needed", "-ltvm_ffi", "-ltvm_runtime", "-ltvm_runtime_extra", "-ldl"]
    subprocess.run([*command, f"-Wl,-rpath,{tvm}:{ffi}/lib"], check=True)
    return path


def run(program, *args, **options):
    command = [str(program), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={}, **options)


def test_the_readme_has_the_line_that_is_tested():
    text = (SOURCE / "README.md").read_text()
    assert "-Wl,--no-as-needed -ltvm_ffi -ltvm_runtime -ltvm_runtime_extra -ldl" in text


def test_the_program_runs_a_library_and_checks_it(place, program):
    done = run(program, place / "block.so", place / "sample.safetensors")
    assert done.returncode == 0, done.stderr
    assert "out0: 336 values" in done.stdout and "out1: 7 values" in done.stdout
    assert done.stdout.count("ok") == 2 and "100 calls, median" in done.stdout


def test_a_sample_can_be_read_by_whoever_may_read_new_files(place):
    (place / "new").touch()
    mode = (place / "sample.safetensors").stat().st_mode
    assert mode == (place / "new").stat().st_mode


def test_the_program_sees_a_wrong_result(place, program, tmp_path):
    lib = tvmcap.load(place / "block.so")
    inputs, outputs = arrays.read_sample(str(place / "sample.safetensors"), lib.signature)
    for value in (1.0, np.nan):
        bad = {**outputs, "out1": outputs["out1"].copy()}
        bad["out1"][3] += value
        arrays.write_sample(str(tmp_path / "bad.safetensors"), lib.signature, inputs, bad)
        done = run(program, place / "block.so", tmp_path / "bad.safetensors")
        assert done.returncode == 1 and ("WRONG" in done.stdout) == (value == 1.0)
        assert done.stdout.count("ok") == 1


def test_the_program_refuses_files_that_are_no_good(place, program, tmp_path):
    good = (place / "block.so").read_bytes()
    sample = place / "sample.safetensors"
    for data, words in (
        (good[:9000], "no tvmcap library"),
        (b"", "no tvmcap library"),
        (good[1000:], "truncated"),
    ):
        (tmp_path / "bad.so").write_bytes(data)
        done = run(program, tmp_path / "bad.so", sample)
        assert done.returncode == 1 and words in done.stderr
    (tmp_path / "bad").write_bytes(sample.read_bytes()[:100])
    done = run(program, place / "block.so", tmp_path / "bad")
    assert done.returncode == 1 and "safetensors" in done.stderr
    told = sample.read_bytes()
    (tmp_path / "bad").write_bytes(told.replace(b'"shape":[7]', b'"shape":[9]'))
    assert (tmp_path / "bad").read_bytes() != told
    done = run(program, place / "block.so", tmp_path / "bad")
    assert done.returncode == 1 and "out1 does not fit its shape" in done.stderr
    assert run(program).returncode == 2


def test_it_builds_with_cmake(place, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    configure = ["cmake", "-S", str(SOURCE), "-B", str(tmp_path)]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)
    done = run(tmp_path / "run", place / "block.so", place / "sample.safetensors", 1)
    assert done.returncode == 0, done.stderr


def test_the_folder_runs_alone(tmp_path, capsys):
    weights = {"weight0": torch.randn(8), "weight1": torch.randn(3)}
    path = libs.write_scale(tmp_path / "scale.so", weights)
    assert main(["package", str(path), "-o", str(tmp_path / "dist")]) == 0
    assert "./run scale.so sample.safetensors" in capsys.readouterr().out
    moved = (tmp_path / "dist").rename(tmp_path / "elsewhere")
    done = run("./run", "scale.so", "sample.safetensors", cwd=moved)
    assert done.returncode == 0 and "128 values" in done.stdout, done.stderr
    used = subprocess.run(["ldd", "run"], cwd=moved, env={}, capture_output=True, text=True).stdout
    ours = [line for line in used.splitlines() if "tvm" in line]
    assert len(ours) == 3 and all(f"{moved}/./lib/" in line for line in ours), used
    for package_name in ("apache-tvm", "apache-tvm-ffi"):
        texts = [p.read_text() for p in (moved / "licences" / package_name).rglob("LICENSE")]
        assert any("Apache License" in text for text in texts)
    told = (moved / "README.md").read_text()
    assert all(f"| {p.relative_to(moved)} |" in told for p in (moved / "lib").iterdir())
    assert "glibc 2." in told and "licences" in told and "scale.so.safetensors" in told


def test_bfloat16_passes_through_the_sample(program, tmp_path):
    lib = libs.quick(block, *block_args(torch.bfloat16), dynamic={"x": {0: "B"}})
    path, sample = lib.export(tmp_path / "half.so"), tmp_path / "s.safetensors"
    command = ["run", str(path), "--sizes", "B=5", "--sample", str(sample)]
    assert main(command) == 0
    done = run(program, path, sample, 1)
    assert done.returncode == 0, done.stderr


def test_folders_and_libraries_that_cannot_be(place, hopper_block, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="new or empty folder"):
        package(place / "block.so", tmp_path / "full")
    with pytest.raises(ConfigError, match="no folder"):
        package(place / "block.so", tmp_path / "a" / "b")
    (tmp_path / "bad.so").write_bytes((place / "block.so").read_bytes()[:9000])
    with pytest.raises(DamagedLibraryError):
        package(tmp_path / "bad.so", tmp_path / "dist")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler"):
        package(place / "block.so", tmp_path / "dist")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.so", "full"]


def test_a_library_for_another_machine_needs_a_sample(hopper_block, tmp_path, without_gpu):
    with pytest.raises(ConfigError, match="give --sample"):
        package(hopper_block.path, tmp_path / "dist")
    signature = hopper_block.signature
    inputs = arrays.draw(signature, {}, 0)
    outputs = {"out0": np.zeros((16, 128), np.float32)}
    sample = str(tmp_path / "s.safetensors")
    arrays.write_sample(sample, signature, inputs, outputs)
    folder = package(hopper_block.path, tmp_path / "dist", sample=sample)
    names = {path.name for path in (folder / "lib").iterdir()}
    assert names > {"libtvm_runtime_cuda.so", "libcudart.so.13"}
    assert list((folder / "licences" / "nvidia-cuda-runtime").rglob("License.txt"))
    assert "sm_90a" in (folder / "README.md").read_text()


@pytest.mark.gpu
def test_the_folder_of_a_gpu_library_runs_alone(tmp_path):
    args = block_args(device="cuda")
    lib = libs.quick(block, *args, target="cuda", dynamic={"x": {0: "B"}})
    folder = package(lib.export(tmp_path / "block.so"), tmp_path / "dist")
    environment = {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
    done = subprocess.run(
        ["./run", "block.so", "sample.safetensors"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("ok") == 2, done.stdout + done.stderr
    assert find_cudart() is not None


def total(x):
    return (x * x).sum()


def test_a_result_without_dimensions(program, tmp_path):
    path = libs.quick(total, torch.rand(3, 4), dynamic={"x": {0: "B"}}).export(tmp_path / "t.so")
    folder = package(path, tmp_path / "dist")
    done = run(program, path, folder / "sample.safetensors", 1)
    assert done.returncode == 0, done.stderr
    assert "out0: 1 values" in done.stdout


def test_a_library_with_gradients_runs_under_torch_alone(tmp_path, capsys):
    x = torch.rand(3, 4, requires_grad=True)
    path = libs.quick(total, x, backward=True).export(tmp_path / "gradients.so")
    sample = tmp_path / "sample.npz"
    np.savez(sample, x=np.ones((3, 4), "f"), out0=np.float32(12))
    for given in (None, sample):
        with pytest.raises(ConfigError, match="runs under torch alone"):
            package(path, tmp_path / "dist", sample=given)
    assert not (tmp_path / "dist").exists()
    assert main(["serve", str(path), "--port", "0", "--max-batch", "1"]) == 2
    assert "cannot be served" in capsys.readouterr().err
    assert main(["run", str(path), "--save", str(tmp_path / "out.npy")]) == 0
    assert np.load(tmp_path / "out.npy").shape == ()

"""package: a folder with a library, what it needs, and a program that runs it; no Python in it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from tvmcap.base.codegen import find_cudart
from tvmcap.base.errors import BuildError, ConfigError, IncompatibleLibraryError, ToolchainError
from tvmcap.base.folders import temporary_folder
from tvmcap.base.manifest import Manifest
from tvmcap.library.export import copy_library
from tvmcap.view import arrays

_SOURCE = Path(__file__).parent / "cpp" / "run.cpp"
_LICENCE = re.compile(r"licen|notice", re.IGNORECASE)
_SYMBOLS = re.compile(rb"\b(GLIBC|GLIBCXX)_(\d+(?:\.\d+)+)\b")
_README = """\
# {library}

Runs without Python and without a compiler, on Linux {machine} with {needs}:

    ./run {library} sample.safetensors

calls the library on the inputs of the sample, compares the results with the sample's, and times a
call. Exit status 0: they agree. The folder can be moved.

| file | what it is | licence |
| --- | --- | --- |
| {library} | the library, target {target}{beside} | yours |
| run | the program; source: examples/cpp of tvmcap | Apache-2.0 |
| sample.safetensors | inputs by argument, outputs out0 ... | yours |
{rows}

The texts of the licences are in `licences`.
"""


def package(
    library: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    sample: str | os.PathLike[str] | None = None,
) -> Path:
    """Gather a library and TVM's runtime in ``output``, with their licences and a program.

    Parameters
    ----------
    library : the library; weights beside it come along.
    output : a folder that does not exist or is empty; it appears whole or not at all.
    sample : file of inputs and outputs that the program compares with; by default random inputs,
        and what the library makes of them here.

    Raises
    ------
    ConfigError
        The folder holds something; the library needs Python; it cannot run here and ``sample`` is
        missing.
    ToolchainError, BuildError
        No C++ compiler, no CUDA runtime for a GPU's library; the program does not compile.
    DamagedLibraryError, LibraryError
        The library, or the folder above ``output``, cannot be used.
    """
    library, output = Path(library), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output}: expected a new or empty folder; name another or empty it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output}: no folder {output.absolute().parent}; make it first")
    with temporary_folder(f".{output.name}-", output.parent) as temporary:
        folder = temporary / output.name
        (folder / "lib").mkdir(parents=True)
        manifest = copy_library(library, folder / library.name)
        if manifest.training is not None:
            raise ConfigError(
                f"{library}: a library with gradients runs under torch alone: build it without "
                "backward=True"
            )
        _write_sample(library, manifest, folder, sample)
        shared = _copy_runtime(manifest, folder / "lib")
        _compile(folder)
        for name in {name for name, _ in shared}:
            _copy_licences(name, folder / "licences" / name)
        (folder / "README.md").write_text(_readme(manifest, folder, library.name, shared))
        os.replace(folder, output)
    return output


def _write_sample(
    library: Path, manifest: Manifest, folder: Path, sample: str | os.PathLike[str] | None
) -> None:
    from tvmcap.compiled import load

    signature, target = manifest.signature, str(folder / "sample.safetensors")
    if sample is not None:
        inputs, outputs = arrays.read_sample(os.fspath(sample), signature)
    else:
        try:
            lib = load(library)
        except IncompatibleLibraryError as e:
            raise ConfigError(
                f"{e}; as it cannot run here, give --sample FILE, which tvmcap run writes where it "
                "can"
            ) from e
        inputs = arrays.draw(signature, {}, seed=0)
        outputs = arrays.call(lib, inputs)
    arrays.write_sample(target, signature, inputs, outputs)


def _copy_runtime(manifest: Manifest, folder: Path) -> list[tuple[str, Path]]:
    """Copy the shared libraries; returns the package of each, and its copy."""
    if manifest.needs:
        raise ConfigError(
            f"the library needs {', '.join(manifest.needs)}, which is Python's: build it without "
            "vendor_matmul"
        )
    tvm, ffi = (_package_folder(name) / "lib" for name in ("tvm", "tvm_ffi"))
    found = [("apache-tvm-ffi", ffi / "libtvm_ffi.so")]
    found += [("apache-tvm", tvm / f"libtvm_runtime{part}.so") for part in ("", "_extra")]
    if manifest.target["kind"] == "cuda":
        cudart = find_cudart()
        if cudart is None:
            raise ToolchainError(
                "libcudart.so.13 is not here: pip install 'nvidia-cuda-runtime==13.0.*'"
            )
        found += [("apache-tvm", tvm / "libtvm_runtime_cuda.so"), ("nvidia-cuda-runtime", cudart)]
    return [(name, Path(shutil.copy(path, folder))) for name, path in found]


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(f"{name} is not installed: pip install apache-tvm==0.27.0.post1")
    return Path(spec.submodule_search_locations[0])


def _compile(folder: Path) -> None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise ToolchainError("no C++ compiler for the program: install g++, or set CXX to one")
    command = [compiler, "-O2", "-std=c++17", str(_SOURCE), "-o", str(folder / "run")]
    command += ["-I", str(_package_folder("tvm_ffi") / "include"), "-L", str(folder / "lib")]
    command += ["-Wl,--no-as-needed", "-ltvm_ffi", "-ltvm_runtime", "-ltvm_runtime_extra", "-ldl"]
    done = subprocess.run(
        [*command, "-Wl,-rpath,$ORIGIN/lib"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{compiler} cannot compile {_SOURCE}:\n{done.stderr[-2000:]}")


def _copy_licences(name: str, folder: Path) -> None:
    """Copy the licence files of a Python package, as they lie in it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if _LICENCE.search(file.name) and "include" not in file.parts:
            source, target = Path(str(file.locate())), folder.joinpath(*file.parts)
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    if not any(folder.iterdir()):
        raise ToolchainError(f"the licence of {name} is not here: install it with pip")


def _readme(manifest: Manifest, folder: Path, library: str, shared: list[tuple[str, Path]]) -> str:
    """Describe the folder, and what of the system its files need."""
    newest: dict[str, tuple[int, ...]] = {}
    for path in (folder / "run", *(path for _, path in shared)):
        for name, version in _SYMBOLS.findall(path.read_bytes()):
            found = tuple(map(int, version.decode().split(".")))
            newest[name.decode()] = max(newest.get(name.decode(), ()), found)
    libc, cxx = (".".join(map(str, newest[name])) for name in ("GLIBC", "GLIBCXX"))
    needs = f"glibc {libc} or later and libstdc++.so.6 (GLIBCXX_{cxx} or later)"
    if manifest.target["kind"] == "cuda":
        needs += " and an NVIDIA driver for CUDA 13"
    rows = []
    for name, path in shared:
        licence = "CUDA Toolkit EULA" if name.startswith("nvidia") else "Apache-2.0"
        rows.append(
            f"| lib/{path.name} | of {name} {importlib.metadata.version(name)} | {licence} |"
        )
    return _README.format(
        library=library,
        machine=os.uname().machine,
        needs=needs,
        target=" ".join(
            str(v) for k, v in manifest.target.items() if k in ("kind", "mcpu", "arch")
        ),
        beside="" if manifest.weights is None else f"; its weights are in {manifest.weights.file}",
        rows="\n".join(rows),
    )

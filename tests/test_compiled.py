"""A library as its user holds it: exported, loaded, and what it no longer knows."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tvmcap
from tvmcap.base.errors import (
    DamagedLibraryError,
    IncompatibleLibraryError,
    LibraryError,
    VerifyError,
)
from tvmcap.base.manifest import rewrite_manifest


@pytest.fixture(scope="module")
def library() -> Any:
    return tvmcap.build(
        lambda x, y: {"sum": x + y, "row": x.sum(1)},
        (torch.zeros(3, 4), torch.zeros(3, 4)),
        dynamic={"x": {0: "B"}, "y": {0: "B"}},
        target="llvm",
        tune="none",
    )


@pytest.fixture
def exported(library: Any, tmp_path: Path) -> Path:
    return Path(library.export(tmp_path / "pair.so"))


def test_export_and_load(library: Any, exported: Path) -> None:
    other = tvmcap.load(exported)
    assert other.manifest == library.manifest and other.signature == library.signature
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    got = other(x, y=y)
    torch.testing.assert_close(got, {"sum": x + y, "row": x.sum(1)})


def test_printed_it_is_one_line(library: Any, exported: Path) -> None:
    for lib in (library, tvmcap.load(exported)):
        assert "x: float32[B, 4]" in repr(lib) and len(repr(lib).splitlines()) == 1


def test_one_file(exported: Path) -> None:
    assert [p.name for p in exported.parent.iterdir()] == ["pair.so"]


def test_what_load_does_not_know(exported: Path) -> None:
    other = tvmcap.load(str(exported))
    assert (
        other.config is None
        and other.captured is None
        and other.module is None
        and other.passes == []
    )
    with pytest.raises(VerifyError, match="reference=fn"):
        tvmcap.verify(other)
    report = tvmcap.verify(other, reference=lambda x, y: {"sum": x + y, "row": x.sum(1)})
    assert report.ok
    assert "pair" not in other.explain() and "kernels" in other.explain()


def test_the_capture_is_made_when_asked_for(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.captured.signature == library.signature
    assert library.captured is library.captured


def test_marking_is_kept_in_the_file(exported: Path) -> None:
    other = tvmcap.load(exported)
    for ok in (False, True):
        other.mark_verified(ok)
        assert tvmcap.load(exported).manifest.verified is ok
    x = torch.randn(2, 4)
    torch.testing.assert_close(other(x, x)["sum"], x + x)


@pytest.mark.parametrize(("verified", "warns"), [(False, True), (True, False), (None, False)])
def test_load_warns_of_a_library_that_failed(
    exported: Path, verified: bool | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite_manifest(exported, replace(tvmcap.load(exported).manifest, verified=verified))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tvmcap"):
        assert tvmcap.load(exported).manifest.verified is verified
    assert ("was not verified where it was built" in caplog.text) == warns


@pytest.mark.parametrize("name", ["missing/pair.so", "file/pair.so"])
def test_an_export_that_cannot_be_written(library: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LibraryError, match=r"pair\.so"):
        library.export(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_export_replaces_whole(library: Any, exported: Path) -> None:
    exported.write_bytes(b"old")
    assert tvmcap.load(library.export(exported)).manifest == library.manifest


@pytest.mark.parametrize("use", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_library_is_not_pickled_or_copied(library: Any, use: Any) -> None:
    with pytest.raises(LibraryError, match=r"lib\.export\(path\).*tvmcap\.load\(path\)"):
        use(library)


@pytest.mark.parametrize("path", [None, 3, b"pair.so", "", "x" * 300, "nul\0.so"], ids=repr)
def test_what_names_no_file(
    library: Any, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (tvmcap.load, library.export):
        with pytest.raises(LibraryError):
            use(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 10, 4096, -1, -40])
def test_a_truncated_file(exported: Path, cut: int) -> None:
    data = exported.read_bytes()
    exported.write_bytes(data[:cut] if cut else b"")
    with pytest.raises(DamagedLibraryError, match=r"pair\.so"):
        tvmcap.load(exported)


def test_a_flipped_bit(exported: Path) -> None:
    data = bytearray(exported.read_bytes())
    data[len(data) // 2] ^= 4
    exported.write_bytes(data)
    with pytest.raises(DamagedLibraryError):
        tvmcap.load(exported)


def test_no_file_and_no_library(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"none\.so"):
        tvmcap.load(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("hello" * 100)
    with pytest.raises(DamagedLibraryError, match=r"text\.so"):
        tvmcap.load(tmp_path / "text.so")
    with pytest.raises(LibraryError):
        tvmcap.load(tmp_path)


def test_a_library_of_another_machine(library: Any, exported: Path) -> None:
    manifest = library.manifest
    rewrite_manifest(exported, replace(manifest, versions={**manifest.versions, "tvm": "0.1"}))
    with pytest.raises(IncompatibleLibraryError, match=r"built with 0\.1"):
        tvmcap.load(exported)
    rewrite_manifest(
        exported,
        replace(
            manifest, target={"kind": "llvm", "features": ["+amx-bf16", "+avx512vp2intersect"]}
        ),
    )
    with pytest.raises(IncompatibleLibraryError, match="CPU features differ"):
        tvmcap.load(exported)


def test_loads_without_torch_and_without_the_compiler(exported: Path) -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "tvm") or name.startswith(("torch.", "tvm.")):
            raise ImportError(name)
import importlib.util as u
from importlib.machinery import PathFinder
import numpy as np, tvmcap
sys.meta_path.insert(0, Refuse())
u.find_spec = lambda name, package=None: PathFinder.find_spec(name)  # where files are
lib = tvmcap.load(sys.argv[1])
x = np.ones((5, 4), np.float32)
print(lib(x, x)["sum"].sum(), "torch" in sys.modules, "tvm" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(exported)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["40.0", "False", "False"], done.stderr


def test_without_torch_what_needs_it_says_so(exported: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nimport tvmcap\n"
        "for name in ('build', 'verify', 'explain_capture'):\n"
        "    try: getattr(tvmcap, name)\n"
        "    except tvmcap.errors.ToolchainError as e: print(e)\n"
        "try: tvmcap.load(sys.argv[1]).scoreboard()\n"
        "except tvmcap.errors.ToolchainError as e: print(e)\n"
    )
    command = [sys.executable, "-c", code, str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all("pip install torch" in line for line in lines)

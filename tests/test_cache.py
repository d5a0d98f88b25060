"""The compile cache: built once, shared, never trusted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.libs import chain_signature, manifest_for
from tvmcap import cache
from tvmcap.base.errors import LibraryError
from tvmcap.base.manifest import Weights, append_manifest, read_manifest, write_atomically

ROOT = Path(__file__).parents[1]
MANIFEST = manifest_for(chain_signature())


def build(path: Path, size: int = 1000) -> None:
    """Write a file that looks like a library."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"\x7fELF" + bytes(size - 4))
        append_manifest(temporary, replace(MANIFEST, key=path.stem))

    write_atomically(path, write)


def never(path: Path) -> None:
    """Fail where nothing should be built."""
    raise AssertionError(f"{path} was built again")


def test_a_key_is_of_the_content() -> None:
    parts = {
        "source": "def f(x): ...",
        "options": {"tune": 3, "target": None},
        "sizes": [1, 2.5, True],
    }
    reordered = {
        "sizes": [1, 2.5, True],
        "options": {"target": None, "tune": 3},
        "source": "def f(x): ...",
    }
    assert cache.key(parts) == cache.key(reordered)
    assert len(cache.key(parts)) == 64
    others = [
        {**parts, "source": "def f(y): ..."},
        {**parts, "sizes": [2.5, 1, True]},
        {**parts, "more": None},
    ]
    assert len({cache.key(p) for p in [parts, *others]}) == 4


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        cache.key({"value": value})


def test_built_once(tmp_path: Path) -> None:
    assert cache.lookup("k", tmp_path / "new") is None
    path = cache.store("k", build, tmp_path / "new")
    assert read_manifest(path).key == "k"
    assert cache.store("k", never, tmp_path / "new") == path
    assert cache.lookup("k", tmp_path / "new") == path
    assert cache.lookup("other", tmp_path / "new") is None


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        cache.store("k", never, tmp_path)
    assert cache.lookup("k", tmp_path) is None
    cache.store("k", build, tmp_path)


@pytest.mark.parametrize("length", [0, 3, 500, -57, -56, -1])
def test_a_damaged_entry_is_dropped_and_built_again(
    tmp_path: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.store("k", build, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:length] if length else b"")
    assert cache.lookup("k", tmp_path) is None
    assert not path.exists() and "dropping a cached library" in caplog.text
    assert cache.store("k", build, tmp_path).read_bytes() == whole


def test_damage_found_later_can_be_dropped(tmp_path: Path) -> None:
    path = cache.store("k", build, tmp_path)
    cache.drop("k", tmp_path)
    cache.drop("k", tmp_path)
    assert not path.exists()


def test_an_entry_without_its_weights_is_dropped(tmp_path: Path) -> None:
    def with_weights(path: Path) -> None:
        path.write_bytes(b"\x7fELF")
        (path.parent / f"{path.name}.safetensors").write_bytes(bytes(100))
        append_manifest(
            path, replace(MANIFEST, weights=Weights(f"{path.name}.safetensors", "", ()))
        )

    path = cache.store("k", with_weights, tmp_path)
    assert cache.status(tmp_path).bytes == path.stat().st_size + 100
    (tmp_path / "k.so.safetensors").unlink()
    assert cache.lookup("k", tmp_path) is None


RACE = """
import sys, time
from pathlib import Path
from tests.test_cache import build
from tvmcap import cache
folder = Path(sys.argv[1])
def slow(path):
    with open(folder / "builds", "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    build(path)
print(cache.store("k", slow, folder / "cache"))
"""


def test_two_processes_build_once(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    both = [
        subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert printed == {str(tmp_path / "cache" / "k.so")}
    assert (tmp_path / "builds").read_text() == "built\n"
    assert read_manifest(tmp_path / "cache" / "k.so").key == "k"


def test_a_killed_build_does_not_block_the_next(tmp_path: Path) -> None:
    code = RACE.replace("time.sleep(0.5)", "time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "builds").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert read_manifest(cache.store("k", build, tmp_path / "cache")).key == "k"


def fill(folder: Path, count: int) -> list[Path]:
    """Store libraries of one size, each used a second after the one before."""
    paths = []
    for i in range(count):
        paths.append(cache.store(f"k{i}", build, folder))
        os.utime(paths[-1], (1000 + i, 1000 + i))
    return paths


def test_status_and_clear(tmp_path: Path) -> None:
    assert cache.status(tmp_path / "none") == cache.Status(tmp_path / "none", 0, 0)
    paths = fill(tmp_path, 3)
    size = sum(p.stat().st_size for p in paths)
    assert cache.status(tmp_path) == cache.Status(tmp_path, 3, size)
    (tmp_path / "a user's file").write_text("kept")
    assert cache.clear(tmp_path) == cache.Status(tmp_path, 3, size)
    assert cache.status(tmp_path).entries == 0
    assert [p.name for p in tmp_path.iterdir()] == ["a user's file"]


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    paths = fill(tmp_path, 4)
    size = paths[0].stat().st_size
    cache.lookup("k0", tmp_path)
    assert cache.prune(2 * size, tmp_path).entries == 2
    assert [p.exists() for p in paths] == [True, False, False, True]
    assert cache.prune(2 * size, tmp_path) == cache.Status(tmp_path, 0, 0)


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "tvmcap"):
        path = cache.store("k", build, tmp_path / "file" / "cache")
    assert read_manifest(path).key == "k"
    assert "set cache_dir to a folder that you may write to" in caplog.text
    assert tmp_path not in path.parents
    assert cache.store("k", never, tmp_path / "file" / "cache") == path


def test_a_read_only_cache_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.store("k", build, tmp_path)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.utime", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert cache.store("k", never, tmp_path) == path


def test_errors_of_the_build_come_through(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise LibraryError("no space")

    with pytest.raises(LibraryError, match="no space"):
        cache.store("k", fail, tmp_path)


def test_the_default_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache.store("k", build) == tmp_path / "tvmcap" / "k.so"


def test_libraries_of_another_version_are_not_called_damaged(tmp_path: Path) -> None:
    build(tmp_path / "a.so")
    (tmp_path / "b.so").write_bytes(b"\x7fELF")
    append_manifest(tmp_path / "b.so", replace(MANIFEST, format=MANIFEST.format - 1))
    (tmp_path / "c.so").write_bytes(b"\x7fELF and no more")
    held = {row["target"]: row["libraries"] for row in cache.contents(tmp_path)}
    assert held == {"llvm": 1, "of another version": 1, "damaged": 1}

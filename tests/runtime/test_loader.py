"""Loading: what comes into the process, and what the thread pool does to it."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests import libs
from tvmcap.base.errors import (
    ConfigError,
    DamagedLibraryError,
    IncompatibleLibraryError,
    LibraryError,
)
from tvmcap.library import export
from tvmcap.runtime import loader, opening
from tvmcap.runtime.executor import Executor

ROOT = Path(__file__).parents[2]
CALL = """
import numpy as np
from tvmcap.runtime.executor import Executor
x, w = np.random.rand(70, 8).astype("float32"), np.random.rand(8, 8).astype("float32")
np.testing.assert_allclose(Executor(sys.argv[1])(x, w), x @ w @ w, rtol=1e-5)
"""


def run(code: str, *args: object, **environ: str) -> str:
    """Run Python code in a fresh process and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, os\n" + code, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WITHOUT = "sys.modules['torch'] = None\n"


def test_neither_torch_nor_the_compiler_is_needed(chain: Path) -> None:
    code = (
        WITHOUT + CALL + "assert 'tvm' not in sys.modules\nmaps = open('/proc/self/maps').read()\n"
    )
    code += "assert 'libtvm_runtime.so' in maps and 'libtvm_compiler' not in maps\n"
    run(code, chain)


def test_our_own_modules_import_no_torch() -> None:
    import_all = "import tvmcap.runtime.executor, tvmcap.library.export, tvmcap.cache\n"
    run(
        "class Finder:\n def find_spec(self, name, path=None, target=None):\n"
        "  assert name.partition('.')[0] not in ('torch', 'tvm', 'tvm_ffi'), name\n"
        "sys.meta_path.insert(0, Finder())\n" + import_all
    )


@pytest.mark.parametrize(
    "order", ["import tvm\n{call}", "{call}import tvm\ntvm.runtime.tensor(x)\n{call}"]
)
def test_tvm_in_the_same_process(chain: Path, order: str) -> None:
    run(WITHOUT + order.format(call=CALL), chain)


def test_weights_beside_the_library_need_no_torch(folder: Path) -> None:
    import numpy as np

    weights = {"w": np.arange(8, dtype=np.float32), "b": np.full(3, 4, np.float32)}
    path = libs.write_scale(folder / "beside.so", weights)
    code = "import numpy as np\nfrom tvmcap.runtime.executor import Executor\n"
    code += "y = Executor(sys.argv[1])(np.ones((2, 8), np.float32))\n"
    code += "assert (y == np.arange(8) + 4).all(), y\n"
    run(WITHOUT + code, path)


AFFINITY = (
    "before = os.sched_getaffinity(0)\n" + CALL + "assert os.sched_getaffinity(0) == before\n"
)
THREADS = (
    "from tvmcap.runtime.loader import configure_threads, ffi\n"
    "assert ffi().get_global_func('runtime.NumThreads')() == configure_threads()\n"
    "print(configure_threads())\n"
)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_all_cores_work_and_no_thread_is_bound_to_one(chain: Path) -> None:
    tasks = "for task in os.listdir('/proc/self/task'):\n"
    tasks += " assert os.sched_getaffinity(int(task)) == before\n"
    assert int(run(WITHOUT + AFFINITY + tasks + THREADS, chain, TVM_NUM_THREADS="")) == len(
        os.sched_getaffinity(0)
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_the_process_s_own_affinity_is_kept(chain: Path) -> None:
    last = max(os.sched_getaffinity(0))
    code = WITHOUT + f"os.sched_setaffinity(0, [{last}])\n" + AFFINITY + THREADS
    assert run(code, chain, TVM_NUM_THREADS="") == "1"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_variable_sets_the_number_of_threads(chain: Path, count: int) -> None:
    affinity = AFFINITY if hasattr(os, "sched_getaffinity") else CALL
    assert run(WITHOUT + affinity + THREADS, chain, TVM_NUM_THREADS=str(count)) == str(count)


@pytest.mark.parametrize("text", ["0", "many", "-1", "1.5"])
def test_a_number_of_threads_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="TVM_NUM_THREADS"):
        loader._threads_asked_for()


def test_the_pool_really_works(chain: Path) -> None:
    code = """
busy = {}
for task in os.listdir("/proc/self/task"):
    busy[task] = int(open(f"/proc/self/task/{task}/schedstat").read().split()[0])
assert sum(time > 0 for time in busy.values()) >= 2, busy
"""
    run(WITHOUT + CALL + code, chain, TVM_NUM_THREADS="2", OPENBLAS_NUM_THREADS="1")


def test_a_file_replaced_under_its_name_is_loaded_anew(
    chain: Path, half: Path, tmp_path: Path
) -> None:
    import numpy as np

    path = tmp_path / "block.so"
    export.copy_library(half, path)
    old = Executor(path)
    export.copy_library(chain, path)
    x, w = np.ones((2, 8), np.float32), np.eye(8, dtype=np.float32)
    np.testing.assert_array_equal(Executor(path)(x, w), x)
    assert old.signature.inputs[0].dtype == "bfloat16"


def test_a_file_replaced_while_it_is_loaded_is_one_version(
    chain: Path, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    path = tmp_path / "block.so"
    for module, name in ((opening, "read_manifest"), (loader, "stored_digest")):
        export.copy_library(half, path)
        real, left = getattr(module, name), [chain]

        def late(file: Path, real: Any = real, left: list[Path] = left) -> Any:
            found = real(file)
            if left:
                export.copy_library(left.pop(), path)
            return found

        monkeypatch.setattr(module, name, late)
        x, w = np.ones((2, 8), np.float32), np.eye(8, dtype=np.float32)
        np.testing.assert_array_equal(opening.open_library(path)(x, w), x)
        assert not left
        monkeypatch.undo()


def test_a_file_written_over_in_place_is_not_mistaken_for_what_is_loaded(
    chain: Path, tmp_path: Path
) -> None:
    import numpy as np

    path, again = tmp_path / "block.so", tmp_path / "again.so"
    shutil.copyfile(chain, path)
    old = Executor(path)
    libs.write_chain(again)  # without the bound of the first: another manifest, as much code
    with open(path, "r+b") as file:  # the same inode, which stays mapped
        file.write(again.read_bytes())
        file.truncate()
    with pytest.raises(LibraryError, match="written over in place"):
        Executor(path)
    del old
    gc.collect()
    x, w = np.ones((2, 8), np.float32), np.eye(8, dtype=np.float32)
    np.testing.assert_array_equal(Executor(path)(x, w), x)


def test_without_a_folder_for_temporary_files(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new.so"  # none that is loaded already
    export.copy_library(chain, path)

    def none(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", none)
    with pytest.raises(LibraryError, match="TMPDIR"):
        Executor(path)


def test_any_file_name_will_do(chain: Path, tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "a block, exported"
    export.copy_library(chain, path)
    x, w = np.ones((2, 8), np.float32), np.eye(8, dtype=np.float32)
    np.testing.assert_array_equal(Executor(path)(x, w), x)


def test_libraries_leave_the_process_again(chain: Path) -> None:
    code = """
import gc
from tvmcap.runtime.executor import Executor
def mapped():
    return open("/proc/self/maps").read().count(sys.argv[1])
for _ in range(5):
    execute = Executor(sys.argv[1])
    assert mapped() > 0
    del execute
    gc.collect()
    assert mapped() == 0
"""
    run(WITHOUT + code, chain)


def test_a_damaged_file_is_never_loaded(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(loader, "_load", loaded.append)
    data = chain.read_bytes()
    path = tmp_path / "damaged.so"
    for size in (0, 10, len(data) // 2, len(data) - 60, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedLibraryError):
            Executor(path)
    assert not loaded


def test_a_library_for_another_machine_is_never_loaded(
    folder: Path, chain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import replace

    from tvmcap.base.manifest import copy_with_manifest, read_manifest

    loaded: list[object] = []
    monkeypatch.setattr(loader, "_load", loaded.append)
    manifest = read_manifest(chain)
    for changed in (
        replace(manifest, versions={**manifest.versions, "tvm": "0.1"}),
        replace(manifest, target={"kind": "vulkan"}),
    ):
        copy_with_manifest(chain, tmp_path / "other.so", changed)
        with pytest.raises(IncompatibleLibraryError):
            Executor(tmp_path / "other.so")
    assert not loaded


def test_what_the_system_cannot_load_is_named(tmp_path: Path) -> None:
    from tvmcap.base.manifest import append_manifest

    path = tmp_path / "foreign.so"
    path.write_bytes(b"\x7fELF" + bytes(1000))
    append_manifest(path, libs.manifest_for(libs.chain_signature()))
    with pytest.raises(IncompatibleLibraryError, match="cannot load the library"):
        Executor(path)


def test_libraries_of_one_file_share_its_code_and_a_replaced_file_does_not(
    chain: Path, tmp_path: Path
) -> None:
    path = tmp_path / "one.so"
    export.copy_library(chain, path)
    manifest = Executor(path).manifest
    first, second = loader.Library(path, manifest), loader.Library(path, manifest)
    os.utime(path)
    assert first._code is second._code is loader.Library(path, manifest)._code
    export.copy_library(chain, path)
    assert loader.Library(path, manifest)._code is not first._code
    code = weakref.ref(second._code)
    del first
    gc.collect()
    assert code() is not None
    del second
    gc.collect()
    assert code() is None

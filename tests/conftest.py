"""What every test runs under.

Contract checks on, folders of its own, the user's options out of sight. Tests may run in several
processes at once (pytest-xdist, a file's tests in one of them): those that need a GPU take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import filelock
import pytest

from tvmcap.base.codegen import gpu_architecture

_HOME = tempfile.mkdtemp(prefix="tvmcap-tests-")

for _name in [name for name in os.environ if name.startswith("TVMCAP_")]:
    del os.environ[_name]
os.environ["TVMCAP_CHECK"] = "1"
os.environ["XDG_DATA_HOME"] = os.path.join(_HOME, "data")
# caches, shared by all processes of a session: they build the same fixtures and compile the same
# headers and blocks
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = os.path.join(_HOME, "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_HOME, "inductor")
os.environ.setdefault("TVM_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
# idle threads leave their core to other tests and compilers
os.environ["TVM_THREAD_POOL_SPIN_COUNT"] = "0"
os.environ["OMP_WAIT_POLICY"] = "passive"

_GPU = filelock.FileLock(os.environ["TORCHINDUCTOR_CACHE_DIR"] + ".gpu.lock")
#: Files in the order of their time, so that no process is left alone with a long one.
_LONGEST = (
    "test_tutorials",
    "test_tune_remote",
    "test_operators",
    "test_quantized",
    "test_build",
    "test_products",
    "test_cli",
    "test_docs",
    "test_demo",
    "test_quantized_conv",
    "test_tune",
    "test_cpu_rules",
    "test_measure",
    "test_models",
    "test_hopper_kernel",
    "test_cpu_bytes",
    "test_row_norm",
)


def pytest_collection(session: pytest.Session) -> None:
    """Parse the TVMScript of the tests' modules quickly, in whichever process collects them."""
    if not getattr(session.config.option, "numprocesses", None):
        import torch  # noqa: F401  before TVM, which on a GPU takes from it what CUDA needs

        from tvmcap.kernel import tvmscript

        tvmscript.quicken()


def _place(item: pytest.Item) -> int:
    name = item.path.stem
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Let one test at a time use the GPU."""
    alone = _GPU if item.get_closest_marker("gpu") else contextlib.nullcontext()
    with alone:
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files, and skip what needs a GPU where there is none."""
    items.sort(key=_place)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and gpu_architecture() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@contextlib.contextmanager
def hidden_gpu() -> Iterator[None]:
    """Let this process find no NVIDIA driver."""
    real = ctypes.CDLL

    class NoDriver(real):  # type: ignore[misc, valid-type]
        def __init__(self, name: str | None, *args: Any, **kwargs: Any) -> None:
            if name == "libcuda.so.1":
                raise OSError(f"{name}: cannot open shared object file")
            super().__init__(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", NoDriver)
        yield


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing compiled by torch before, and a generator that starts alike."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def without_gpu() -> Iterator[None]:
    """Make this a machine without a GPU."""
    with hidden_gpu():
        yield


@pytest.fixture(scope="session")
def hopper_block() -> Any:
    """Return the block in bfloat16, batch dynamic, cross-compiled for Hopper as without a GPU."""
    import torch

    import tvmcap
    from examples.models import gelu_tanh

    make = torch.Generator().manual_seed(0)
    shapes = ((5, 64), (64, 128), (128,))
    args = tuple(torch.randn(s, generator=make).bfloat16() for s in shapes)
    target = {"kind": "cuda", "arch": "sm_90a"}
    with hidden_gpu():
        return tvmcap.build(gelu_tanh, args, dynamic={"x": {0: "B"}}, target=target, tune="none")


@pytest.fixture(scope="session")
def blocks() -> Any:
    """Return ``blocks(form, dtype)``: a function and its library, x [B, 32], w [32, 48].

    ``form`` is GELU's, "erf" or "tanh".
    """
    import torch

    import tvmcap
    from examples.models import gelu_erf, gelu_tanh

    made: dict[Any, Any] = {}

    def block(form: str, dtype: torch.dtype) -> tuple[Any, Any]:
        fn = {"erf": gelu_erf, "tanh": gelu_tanh}[form]
        if (form, dtype) not in made:
            args = tuple(torch.zeros(s, dtype=dtype) for s in ((4, 32), (32, 48), (48,)))
            made[form, dtype] = tvmcap.build(
                fn, args, dynamic={"x": {0: "B"}}, target="llvm", tune="none", verify=False
            )
        return fn, made[form, dtype]

    return block


def pytest_collection_finish() -> None:
    """Search no more for garbage among all that collecting the tests has imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Remove the folders."""
    shutil.rmtree(_HOME, ignore_errors=True)

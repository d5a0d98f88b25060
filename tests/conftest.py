"""What every test runs under: contract checks on, folders of its own, the user's options out of sight."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from tvmcap.base.codegen import gpu_architecture

_HOME = tempfile.mkdtemp(prefix="tvmcap-tests-")

for _name in [name for name in os.environ if name.startswith("TVMCAP_")]:
    del os.environ[_name]
os.environ["TVMCAP_CHECK"] = "1"
os.environ["XDG_CACHE_HOME"] = os.path.join(_HOME, "cache")
os.environ["XDG_DATA_HOME"] = os.path.join(_HOME, "data")
os.environ.setdefault("TVM_NUM_THREADS", str(min(2, os.cpu_count() or 1)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and gpu_architecture() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_unconfigure() -> None:
    """Remove the folders."""
    shutil.rmtree(_HOME, ignore_errors=True)

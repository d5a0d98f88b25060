"""Libraries that the tests of the runtime share: built once a session, read only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import libs


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for libraries."""
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="session")
def chain(folder: Path) -> Path:
    """Return ``out = x @ w @ w`` in float32, of any batch up to 4096."""
    return libs.write_chain(folder / "chain.so", signature=libs.chain_signature(maximum=4096))


@pytest.fixture(scope="session")
def half(folder: Path) -> Path:
    """Return ``out = x @ w @ w`` in bfloat16."""
    return libs.write_chain(folder / "half.so", dtype="bfloat16")


@pytest.fixture(scope="session")
def pair(folder: Path) -> Path:
    """Return nested inputs and outputs: ``{"sum": x + y, "parts": (column sums of x, x)}``."""
    return libs.write_pair(folder / "pair.so")

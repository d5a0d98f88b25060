"""Libraries that the tests of the runtime share: built once a session, read only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import libs
from tvmcap import Dim
from tvmcap.runtime.executor import Executor


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


@pytest.fixture(scope="session")
def run(chain: Path) -> Executor:
    """Return ``out = x @ w @ w`` in float32, B from 0 to 4096."""
    return Executor(chain)


@pytest.fixture
def x() -> torch.Tensor:
    """Return fresh inputs."""
    return torch.rand(5, 8)


@pytest.fixture
def w() -> torch.Tensor:
    """Return fresh weights."""
    return torch.rand(8, 8)


@pytest.fixture(scope="session")
def nested(pair: Path) -> Executor:
    """Return ``{"sum": x + y, "parts": (column sums of x, x over y)}``."""
    return Executor(pair)


def three_layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Three kernels through two intermediates."""
    for _ in range(3):
        x = torch.relu(x @ w)
    return x


@pytest.fixture(scope="session")
def layers(folder: Path) -> Callable[[int | None], Path]:
    """Return a library of ``three_layers`` with the batch bounded by 64, or not at all."""
    made: dict[int | None, Path] = {}

    def path(most: int | None) -> Path:
        if most not in made:
            args = torch.rand(4, 8), torch.rand(8, 8)
            lib = libs.quick(three_layers, *args, dynamic={"x": {0: Dim("B", min=1, max=most)}})
            made[most] = lib.export(folder / f"layers{most}.so")
        return made[most]

    return path

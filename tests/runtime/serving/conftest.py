"""Libraries and servers that the tests of serving share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tvmcap
from tests import libs

WIDTH = 16
ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import serving_client  # noqa: E402

Served = tuple[str, "subprocess.Popen[str]"]


class Net(nn.Module):
    """``x [B, 16]`` to ``[B, 16]``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def export(fn: object, path: Path, *args: torch.Tensor, **options: object) -> Path:
    """Build with a batch in front of each argument, and write the library."""
    free = {i: {0: tvmcap.Dim("B", max=512)} for i in range(len(args))}
    return Path(libs.quick(fn, *args, **{"dynamic": free, **options}).export(path))


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of ``Net(0)``."""
    return export(Net(0).eval(), tmp_path_factory.mktemp("net") / "net.so", torch.randn(4, WIDTH))


@pytest.fixture(scope="session")
def successor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of ``Net(1)``: the same signature, other weights."""
    return export(Net(1).eval(), tmp_path_factory.mktemp("next") / "net.so", torch.randn(4, WIDTH))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library of another signature, whose rows depend on each other."""

    def centred(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True) + y

    folder = tmp_path_factory.mktemp("stranger")
    return export(centred, folder / "net.so", torch.randn(4, 8), torch.randn(4, 8))


@pytest.fixture(scope="session")
def sample(net: Path) -> Path:
    """Return inputs and outputs of ``Net(0)`` in one file."""
    return write_sample(net.with_name("sample.npz"), 0)


def write_sample(path: Path, seed: int) -> Path:
    """Write a sample with PyTorch's own outputs of ``Net(seed)``."""
    import numpy as np

    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        np.savez(path, x=x.numpy(), out0=Net(seed).eval()(x).numpy())
    return path


@pytest.fixture(scope="session")
def served(net: Path) -> Iterator[Served]:
    """Return the URL of a model, and its server: small limits, batches of 8, no swaps."""
    options = ["--max-batch", "8", "--max-delay-ms", "20", "--read-timeout-s", "1"]
    with serving_client.running(net, *options, "--max-request-mb", "0.1") as running:
        yield running


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    """Return the URL of the model; the server must be well afterwards, too."""
    import urllib.request

    yield served[0]
    assert served[1].poll() is None
    with urllib.request.urlopen(f"{served[0]}/ready", timeout=10) as answer:
        assert answer.status == 200

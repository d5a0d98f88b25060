"""Libraries and servers that the tests of serving share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.serving import WIDTH, Net, export, serving_client

Served = tuple[str, "subprocess.Popen[str]"]


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
def served(net: Path) -> Iterator[Served]:
    """Return the URL of a model, and its server: small limits, batches of 8, no swaps."""
    options = ["--max-batch", "8", "--max-delay-ms", "20", "--read-timeout-s", "2"]
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

"""Soak: a server under load, a client killed every second, a hot swap now and then.

    python benchmarks/soak.py --seconds 600

Clients are processes that send requests of random rows, one after the other, and check each answer.
Every second a random one is killed in whatever it does, and another takes its place. Nobody else's
request may fail, and the server's memory, descriptors and threads must not grow. Prints what
happened as JSON; exit status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from serving_client import infer_request, metrics, running

WIDTH, MOST_ROWS = 64, 8
_GROWTH_MB = 16.0
"""What memory may grow by between the second quarter of a run and its last."""


class Connection:
    """One keep-alive connection, read as plain sockets read."""

    def __init__(self, url: str) -> None:
        import socket

        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), timeout=60)

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer."""
        self._socket.sendall(request)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._receive()
        return int(head.split()[1]), body

    def _receive(self) -> bytes:
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        return chunk


def client(url: str, matrix: str) -> None:
    """Ask and check for ever; the first thing that is wrong ends it with a message."""
    w = np.load(matrix)
    rng = np.random.default_rng(os.getpid())
    connection = Connection(url)
    while True:
        x = rng.standard_normal((rng.integers(1, MOST_ROWS + 1), WIDTH), dtype=np.float32)
        status, body = connection.ask(infer_request(url, x))
        if status != 200:
            raise RuntimeError(f"status {status}: {body[:300]!r}")
        got = np.frombuffer(body[-x.nbytes :], np.float32).reshape(x.shape)
        if not np.allclose(got, np.maximum(x @ w, 0), rtol=1e-3, atol=1e-4):
            raise RuntimeError("a wrong answer")


def build(folder: Path) -> tuple[Path, list[str]]:
    """Write the library, its sample and its matrix; returns it and the server's options."""
    import torch

    import tvmcap

    torch.manual_seed(0)
    w, x = torch.randn(WIDTH, WIDTH) / 8, torch.randn(5, WIDTH)
    dynamic = {"x": {0: tvmcap.Dim("B", max=1024)}}
    options = {"target": "llvm", "dynamic": dynamic, "constants": ("w",), "verify": False}
    lib = tvmcap.build(_block, (x, w), **options)
    np.save(folder / "w.npy", w.numpy())
    np.savez(folder / "sample.npz", x=x.numpy(), out0=_block(x, w).numpy())
    library = lib.export(folder / "block.so")
    return library, ["--sample", str(folder / "sample.npz"), "--max-batch", "32"]


def _block(x: Any, w: Any) -> Any:
    import torch

    return torch.relu(x @ w)


def measure(process: psutil.Process) -> dict[str, float]:
    """Return what must not grow."""
    with process.oneshot():
        memory = process.memory_info().rss / 2**20
        return {"rss_mb": memory, "fds": process.num_fds(), "threads": process.num_threads()}


def soak(url: str, server: Any, folder: Path, options: Any) -> dict[str, Any]:
    """Run it; returns counts, failures, and the samples of the server's resources."""
    command = [sys.executable, __file__, "--client", url, str(folder / "w.npy")]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    process = psutil.Process(server.pid)
    clients = [start() for _ in range(options.clients)]
    samples, failures, killed, swaps = [], [], 0, 0
    end = time.monotonic() + options.seconds
    try:
        while time.monotonic() < end:
            time.sleep(1)
            for at, one in enumerate(clients):
                if one.poll() is not None:
                    assert one.stderr is not None
                    failures.append(one.stderr.read().strip().splitlines()[-1:])
                    clients[at] = start()
            at = random.randrange(len(clients))
            clients[at].kill()
            clients[at].wait()
            clients[at], killed = start(), killed + 1
            if killed % options.swap_every == 0:
                swap(url, folder)
                swaps += 1
            samples.append(measure(process))
    finally:
        for one in clients:
            one.kill()
            one.wait()
    return {"killed": killed, "swaps": swaps, "failures": failures, "samples": samples}


def swap(url: str, folder: Path) -> None:
    """Write the library anew, in place, and have it loaded."""
    shutil.copyfile(folder / "block.so", folder / "again.so")
    shutil.copyfile(folder / "again.so", folder / "block.so")
    where = urlsplit(url)
    path = f"/v2/repository/models/{where.path.rpartition('/')[2]}/load"
    head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: 0\r\n\r\n"
    status, body = Connection(url).ask(head.encode())
    if status != 200:
        raise RuntimeError(f"a swap failed with status {status}: {body!r}")


def judge(report: dict[str, Any], figures: dict[str, float]) -> list[str]:
    """Say what is wrong with a run."""
    wrong = [f"a client that was not killed ended: {text}" for text in report["failures"]]
    wrong += [
        f"{int(count)} answers with {name}"
        for name, count in figures.items()
        if name.startswith("tvmcap_requests_total") and not name.endswith(('"200"}', '"499"}'))
    ]
    samples = report["samples"]
    quarter = len(samples) // 4
    parts = {"before": samples[quarter : 2 * quarter], "after": samples[-quarter:]}
    for name, allowed in (("rss_mb", _GROWTH_MB), ("fds", 8), ("threads", 2)):
        medians = {k: statistics.median(s[name] for s in part) for k, part in parts.items()}
        report[name] = medians
        if medians["after"] > medians["before"] + allowed:
            wrong.append(f"{name} grew from {medians['before']:.1f} to {medians['after']:.1f}")
    return wrong


def main() -> int:
    """Soak, print the report, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--swap-every", type=int, default=10, metavar="KILLS")
    parser.add_argument("--client", nargs=2, metavar=("URL", "MATRIX"), help="be one client")
    options = parser.parse_args()
    if options.client:
        client(*options.client)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library, served = build(folder)
        with running(library, *served) as (url, server):
            report = soak(url, server, folder, options)
            figures = metrics(url)
    report["wrong"] = judge(report, figures)
    report["answered"] = figures.get('tvmcap_requests_total{status="200"}', 0)
    report.pop("samples")
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] or not report["answered"] else 0


if __name__ == "__main__":
    sys.exit(main())

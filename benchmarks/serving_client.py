"""A server in a process of its own, and clients that keep it busy from one thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LENGTH = "Inference-Header-Content-Length"
_STARTED = re.compile(r"serving (\S+) at (http://\S+)")
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


@contextlib.contextmanager
def running(library: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the URL of the model, and the process, of ``tvmcap serve``; SIGTERM at the end."""
    command = [sys.executable, "-m", "tvmcap", "serve", str(library), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        started = _STARTED.match(line)
        if started is None:
            raise RuntimeError(f"the server did not start: {line!r}")
        yield f"{started[2]}/v2/models/{started[1]}", process
        process.send_signal(signal.SIGTERM)
        if process.wait(60) != 0:
            raise RuntimeError(f"the server ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def infer_request(url: str, x: Any, name: str = "x") -> bytes:
    """Return the bytes of a request with one binary tensor of float32, answered in binary."""
    entry = {"name": name, "datatype": "FP32", "shape": list(x.shape)}
    entry["parameters"] = {"binary_data_size": x.nbytes}
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    body = text + x.tobytes()
    where = urlsplit(url)
    head = (
        f"POST {where.path}/infer HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Length: {len(body)}\r\n{LENGTH}: {len(text)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection that sends a request again as soon as it is answered.

    Attributes
    ----------
    seconds: from each request to its answer, in order of their ends.
    ends: the loop's time of each answer.
    last: the last answer, head and body.
    failed: heads of answers other than 200.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._buffer = b""
        self._sent = 0.0
        self._stopping = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.failed: list[bytes] = []
        self.last = b""

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = asyncio.get_running_loop().time()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Send again once an answer is whole."""
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        match = _CONTENT_LENGTH.search(self._buffer) if head >= 0 else None
        if match is None or len(self._buffer) < head + 4 + int(match[1]):
            return
        now = asyncio.get_running_loop().time()
        self.seconds.append(now - self._sent)
        self.ends.append(now)
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self.failed.append(self._buffer)
        self.last, self._buffer = self._buffer, b""
        if self._stopping:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """Say so where nobody asked for it."""
        if not self._stopping:
            self.failed.append(b"connection lost")
        if not self.done.done():
            self.done.set_result(None)

    def stop(self) -> None:
        """Close after the answer that is under way."""
        self._stopping = True


async def load(url: str, requests: list[bytes], seconds: float) -> list[Client]:
    """Keep one client for each request busy for so long."""
    loop, where = asyncio.get_running_loop(), urlsplit(url)
    clients = [Client(request) for request in requests]
    for client in clients:
        await loop.create_connection(lambda c=client: c, where.hostname, where.port)
    await asyncio.sleep(seconds)
    for client in clients:
        client.stop()
    await asyncio.gather(*(client.done for client in clients))
    return clients


def metrics(url: str) -> dict[str, float]:
    """Return what the server counts, by name and labels."""
    where = urlsplit(url)
    with urllib.request.urlopen(f"http://{where.netloc}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def quantile(figures: dict[str, float], name: str, share: float) -> float:
    """Return a quantile of a histogram, interpolated within its bucket."""
    pattern = re.compile(rf'tvmcap_{name}_bucket{{le="(.+)"}}')
    found = [(float(m[1]), v) for k, v in figures.items() if (m := pattern.fullmatch(k))]
    buckets = sorted(found)
    wanted, low, before = share * buckets[-1][1], 0.0, 0.0
    for edge, count in buckets:
        if count >= wanted:
            return low + (edge - low) * (wanted - before) / max(count - before, 1)
        low, before = edge, count
    raise ValueError(f"{name} holds nothing")

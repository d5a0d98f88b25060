"""Clients that are slow, greedy or speak nonsense: a clear answer, and the server lives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from starlette.requests import Request

from tests.serving import serving_client
from tvmcap.runtime.serving.limits import Bodies
from tvmcap.runtime.serving.protocol import Refused


def connect(url):
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname, where.port), timeout=20)
    return connection


def answer(connection):
    """Everything until the server closes, or one whole answer."""
    data = b""
    while True:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = serving_client._CONTENT_LENGTH.search(head + b"\r\n")
        if rest and length and len(rest) >= int(length[1]):
            return data
        chunk = connection.recv(1 << 16)
        if not chunk:
            return data
        data += chunk


def send(url, *parts):
    with connect(url) as connection:
        for part in parts:
            connection.sendall(part)
        return answer(connection)


def head(url, *lines, method="POST"):
    path = urlsplit(url).path
    return "\r\n".join([f"{method} {path}/infer HTTP/1.1", "Host: x", *lines, "", ""]).encode()


CASES = {
    "no HTTP": (lambda url: [b"\x16\x03\x01\x02\x00\x01nonsense\r\n\r\n"], 400),
    "a header without colon": (lambda url: [head(url, "nonsense")], 400),
    "an upgrade": (lambda url: [head(url, "Upgrade: websocket", "Connection: Upgrade")], 400),
    "an upgrade of a request with a body": (
        lambda url: [
            head(url, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "Content-Length: 2"),
            b"{}",
        ],
        400,
    ),
    "no body": (lambda url: [head(url, "Content-Length: 0")], 400),
    "JSON of another kind": (lambda url: [head(url, "Content-Length: 4"), b"null"], 400),
    "a length that is none": (
        lambda url: [head(url, "Content-Length: 2", f"{serving_client.LENGTH}: -1"), b"{}"],
        400,
    ),
    "a length beyond the body": (
        lambda url: [head(url, "Content-Length: 2", f"{serving_client.LENGTH}: 9"), b"{}"],
        400,
    ),
    "compressed": (
        lambda url: [head(url, "Content-Length: 2", "Content-Encoding: gzip"), b"\x1f\x8b"],
        415,
    ),
    "announced too large": (lambda url: [head(url, "Content-Length: 999999999999")], 413),
    "chunks too large": (
        lambda url: [head(url, "Transfer-Encoding: chunked"), b"20000\r\n" + b"x" * 0x20000],
        413,
    ),
    "a head too large": (lambda url: [head(url, *["A: " + "b" * 1000] * 100)[:-2]], 431),
    "a line too large": (lambda url: [b"GET /" + b"a" * 100_000], 431),
    "another method": (lambda url: [head(url, "Content-Length: 0", method="DELETE")], 405),
}


@pytest.mark.parametrize("case", CASES)
def test_nonsense_gets_a_clear_status(url, case):
    parts, status = CASES[case]
    got = send(url, *parts(url))
    assert got.startswith(f"HTTP/1.1 {status} ".encode()), got[:300]


def test_random_bytes_after_a_good_start(url):
    rng = np.random.default_rng()
    good = serving_client.infer_request(url, np.ones((1, 16), np.float32))
    start = good.index(b"\r\n\r\n")
    for _ in range(40):
        data = bytearray(good)
        for at in rng.integers(start, len(data), 4):
            data[at] = rng.integers(256)
        got = send(url, bytes(data))
        assert got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), got[:300]


def test_slow_clients_are_sent_away_and_keep_nobody_waiting(url):
    request = serving_client.infer_request(url, np.ones((1, 16), np.float32))
    line = request[: request.index(b"Host:")]
    starts = {"nothing": b"", "a head": line + b"X-Slow: a", "a body": request[:-10]}
    slow = {name: [connect(url) for _ in range(20)] for name in starts}
    for name, connections in slow.items():
        for connection in connections:
            connection.sendall(starts[name])
    for _ in range(5):
        assert send(url, request).startswith(b"HTTP/1.1 200")
    for _ in range(3):  # a byte now and then is no progress
        time.sleep(0.2)
        for connection in slow["a head"]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"a")
    for connections in slow.values():
        for connection in connections:
            with connection:
                assert answer(connection).startswith(b"HTTP/1.1 408 "), connection


def test_an_upgrade_is_refused_in_words_that_help(url):
    got = send(url, head(url, "Connection: upgrade", "Upgrade: h2c", "Content-Length: 2") + b"{}")
    assert b"'h2c': this server speaks HTTP/1.1 alone" in got and b"onnection: close" in got


def test_empty_lines_after_an_answer_are_no_reason_to_stay(url):
    request = serving_client.infer_request(url, np.ones((1, 16), np.float32))
    with connect(url) as connection:
        connection.sendall(request)
        assert answer(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 408 ")
    with connect(url) as connection:
        for _ in range(3):
            connection.sendall(request + b"\r\n")
            assert answer(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off(url, served):
    ask = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    server = psutil.Process(served[1].pid)

    def is_connected(port):
        return any(c.raddr and c.raddr.port == port for c in server.net_connections())

    with connect(url) as connection:
        connection.sendall(ask * 4000)  # answers of many megabytes, more than buffers hold
        port, end = connection.getsockname()[1], time.monotonic() + 60
        assert connection.recv(1) and is_connected(port)
        while is_connected(port):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_client_that_leaves_costs_the_others_nothing(url):
    request = serving_client.infer_request(url, np.ones((1, 16), np.float32))
    for _ in range(10):
        with connect(url) as connection:
            connection.sendall(request)
        with connect(url) as connection:
            connection.sendall(request[:-5])
        assert send(url, request).startswith(b"HTTP/1.1 200")


def test_all_bodies_together_have_a_limit():
    async def scene():
        bodies, first = Bodies(100), contextlib.AsyncExitStack()

        def request(size):
            async def receive():
                return {"type": "http.request", "body": b"x" * size, "more_body": False}

            return Request({"type": "http", "headers": []}, receive)

        async with first:
            for _ in range(8):
                assert len(await first.enter_async_context(bodies.read(request(100)))) == 100
            for size, status in ((1, 429), (101, 413)):
                with pytest.raises(Refused) as caught:
                    await bodies.read(request(size)).__aenter__()
                assert caught.value.status == status
        async with bodies.read(request(100)) as body:
            assert len(body) == 100

    asyncio.run(scene())

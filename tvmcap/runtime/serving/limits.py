"""What a client may take: time to send and to read, bytes of a head, of a body, of all bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request as HttpRequest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tvmcap.runtime.serving.protocol import Refused

_HEAD_BYTES = 64 << 10
_LARGEST_REQUESTS = 8
"""The bodies that are held at once have at most the bytes of so many largest requests."""


class Bodies:
    """Reads bodies, each within ``largest`` bytes, and all that are held within a multiple of it.

    A body counts from its first byte until its request is answered.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._held = 0

    @asynccontextmanager
    async def read(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """Yield the body. Raises Refused (400, 413, 415, 429), ClientDisconnect."""
        self._check_head(request)
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self._held += len(chunk)
                self._check(size)
                chunks.append(chunk)
            yield b"".join(chunks)
        finally:
            self._held -= size

    def _check_head(self, request: HttpRequest) -> None:
        if "upgrade" in request.headers.get("connection", "").lower():
            # the parser took what comes after the head for the other protocol's
            raise Refused(
                400,
                f"Upgrade: {request.headers.get('upgrade', '')!r}: this server speaks HTTP/1.1 "
                "alone; send the request without that header",
                {"Connection": "close"},
            )
        coding = request.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise Refused(415, f"Content-Encoding {coding!r}: send the body as it is")
        length = request.headers.get("content-length", "0")
        self._check(int(length) if length.isdecimal() else 0)

    def _check(self, size: int) -> None:
        if size > self._largest:
            raise Refused(413, f"the request has {size} bytes or more, at most {self._largest}")
        if self._held > _LARGEST_REQUESTS * self._largest:
            raise Refused(429, f"{self._held} bytes of requests are held", {"Retry-After": "1"})


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits that it lacks.

    A client has ``timeout`` seconds for a whole request, from the connection or the request's first
    byte to its last, and as long to read what it is sent. The request line and headers have at most
    64 KiB. A request that is late gets 408, one with a longer head 431, and the connection is
    closed.
    """

    timeout = 30.0

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        super().connection_made(transport)
        self._head_bytes: int | None = 0
        self._receiving = True
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        if not self._receiving and (self.cycle is None or self.cycle.response_complete):
            self._receiving = True  # maybe an empty line, with which no request begins
            self._arm()
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > _HEAD_BYTES:
            self._close_with(
                "431 Request Header Fields Too Large", f"a head of more than {_HEAD_BYTES} bytes"
            )

    def on_message_begin(self) -> None:  # noqa: D102
        super().on_message_begin()
        self._receiving = True
        self._arm()

    def on_headers_complete(self) -> None:  # noqa: D102
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:  # noqa: D102
        self._head_bytes = 0
        self._receiving = False
        self._disarm()
        super().on_message_complete()

    def pause_writing(self) -> None:  # noqa: D102
        super().pause_writing()
        self._arm()

    def resume_writing(self) -> None:  # noqa: D102
        super().resume_writing()
        if self._receiving:
            self._arm()
        else:
            self._disarm()

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self.timeout, self._on_time_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time_up(self) -> None:
        self._timer = None
        if self.flow.write_paused:
            self.transport.abort()
        elif self.flow.read_paused:  # it is this server that does not read
            self._arm()
        else:
            self._close_with(
                "408 Request Timeout", f"the request did not arrive within {self.timeout:g} s"
            )

    def _close_with(self, status: str, message: str) -> None:
        """Answer unless an answer is under way, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            text = json.dumps({"error": message})
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        self.transport.close()

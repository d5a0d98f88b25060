"""Serve a library over HTTP: the Open Inference Protocol v2, on uvicorn and Starlette."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from tvmcap.base.errors import ConfigError
from tvmcap.base.signature import Signature
from tvmcap.runtime.serving.app import App
from tvmcap.runtime.serving.batching import Limits
from tvmcap.runtime.serving.library import Sample, ServedLibrary
from tvmcap.runtime.serving.limits import GuardedProtocol

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_MB = 10**6


@dataclass(frozen=True)
class ServeOptions:
    """How a library is served.

    Attributes
    ----------
    name: of the model in URLs.
    host, port: where to listen; port 0 is a free one.
    max_batch: rows that run together.
    max_delay_ms: how long a request waits for others while nothing is computed.
    max_queue: requests that may wait; one more gets 429.
    max_request_mb: largest body of a request, in 10**6 bytes.
    read_timeout_s: how long a client may take to send a request, or to read its answer.
    drain_s: how long requests may take to finish after SIGTERM.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    max_delay_ms: float = 2.0
    max_queue: int = 1024
    max_request_mb: float = 64.0
    read_timeout_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name):
            raise ConfigError(
                f"name {self.name!r}: expected letters, digits, '.', '_' and '-'; --name gives one"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port {self.port}: expected 0 to 65535")
        for field in ("max_batch", "max_queue", "max_request_mb", "read_timeout_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise ConfigError(f"{field}: expected more than 0, got {getattr(self, field)}")
        for field in ("max_delay_ms", "drain_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ConfigError(f"{field}: expected at least 0, got {getattr(self, field)}")


def serve(
    path: Path,
    options: ServeOptions,
    *,
    load: Callable[[Path], Any],
    sample: Callable[[Signature], Sample],
    swaps: bool,
    started: Callable[[str], object],
) -> None:
    """Serve the library until SIGTERM or SIGINT, then let the requests under way finish.

    Parameters
    ----------
    load : ``tvmcap.load``.
    sample : what to check the library on, read anew for each library.
    swaps : whether clients may have a new library loaded from ``path``.
    started : called with the URL once requests are answered.

    Raises
    ------
    ConfigError
        The address cannot be listened at.
    LibraryError, VerifyError, ConfigError
        As ``ServedLibrary`` does.
    """

    def open_library(like: Signature | None) -> ServedLibrary:
        return ServedLibrary(path, load, sample, options.max_batch > 1, like)

    with contextlib.closing(_listen(options)) as listener:
        limits = Limits(options.max_batch, options.max_delay_ms / 1e3, options.max_queue)
        largest = int(options.max_request_mb * _MB)
        app = App(options.name, open_library, limits, largest, swaps)

        class Protocol(GuardedProtocol):
            timeout = options.read_timeout_s

        config = uvicorn.Config(
            app.starlette(),
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            backlog=_BACKLOG,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(options.drain_s),
        )
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        server = _Server(config, lambda: started(_url(listener)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.end)
        server.run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], object]) -> None:
        super().__init__(config)
        self._say_started = started

    def end(self, *_: object) -> None:
        """End in good order, at a signal before uvicorn takes them.

        It raises those that it took again when all is done.
        """
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()


def _listen(options: ServeOptions) -> socket.socket:
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        raise ConfigError(
            f"cannot listen at {options.host}:{options.port}: {e.strerror or e}; choose another "
            "--host or --port"
        ) from e
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

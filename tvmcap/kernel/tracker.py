"""TVM's RPC tracker: which servers offer a device under a key, and asking for one of them.

TVM's own client retries a tracker that is not there for a minute and waits for ever for a key that
nobody offers; this one speaks the same protocol and says what is wrong.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import rpc
from tvm.rpc import base

from tvmcap.base.config import Config
from tvmcap.base.errors import TuneError

_CONNECT_S, _PAUSE_S = 5.0, 0.2
#: How long a server may take to come back, after a session or a restart, before it counts as gone.
PATIENCE_S = 15.0

Address = tuple[str, int]


class NoServerError(TuneError):
    """No server is left that could measure: none is registered, free in time, or right."""


class TrackerError(TuneError):
    """No tracker answers."""


@dataclass(frozen=True)
class Tracker:
    """A tracker's address, and the key that the servers of one kind of device share."""

    host: str
    port: int
    key: str

    @classmethod
    def of(cls, config: Config) -> Tracker:
        """Return the tracker that the options name; they have ``rpc`` and ``key``."""
        assert config.rpc is not None and config.key is not None
        host, _, port = config.rpc.rpartition(":")
        return cls(host.strip("[]"), int(port), config.key)

    @property
    def name(self) -> str:
        """The address as text."""
        return f"{self.host}:{self.port}"

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_S) as sock:
                sock.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(sock, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise OSError("it speaks another protocol")
                yield sock
        except (OSError, ValueError) as e:
            raise TrackerError(
                f"no RPC tracker answers at {self.name} ({e}); start one with `python -m "
                f"tvm.exec.rpc_tracker --host 0.0.0.0 --port {self.port}`, or give its address"
            ) from e

    def servers(self) -> dict[str, list[Address]]:
        """Return the addresses of the servers that are registered, by key.

        Raises TrackerError where there is no tracker.
        """
        with self._connection() as sock:
            base.sendjson(sock, [base.TrackerCode.SUMMARY])
            found: dict[str, list[Address]] = {}
            for server in base.recvjson(sock)[1]["server_info"]:
                host, port = server["addr"]
                found.setdefault(server["key"].partition(":")[2], []).append((host, int(port)))
            return found

    def check(self) -> list[Address]:
        """Return the servers of the key; raises TuneError where there are none, or no tracker."""
        servers = self.servers()
        if self.key not in servers:
            known = ", ".join(f"{key!r} ({len(found)})" for key, found in sorted(servers.items()))
            raise TuneError(
                f"no server is registered under the key {self.key!r} at {self.name} (keys with "
                f"servers: {known or 'none'}); start one on the device's machine with `python -m "
                f"tvmcap.rpc_server --tracker {self.name} --key {self.key}`, or mend the key"
            )
        return servers[self.key]

    def open(
        self, refused: set[Address], session_s: float, patience_s: float
    ) -> tuple[Any, Address]:
        """Open a session on the next free server that is not ``refused``; wait for one to be free.

        The server ends the session after ``session_s`` seconds, whatever it does then. Raises
        NoServerError where for ``patience_s`` seconds there was no tracker or no other server.
        """
        seen = time.monotonic()
        while True:
            try:
                address, word = self._offer(refused, patience_s)
                # one that went away since then, or offers itself anew, cannot be connected to
                with contextlib.suppress(Exception):
                    return rpc.connect(*address, word, session_timeout=session_s), address
                seen = time.monotonic()
            except TrackerError as e:
                if time.monotonic() - seen > patience_s:
                    raise NoServerError(str(e)) from e
            time.sleep(_PAUSE_S)

    def _offer(self, refused: set[Address], patience_s: float) -> tuple[Address, str]:
        """Wait for a free server; return its address and the word that it expects."""
        seen = time.monotonic()
        with self._connection() as sock:
            base.sendjson(sock, [base.TrackerCode.REQUEST, self.key, "", 1])
            while not select.select([sock], [], [], _PAUSE_S)[0]:
                servers = set(self.servers().get(self.key, []))
                if servers - refused:
                    seen = time.monotonic()
                elif servers or time.monotonic() - seen > patience_s:
                    raise NoServerError(
                        f"no server is left under the key {self.key!r} at {self.name}"
                    )
            code, offer = base.recvjson(sock)
            if code != base.TrackerCode.SUCCESS:
                raise OSError(f"it answers a request with {code}")
        address = (offer[0], int(offer[1]))
        # a refused server whose offer is not taken up makes another by itself
        return self._offer(refused, patience_s) if address in refused else (address, offer[2])


def reachable(address: Address) -> bool:
    """Whether a process listens at an address."""
    try:
        socket.create_connection(address, _CONNECT_S).close()
        return True
    except OSError:
        return False

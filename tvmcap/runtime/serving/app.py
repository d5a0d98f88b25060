"""The endpoints: health, metadata, inference, hot swap, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tvmcap.base.errors import InputError, TvmcapError
from tvmcap.base.signature import Signature
from tvmcap.runtime.serving import protocol
from tvmcap.runtime.serving.batching import Arrays, Batcher, Limits
from tvmcap.runtime.serving.library import ServedLibrary
from tvmcap.runtime.serving.limits import Bodies
from tvmcap.runtime.serving.metrics import Metrics
from tvmcap.runtime.serving.protocol import LENGTH_HEADER, Refused
from tvmcap.versions import __version__

_log = logging.getLogger("tvmcap")
_VERSION = "1"
_CLIENT_GONE = 499
_EXTENSIONS = ["binary_tensor_data", "model_repository"]


class App:
    """One library under one name, and what its clients may ask.

    Parameters
    ----------
    open_library : loads, checks and returns the library as its file is now; given a signature, it
        must take what that took.
    swaps : whether a new library can be checked, so that clients may have it loaded.
    largest : bytes of a request.
    """

    def __init__(
        self,
        name: str,
        open_library: Callable[[Signature | None], ServedLibrary],
        limits: Limits,
        largest: int,
        swaps: bool,
    ) -> None:
        self._name, self._open, self._swaps = name, open_library, swaps
        self._metrics = Metrics()
        self._bodies = Bodies(largest)
        self._loader = ThreadPoolExecutor(1, "tvmcap-load")
        self._served = self._loader.submit(open_library, None).result()
        # a successor takes what this library takes, so the limit holds for it, too
        self._limits = replace(limits, max_batch=self._served.most_rows(limits.max_batch))
        self._metrics.serving(name, self._served.sha256)
        self._swap_lock = asyncio.Lock()
        self._batcher: Batcher | None = None

    def starlette(self) -> Starlette:
        """Return the application."""
        get, post = ["GET"], ["POST"]
        model = [
            ("", self._metadata, get),
            ("/ready", self._model_ready, get),
            ("/infer", self._infer, post),
        ]
        routes = [
            Route("/v2/health/live", self._live, methods=get),
            Route("/v2/health/ready", self._live, methods=get),
            Route("/v2", self._server, methods=get),
            *(
                Route(f"/v2/models/{{name}}{version}{path}", endpoint, methods=methods)
                for path, endpoint, methods in model
                for version in ("", "/versions/{version}")
            ),
            Route("/v2/repository/index", self._index, methods=post),
            Route("/v2/repository/models/{name}/load", self._load, methods=post),
            Route("/metrics", self._prometheus, methods=get),
        ]
        handlers: Any = {HTTPException: _http_error}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher = Batcher(self._run, self._limits, self._metrics)
        yield
        self._batcher.close()
        self._loader.shutdown()

    def _run(self, requests: list[Arrays]) -> list[Arrays]:
        """Run a batch on the library that is served when the batch starts."""
        return self._served.run(requests)

    async def _live(self, _: HttpRequest) -> Response:
        return Response()

    async def _model_ready(self, request: HttpRequest) -> Response:
        return self._unknown(request) or Response()

    async def _server(self, _: HttpRequest) -> Response:
        return _json({"name": "tvmcap", "version": __version__, "extensions": _EXTENSIONS})

    async def _metadata(self, request: HttpRequest) -> Response:
        signature = self._served.signature
        return self._unknown(request) or _json(
            {
                "name": self._name,
                "versions": [_VERSION],
                "platform": "tvmcap",
                "inputs": protocol.tensor_metadata(signature.inputs),
                "outputs": protocol.tensor_metadata(signature.outputs),
            }
        )

    async def _prometheus(self, _: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _index(self, _: HttpRequest) -> Response:
        entry = {"name": self._name, "version": _VERSION, "state": "READY", "reason": ""}
        return _json([entry])

    async def _infer(self, request: HttpRequest) -> Response:
        start = asyncio.get_running_loop().time()
        answer = self._unknown(request) or await self._answer(request)
        self._metrics.requests.labels(answer.status_code).inc()
        self._metrics.request_seconds.observe(asyncio.get_running_loop().time() - start)
        return answer

    async def _answer(self, request: HttpRequest) -> Response:
        assert self._batcher is not None
        served = self._served
        try:
            self._batcher.check_room()
            async with self._bodies.read(request) as body:
                asked = protocol.parse(body, _json_size(request), served.signature)
                rows, key = served.place(asked.arrays)
                results = await self._batcher.submit(asked.arrays, rows, key)
                specs = served.signature.outputs
                named = dict(zip((spec.name for spec in specs), results, strict=True))
                headers, content = protocol.response(
                    asked, named, specs, model_name=self._name, model_version=_VERSION
                )
            return Response(content, headers=headers)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)  # nobody reads it; it counts in the metrics
        except Refused as e:
            return _error(e.status, str(e), e.headers)
        except InputError as e:
            return _error(400, str(e))
        except asyncio.CancelledError:  # by uvicorn or the batcher, once the time to drain is over
            return _error(503, "the server ended before this was computed: send it again")
        except Exception as e:
            _log.exception("a batch failed")
            return _error(500, str(e) if isinstance(e, TvmcapError) else repr(e))

    async def _load(self, request: HttpRequest) -> Response:
        """Swap in the library as its file is now, once it has proved itself."""
        refusal = self._unknown(request) or await self._bad_load(request)
        if refusal is not None:
            return refusal
        loop = asyncio.get_running_loop()
        async with self._swap_lock:
            try:
                known = self._served.signature
                new = await loop.run_in_executor(self._loader, self._open, known)
            except TvmcapError as e:
                self._metrics.swaps.labels("refused").inc()
                _log.warning("%s stays as it was; the new library is refused: %s", self._name, e)
                return _error(422, f"{self._name} stays as it was: {e}")
            except Exception as e:
                self._metrics.swaps.labels("refused").inc()
                _log.exception("%s stays as it was; the new library cannot be loaded", self._name)
                return _error(500, f"{self._name} stays as it was: {e!r}")
            self._served = new
        self._metrics.swaps.labels("done").inc()
        self._metrics.serving(self._name, new.sha256)
        _log.info("%s is now the library with sha256 %s", self._name, new.sha256)
        return _json({"name": self._name, "version": _VERSION, "sha256": new.sha256})

    async def _bad_load(self, request: HttpRequest) -> Response | None:
        if not self._swaps:
            return _error(409, "nothing to check a new library on: start with --sample FILE")
        try:
            async with self._bodies.read(request) as body:
                given = protocol.load_json(body) if body else {}
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Refused as e:
            return _error(e.status, str(e), e.headers)
        if given.get("parameters"):
            return _error(400, "parameters: expected none; the library is read from its file")
        return None

    def _unknown(self, request: HttpRequest) -> Response | None:
        name = request.path_params["name"]
        version = request.path_params.get("version", _VERSION)
        if (name, version) == (self._name, _VERSION):
            return None
        known = f"there is {self._name!r}, version {_VERSION}"
        return _error(404, f"no model {name!r} of version {version}; {known}")


def _json_size(request: HttpRequest) -> int | None:
    text = request.headers.get(LENGTH_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Refused(400, f"{LENGTH_HEADER}: expected a number of bytes, got {text!r}")
    return int(text)


def _json(data: Any) -> Response:
    return Response(json.dumps(data), media_type="application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps({"error": message})
    return Response(content, status, headers, media_type="application/json")


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, dict(error.headers or {}))

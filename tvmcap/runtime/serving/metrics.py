"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = tuple(
    scale * 10.0**power for power in range(-4, 2) for scale in (1, 1.5, 2, 3, 4, 5, 6, 8)
)
_ROWS = tuple(float(2**power) for power in range(13))


class Metrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tvmcap_requests",
            "Inference requests answered, by HTTP status",
            ["status"],
            registry=self._registry,
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From a request's headers to its response", _SECONDS
        )
        self.queue_seconds = self._histogram(
            "queue_seconds", "From a request's arrival in the queue to its batch", _SECONDS
        )
        self.compute_seconds = self._histogram(
            "compute_seconds", "One batch: joined, computed, cut apart", _SECONDS
        )
        self.batch_rows = self._histogram("batch_rows", "Rows of a batch", _ROWS)
        self.waiting = Gauge(
            "tvmcap_waiting_requests", "Requests in the queue", registry=self._registry
        )
        self.swaps = Counter(
            "tvmcap_swaps",
            "New libraries under the same name, by outcome",
            ["outcome"],
            registry=self._registry,
        )
        self.library = Gauge(
            "tvmcap_library",
            "The library that is served: sha256 of its file",
            ["name", "sha256"],
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tvmcap_{name}", text, buckets=buckets, registry=self._registry)

    def serving(self, name: str, sha256: str) -> None:
        """Say which library is served now."""
        self.library.clear()
        self.library.labels(name, sha256).set(1)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

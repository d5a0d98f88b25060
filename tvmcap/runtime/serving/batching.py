"""Requests that wait for a moment, and then run together."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tvmcap.runtime.serving.metrics import Metrics
from tvmcap.runtime.serving.protocol import Refused

Arrays = Sequence[Any]
_OLD_SHARE = 0.8


@dataclass(frozen=True)
class Limits:
    """What batches and the queue may hold.

    Attributes
    ----------
    max_batch: rows of a batch. With 1, and for a library that takes no batches, each request runs
        alone.
    max_delay_s: seconds that a request waits for others while nothing else is computed.
    max_queue: requests that may wait; one more is refused.
    """

    max_batch: int
    max_delay_s: float
    max_queue: int


@dataclass(frozen=True)
class _Item:
    arrays: Arrays
    rows: int
    key: Hashable
    arrived: float
    result: asyncio.Future[Arrays]


class Batcher:
    """Collects requests and runs them in batches, one batch at a time, in a thread of its own.

    A batch starts as soon as the thread is free and either ``max_batch`` rows of one key wait or
    the oldest request has waited ``max_delay_s``. What waits longest goes first; only requests with
    the same key are joined. All methods belong to the event loop's thread.

    Parameters
    ----------
    run : given the arrays of each request of a batch, returns the results of each.
    """

    def __init__(
        self, run: Callable[[list[Arrays]], list[Arrays]], limits: Limits, metrics: Metrics
    ) -> None:
        self._run = run
        self._limits = limits
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(1, "tvmcap-compute")
        self._waiting: deque[_Item] = deque()
        self._rows: Counter[Hashable] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        self._batch_s = 0.0

    async def submit(self, arrays: Arrays, rows: int, key: Hashable) -> Arrays:
        """Return the results of one request.

        Raises Refused (429, with the seconds after which to try again) where the queue is full, and
        what ``run`` raises.
        """
        self.check_room()
        item = _Item(arrays, rows, key, self._loop.time(), self._loop.create_future())
        self._waiting.append(item)
        self._rows[key] += rows
        self._metrics.waiting.set(len(self._waiting))
        self._next()
        return await item.result

    def check_room(self) -> None:
        """Raise Refused where the queue is full."""
        if len(self._waiting) >= self._limits.max_queue:
            batches = 1 + len(self._waiting) / max(1, self._limits.max_batch)
            wait = max(1, math.ceil(batches * self._batch_s))
            raise Refused(
                429,
                f"{len(self._waiting)} requests wait, as many as may: try again in {wait} s",
                {"Retry-After": str(wait)},
            )

    def close(self) -> None:
        """End the thread, once its batch is done; what still waits is given up."""
        for item in self._waiting:
            item.result.cancel()
        self._waiting.clear()
        self._pool.shutdown()

    def _next(self) -> None:
        """Start a batch if one is due, else see to it that one starts in time."""
        if self._busy or not self._waiting:
            return
        oldest = self._waiting[0]
        due = oldest.arrived + self._limits.max_delay_s
        if self._full(oldest.key) or self._loop.time() >= due:
            self._start(oldest.key)
            return
        full = next((key for key in self._rows if self._full(key)), None)
        if full is not None:
            self._start(full)
        elif self._timer is None:
            self._timer = self._loop.call_at(due, self._on_timer)

    def _full(self, key: Hashable) -> bool:
        return self._rows[key] >= self._limits.max_batch

    def _on_timer(self) -> None:
        self._timer = None
        self._next()

    def _start(self, key: Hashable) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._busy = True
        batch, now = self._take(key), self._loop.time()
        for item in batch:
            self._metrics.queue_seconds.observe(now - item.arrived)
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.batch_rows.observe(sum(item.rows for item in batch))
        job = self._loop.run_in_executor(self._pool, self._run, [item.arrays for item in batch])
        job.add_done_callback(lambda done: self._finish(batch, now, done))

    def _take(self, key: Hashable) -> list[_Item]:
        """Take requests of one key off the queue, oldest first, as many as a batch holds."""
        taken: list[_Item] = []
        kept: deque[_Item] = deque()
        rows = 0
        while self._waiting:
            item = self._waiting.popleft()
            if item.key == key and (not taken or rows + item.rows <= self._limits.max_batch):
                taken.append(item)
                rows += item.rows
                if rows >= self._limits.max_batch:
                    break
            else:
                kept.append(item)
        self._waiting.extendleft(reversed(kept))
        self._rows[key] -= rows
        if not self._rows[key]:
            del self._rows[key]
        return taken

    def _finish(self, batch: list[_Item], start: float, done: asyncio.Future[list[Arrays]]) -> None:
        seconds = self._loop.time() - start
        self._batch_s = _OLD_SHARE * (self._batch_s or seconds) + (1 - _OLD_SHARE) * seconds
        self._metrics.compute_seconds.observe(seconds)
        self._busy = False
        self._next()  # the next batch computes while these results are sent
        error = done.exception()
        for position, item in enumerate(batch):
            if item.result.done():  # its client is gone
                continue
            if error is not None:
                item.result.set_exception(error)
            else:
                item.result.set_result(done.result()[position])

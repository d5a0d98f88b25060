"""Which requests run together, and when."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tvmcap.runtime.serving.batching import Batcher, Limits
from tvmcap.runtime.serving.metrics import Metrics
from tvmcap.runtime.serving.protocol import Refused


class Machine:
    """Adds one; holds each batch until it is let go, and keeps what the batches held."""

    def __init__(self, held=False):
        self.batches = []
        self.go = threading.Event()
        if not held:
            self.go.set()

    def run(self, requests):
        self.batches.append([int(arrays[0][0]) for arrays in requests])
        assert self.go.wait(10)
        if any(arrays[0][0] < 0 for arrays in requests):
            raise ValueError("negative")
        return [[arrays[0] + 1] for arrays in requests]


def play(scene, limits, held=False):
    """Run ``await scene(batcher, machine)`` and return the batches."""
    machine = Machine(held)

    async def run():
        batcher = Batcher(machine.run, limits, Metrics())
        try:
            await asyncio.wait_for(scene(batcher, machine), 10)
        finally:
            machine.go.set()
            batcher.close()

    asyncio.run(run())
    return machine.batches


def ask(batcher, value, rows=1, key="k"):
    return asyncio.ensure_future(batcher.submit([np.full(rows, value)], rows, key))


def test_a_full_batch_does_not_wait():
    async def scene(batcher, machine):
        asked = [ask(batcher, i) for i in range(4)]
        results = await asyncio.gather(*asked)
        assert [r[0][0] for r in results] == [1, 2, 3, 4]

    assert play(scene, Limits(4, 1000.0, 100)) == [[0, 1, 2, 3]]


def test_a_lonely_request_waits_for_the_delay_and_no_longer():
    async def scene(batcher, machine):
        start = asyncio.get_running_loop().time()
        await ask(batcher, 0)
        assert asyncio.get_running_loop().time() - start >= 0.05

    assert play(scene, Limits(4, 0.05, 100)) == [[0]]


def test_what_comes_during_a_batch_is_the_next_one():
    async def scene(batcher, machine):
        first = ask(batcher, 0)
        while not machine.batches:
            await asyncio.sleep(0.001)
        rest = [ask(batcher, i) for i in range(1, 6)]
        await asyncio.sleep(0.02)
        machine.go.set()
        await asyncio.gather(first, *rest)

    assert play(scene, Limits(4, 0.0, 100), held=True) == [[0], [1, 2, 3, 4], [5]]


def test_only_requests_of_one_key_are_joined_oldest_first():
    async def scene(batcher, machine):
        first = ask(batcher, 0)
        while not machine.batches:
            await asyncio.sleep(0.001)
        rest = [ask(batcher, i, key="ab"[i % 2]) for i in range(1, 7)]
        await asyncio.sleep(0.02)
        machine.go.set()
        await asyncio.gather(first, *rest)

    assert play(scene, Limits(8, 0.0, 100), held=True) == [[0], [1, 3, 5], [2, 4, 6]]


def test_rows_count_and_a_request_with_more_of_them_runs_alone():
    async def scene(batcher, machine):
        first = ask(batcher, 0)
        while not machine.batches:
            await asyncio.sleep(0.001)
        rest = [ask(batcher, i, rows) for i, rows in ((1, 3), (2, 9), (3, 1), (4, 2), (5, 0))]
        await asyncio.sleep(0.02)
        machine.go.set()
        results = await asyncio.gather(first, *rest)
        assert [len(r[0]) for r in results] == [1, 3, 9, 1, 2, 0]

    class Sized(Machine):
        def run(self, requests):
            requests = [a if len(a[0]) else [np.full(1, 5)] for a in requests]
            results = super().run(requests)
            return [r if r[0][0] != 6 else [np.full(0, 6)] for r in results]

    machine = Sized(held=True)

    async def run():
        batcher = Batcher(machine.run, Limits(4, 0.0, 100), Metrics())
        await asyncio.wait_for(scene(batcher, machine), 10)
        batcher.close()

    asyncio.run(run())
    assert machine.batches == [[0], [1, 3], [2], [4, 5]]


def test_a_full_queue_says_when_to_come_back():
    async def scene(batcher, machine):
        asked = [ask(batcher, 0)]
        while not machine.batches:
            await asyncio.sleep(0.001)
        asked += [ask(batcher, i) for i in range(1, 4)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="3 requests wait") as caught:
            await batcher.submit([np.zeros(1)], 1, "k")
        assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
        machine.go.set()
        await asyncio.gather(*asked)
        await ask(batcher, 9)

    assert play(scene, Limits(8, 0.0, 3), held=True)[-1] == [9]


def test_a_batch_that_fails_fails_alone():
    async def scene(batcher, machine):
        bad = await asyncio.gather(ask(batcher, -1), ask(batcher, 1), return_exceptions=True)
        assert [str(e) for e in bad] == ["negative", "negative"]
        assert (await ask(batcher, 1))[0][0] == 2

    play(scene, Limits(2, 0.01, 100))


def test_a_request_that_is_given_up_does_not_harm_its_batch():
    async def scene(batcher, machine):
        first, second = ask(batcher, 0), ask(batcher, 1)
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)[0][0] == 2

    assert play(scene, Limits(8, 0.02, 100)) == [[0, 1]]


def test_what_waits_at_the_end_is_given_up_and_nothing_starts_any_more():
    machine, told = Machine(held=True), []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        batcher = Batcher(machine.run, Limits(1, 0.0, 100), Metrics())
        first, second = ask(batcher, 1), ask(batcher, 2)
        while not machine.batches:
            await asyncio.sleep(0)
        machine.go.set()
        batcher.close()
        assert (await first)[0][0] == 2
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(asyncio.wait_for(run(), 10))
    assert machine.batches == [[1]] and not told

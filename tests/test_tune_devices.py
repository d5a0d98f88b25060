"""Tuning on several devices of one machine: what is measured where, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kernel"))

import fake_template as fake

from tvmcap.base.config import Config
from tvmcap.kernel import measure, runner
from tvmcap.kernel.records import RecordStore
from tvmcap.tune import tune_module

TARGET = fake.target()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[runner.Runner]:
    """Two processes on the CPU in the place of two GPUs; filled in once tuning starts."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    opened: list[runner.Runner] = []

    def open_two(target: Any, device: str, folder: Path, time_s: float, timeout_s: float) -> Any:
        for _ in range(2):
            opened.extend(runner.open_runners(target, device, folder, 0.02, timeout_s))
        return opened

    monkeypatch.setattr(measure, "open_runners", open_two)
    return opened


class Progress:
    """Calls a function at every update, which a thread of a device makes."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def start(self, trials: int) -> None:
        pass

    def update(self, *state: Any) -> None:
        self.then()

    def finish(self) -> None:
        pass


def run(folder: Path, trials: int, then: Any = lambda: None) -> Any:
    # as many builders as candidates of two batches, so that a round has both sizes
    config = Config(log_dir=str(folder), tune=trials, workers=8)
    sizes = {"B": [3, 16, 40]}
    return tune_module(fake.module(), TARGET, config, Progress(then), find=fake.find, sizes=sizes)


def test_sizes_are_measured_on_all_devices(tmp_path: Path, two: list[runner.Runner]) -> None:
    served: Counter[int] = Counter()

    def count() -> None:
        for i, each in enumerate(two):
            served[i] = max(served[i], each.worker.served)

    result = run(tmp_path / "log", 12, count)
    assert result.trials == 12 and not result.failures
    assert all(served[i] >= 4 for i in range(2))
    records = RecordStore(tmp_path / "log").records
    times = Counter((str(r.sizes), r.candidate) for r in records)
    assert sum(times.values()) >= 12 and len({sizes for sizes, _ in times}) == 3
    assert [r.error for r in records if r.error] == []


def test_ctrl_c_records_no_failure_of_what_it_cut_off(
    tmp_path: Path, two: list[runner.Runner]
) -> None:
    updates: list[float] = []

    def press() -> None:
        updates.append(time.monotonic())
        if len(updates) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    result = run(tmp_path / "log", 40, press)
    records = RecordStore(tmp_path / "log").records
    assert result.interrupted and 3 <= len(records) <= 6 and not result.failures
    assert all(r.error is None and r.median_us for r in records)
    assert all(each.worker.pid is None for each in two)


def test_gpus_are_those_that_may_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, index: int) -> None:
            self.exist = index < 2

    monkeypatch.setattr(runner.tvm, "device", lambda name, index: Device(index))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3")
    opened = runner.open_runners(TARGET, "cuda", tmp_path, 0.0, 1.0)
    assert [r.worker.environment["CUDA_VISIBLE_DEVICES"] for r in opened] == ["5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    opened = runner.open_runners(TARGET, "cuda", tmp_path, 0.0, 1.0)
    assert [r.worker.environment["CUDA_VISIBLE_DEVICES"] for r in opened] == ["0", "1"]

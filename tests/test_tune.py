"""Tuning as a whole: trials, budgets, interruption, failures, resuming, and two tuners at once."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kernel"))

import fake_template as fake

from tvmcap.base.config import Config
from tvmcap.base.errors import RecordError, TuneError
from tvmcap.kernel import measure, records, tuner
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.records import RecordStore
from tvmcap.tune import tune_module

TARGET = fake.target()


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    original = measure.Measurer.__init__

    def quick_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "time_s": 0.02})

    monkeypatch.setattr(measure.Measurer, "__init__", quick_init)


def run(
    folder: Path, trials: int, find: Any = fake.find, progress: Any = None, **options: Any
) -> Any:
    config = Config(log_dir=str(folder), tune=trials, **{"workers": 1, **options})
    return tune_module(fake.module(), TARGET, config, progress, find=find)


class Spy:
    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_after = stop_after

    def start(self, trials: int) -> None:
        self.calls.append(("start", trials))

    def update(self, *state: Any) -> None:
        self.calls.append(("update", *state))
        if self.stop_after is not None and len(self.calls) > self.stop_after:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_trials_are_split_over_sizes_and_resumed(tmp_path: Path) -> None:
    spy = Spy()
    first = run(tmp_path, 8, progress=spy)
    assert 0 < first.overhead_s < first.seconds and "s of it neither compiling" in str(first)
    assert first.trials == 8 and first.stopped == "trials" and not first.failures
    assert {r.name for r in first.results} == {"matmul[B=1]", "matmul[B=16]", "matmul[B=64]"}
    assert spy.calls[0] == ("start", 8) and spy.calls[-1] == ("finish",)
    assert [c[3] for c in spy.calls if c[0] == "update"] == list(range(1, 9))
    assert str(tmp_path) in first.log and "8 trials" in str(first)
    assert len(first.to_json()["tasks"]) == 3 and json.dumps(first.to_json())
    second = run(tmp_path, 100)
    assert second.stopped == "exhausted"
    assert first.trials + second.trials == 15
    assert run(tmp_path, 100).trials == 0
    for result in second.results:
        assert result.after_us is not None and result.before_us is not None
        assert result.candidate is not None


def test_failures_are_tallied_and_do_not_stop_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, 21, fake.find_failing, workers=2)
    expected = ("wrong result", "build crash", "lower", "compile", "run crash")
    assert result.failures == dict.fromkeys(expected, 3)
    assert all(json.loads(r.candidate)["mode"] == fake.GOOD for r in result.results)
    store = RecordStore(tmp_path)
    assert sum(r.error is not None for r in store.records) == 15


def test_a_first_batch_that_fails_whole_stops_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="cp_async") as error:
        run(tmp_path, 40, fake.find_broken)
    assert "4 compile" in str(error.value)
    assert len(RecordStore(tmp_path).records) == 4
    with pytest.raises(TuneError, match="4 compile"):  # tried again, for the cause may be mended
        run(tmp_path, 40, fake.find_broken)


def test_records_of_a_batch_are_on_disk_before_the_next_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, measured, batches = measure.Measurer.build, Spy(), list[tuple[int, int]]()

    def watch(self: Any, candidates: Any, workloads: Any = ()) -> Any:
        done = sum(call[0] == "update" for call in measured.calls)
        batches.append((done, len(RecordStore(tmp_path).records)))
        return build(self, candidates, workloads)

    monkeypatch.setattr(measure.Measurer, "build", watch)
    assert run(tmp_path, 12, progress=measured).trials == 12
    assert {done for done, _ in batches} >= {0, 4, 8} and all(a <= b for a, b in batches)


def test_a_disk_that_fills_up_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, written, after = records._append, list[bytes](), 5

    def fill(path: Path, data: bytes) -> None:
        if len(written) > after:  # the first of them wrote nothing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, data)
        written.append(data)

    with monkeypatch.context() as patch:
        patch.setattr(records, "_append", fill)
        with pytest.raises(RecordError, match=r"No space left on device.*log_dir="):
            run(tmp_path, 12)
    kept = [(r.candidate, r.sizes["rows"]) for r in RecordStore(tmp_path).records]
    assert len(kept) == after
    run(tmp_path, 4)
    again = [(r.candidate, r.sizes["rows"]) for r in RecordStore(tmp_path).records]
    assert again[:after] == kept and len(set(again[: after + 4])) == after + 4


def test_no_compiler_is_a_named_error_and_no_candidate_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("CXX", raising=False)
        patch.setenv("CC", "no-such-compiler")
        with pytest.raises(TuneError, match=r"no-such-compiler.*install gcc or clang"):
            run(tmp_path, 8)
    assert RecordStore(tmp_path).records == []
    assert run(tmp_path, 4).trials == 4


def test_arguments_that_cannot_be_made_leave_out_one_size_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = measure.Worker.call

    def no_memory(self: Any, request: Any, timeout_s: float) -> Any:
        if request["op"] == "prepare" and [64, 32] in [a["shape"] for a in request["args"]]:
            return {"error": {"cause": "prepare", "message": "MemoryError: out of memory"}}
        return call(self, request, timeout_s)

    monkeypatch.setattr(measure.Worker, "call", no_memory)
    result = run(tmp_path, 12)
    assert result.failures["reference"] >= 1 and set(result.failures) == {"reference"}
    assert {r.sizes["rows"] for r in RecordStore(tmp_path).records} == {1, 16}


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    result = run(tmp_path, 40, progress=Spy(stop_after=3))
    assert result.interrupted and result.trials == 3
    assert len(RecordStore(tmp_path).records) == 3
    assert any(r.after_us is not None for r in result.results)


def test_ctrl_c_inside_a_callback_of_tvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(self: RankModel) -> None:
        if len(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    monkeypatch.setattr(RankModel, "fit", fit)
    before = signal.getsignal(signal.SIGINT)
    result = run(tmp_path, 40)
    assert result.interrupted and result.trials == 4
    assert len(RecordStore(tmp_path).records) == 4
    assert signal.getsignal(signal.SIGINT) is before


def test_unwritable_folder_is_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(measure.Measurer, "__init__", never)
    (tmp_path / "log").write_text("a file")
    with pytest.raises(RecordError, match="log_dir="):
        run(tmp_path / "log", 4)


def test_a_budget_ends_the_run_within_a_batch(tmp_path: Path) -> None:
    result = run(tmp_path, 1000, budget_s=1e-3)
    assert result.stopped == "budget" and result.trials <= 8


def test_the_best_is_timed_twice_though_the_seconds_are_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner.Run, "left_s", lambda run: 0.0 if run.trials else 60.0)
    result = run(tmp_path, 1000, budget_s=1.0)
    assert result.stopped == "budget"
    records = [r for r in RecordStore(tmp_path).records if r.median_us is not None]
    assert records
    for rows in {r.sizes["rows"] for r in records}:
        own = [r for r in records if r.sizes["rows"] == rows]
        latest = {r.candidate: r.median_us for r in own}
        best = min(latest, key=latest.__getitem__)
        assert sum(r.candidate == best for r in own) == 2


def test_nothing_to_tune(tmp_path: Path) -> None:
    import tvm

    result = tune_module(tvm.IRModule({}), TARGET, Config(log_dir=str(tmp_path), tune=4))
    assert result.results == () and result.trials == 0 and "0 trials" in str(result)


def test_loop_nests_are_tuned_and_converted(tmp_path: Path) -> None:
    result = run(tmp_path, 5, lambda f, t: None, seed=1)
    assert result.trials == 5
    store = RecordStore(tmp_path)
    assert {r.kind for r in store.records} == {"trace"}
    assert any(r.trace for r in store.records)


_SCRIPT = """
import sys
sys.modules["torch"] = None
sys.path.insert(0, {kernel!r})
import fake_template as fake
from tvmcap.base.config import Config
from tvmcap.kernel.measure import Measurer
from tvmcap.tune import tune_module
Measurer.__init__.__kwdefaults__["time_s"] = 0.02
config = Config(log_dir={log!r}, tune={trials}, seed={seed}, workers=1)
tune_module(fake.module(), fake.target(), config, find=fake.find)
"""


def start_tuner(log: Path, seed: int, trials: int) -> subprocess.Popen[bytes]:
    script = _SCRIPT.format(
        kernel=str(Path(__file__).parent / "kernel"), log=str(log), seed=seed, trials=trials
    )
    root = str(Path(__file__).parents[1])
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root})


def test_kill_in_mid_tuning_keeps_the_records_and_leaves_no_workers(tmp_path: Path) -> None:
    import psutil

    process = start_tuner(tmp_path, 0, 100)
    deadline = time.monotonic() + 120
    while len(RecordStore(tmp_path).records) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    time.sleep(random.random() / 4)  # in whatever it does then
    seen = RecordStore(tmp_path).records
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    kept = len(RecordStore(tmp_path).records)
    assert kept >= 2 and RecordStore(tmp_path).records[: len(seen)] == seen
    assert run(tmp_path, 3).trials == 3
    measured = [(r.candidate, r.sizes["rows"]) for r in RecordStore(tmp_path).records[: kept + 3]]
    assert len(set(measured)) == kept + 3


def test_two_tuners_on_one_store(tmp_path: Path) -> None:
    tuners = [start_tuner(tmp_path, seed, 4) for seed in (1, 2)]
    assert [t.wait(240) for t in tuners] == [0, 0]
    store = RecordStore(tmp_path)
    assert store.bad_lines == 0
    assert len({(r.candidate, r.sizes["rows"]) for r in store.records}) >= 4
    assert {r.seed for r in store.records} == {1, 2}

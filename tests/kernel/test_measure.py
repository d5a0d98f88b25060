"""Measuring: only right results get a time, and nothing that a candidate does ends the run."""

from __future__ import annotations

import errno
import os
import shutil
import time

import fake_template as fake
import numpy as np
import pytest
from tvm import te, tirx

from tvmcap.base import codegen
from tvmcap.base.errors import TuneError
from tvmcap.kernel import check, measure, process, runner, tasks, worker

TARGET = fake.target()


def candidate(task: tasks.Task, knobs: fake.Knobs) -> measure.Candidate:
    text = task.template.knobs_to_json(knobs)
    return measure.Candidate(text, task.func, task.template, text)


@pytest.fixture(scope="module")
def task() -> tasks.Task:
    return tasks.extract(fake.module(), TARGET, fake.find_failing)[0]


@pytest.fixture(scope="module")
def measurer():
    with measure.Measurer(TARGET, workers=2, time_s=0.02) as m:
        yield m


def test_failures_have_causes_and_spare_the_others(
    task: tasks.Task, measurer: measure.Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        fake.GOOD: None,
        fake.WRONG: "wrong result",
        fake.CRASH: "build crash",
        fake.NO_LOWER: "lower",
        fake.NO_COMPILE: "compile",
        fake.RUN_CRASH: "run crash",
        fake.HANG: "build timeout",
    }
    modes = [*expected, fake.GOOD]
    work = measure.Workload(task, {"B": 13}, seed=1)
    candidates = [candidate(task, fake.Knobs(4, mode)) for mode in modes]
    hangs = modes.index(fake.HANG)
    measurer.build(candidates[:hangs] + candidates[hangs + 1 :], [work])
    with monkeypatch.context() as patch:
        patch.setattr(measurer, "build_timeout_s", 1.0)  # of the only one that is left to build
        results = list(measurer.measure(work, candidates))
    assert [r.cause for r in results] == [expected[mode] for mode in modes]
    for result in (results[0], results[-1]):
        assert result.median_us and result.p10_us and result.p90_us
        assert 0 < result.p10_us <= result.median_us <= result.p90_us and result.samples >= 5
    assert results[3].error == {"cause": "lower", "message": "ValueError: tile does not divide"}
    assert "cp_async" in (results[4].message or "")
    assert "SIGABRT" in (results[5].message or "")


def measured(measurer: measure.Measurer, task: tasks.Task, *knobs: fake.Knobs) -> list:
    work = measure.Workload(task, {"B": 21}, seed=5)
    return list(measurer.measure(work, [candidate(task, k) for k in knobs]))


def test_a_candidate_that_writes_where_it_should_not_is_named_and_harms_no_other(
    task: tasks.Task, measurer: measure.Measurer
) -> None:
    modes = (fake.GOOD, fake.STRAY, fake.SPOILS_INPUT, fake.GOOD)
    first, stray, spoils, last = measured(measurer, task, *(fake.Knobs(4, m) for m in modes))
    assert first.cause is None and last.cause is None, last.message
    assert stray.cause == spoils.cause == "memory corruption"
    assert "after the memory of argument 2" in stray.message
    assert "to the memory of argument 1" in spoils.message


def test_a_process_left_in_ruins_is_not_the_next_ones_fault(
    task: tasks.Task, measurer: measure.Measurer
) -> None:
    """The first leaves a process that cannot read a request: the next one in it would crash."""
    spoiler, good = fake.Knobs(4, fake.SPOILS_PROCESS), fake.Knobs(8)
    results = measured(measurer, task, spoiler, good, spoiler, good)
    assert [r.cause for r in results] == [None] * 4
    measured(measurer, task, spoiler)
    other = measure.Workload(task, {"B": 22}, seed=6)
    assert measurer.reference(other)  # neither is it the fault of the next task's reference


def test_a_run_that_hangs_is_killed_after_a_limit_from_the_first_batch(
    task: tasks.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_LEAST_S", 2.0)
    asked = []

    class Spy(runner.Runner):
        def _call(self, request, timeout_s):
            if request["op"] == "run":
                asked.append(timeout_s)
            return super()._call(request, timeout_s)

    monkeypatch.setattr(runner, "Runner", Spy)
    with measure.Measurer(TARGET, workers=1, time_s=0.02, run_timeout_s=50) as m:
        failed = measured(m, task, fake.Knobs(4, fake.WRONG))
        first = measured(m, task, fake.Knobs(4), fake.Knobs(8))
        hung, last = measured(m, task, fake.Knobs(8, fake.RUN_HANG), fake.Knobs(8))
    assert failed[0].cause == "wrong result" and not any(r.cause for r in (*first, last))
    assert hung.cause == "run timeout" and "killed after" in hung.message
    # a batch without a right candidate tells nothing
    assert asked[:3] == [50, 50, 50] and 2.0 <= asked[3] < 50 and set(asked[3:]) == {asked[3]}


def test_the_limit_follows_the_slowest_and_has_a_floor() -> None:
    assert runner.time_limit([0.01, 0.02]) == runner._LEAST_S
    assert runner.time_limit([0.2, 7.0]) == 70.0


def test_a_reply_that_is_none_is_a_crash(tmp_path) -> None:
    for reply in ("garbage", "[1]", '{"us":'):
        command = ("sh", "-c", f"read line; echo '{reply}'; sleep 60")
        worker = measure.Worker(command, dict(os.environ), tmp_path)
        found = worker.call({"op": "run"}, 20)
        assert found["error"]["cause"] == "run crash" and worker.pid is None


def test_times_that_none_can_have_are_a_failure() -> None:
    for us in (None, "5", [5.0, -1.0], [float("nan")], [0.0], [float("inf")]):
        assert runner._measurement({"us": us}).cause == "timing"
    assert runner._measurement({"us": [3.0, 1.0, 2.0]}).median_us == 2.0


@pytest.mark.parametrize("where", ["CC", "PATH"])
def test_without_a_compiler_tuning_stops_and_blames_no_candidate(
    task: tasks.Task, tmp_path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(where, str(tmp_path / "no-such-compiler"))
    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        with pytest.raises(TuneError, match="install gcc or clang"):
            m.build([candidate(task, fake.Knobs(4))])
        assert m._built == {}


def test_without_room_tuning_stops_and_blames_no_candidate(
    task: tasks.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.strerror(errno.ENOSPC)
    reply = {"error": {"cause": "compile", "message": f"ld: final link failed: {full}"}}
    monkeypatch.setattr(measure.Worker, "call", lambda *_: reply)
    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        with pytest.raises(TuneError, match=full):
            m.build([candidate(task, fake.Knobs(4))])
        assert m._built == {}


def test_a_crash_on_a_full_disk_blames_no_candidate(
    task: tasks.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = fake.Knobs(4, fake.CRASH)
    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        assert m.build([candidate(task, knobs)])[0]["error"]["cause"] == "build crash"
        usage = shutil.disk_usage(m._folder)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        m._built.clear()
        with pytest.raises(TuneError, match="0 MiB left"):
            m.build([candidate(task, knobs)])
        assert m._built == {}


def test_without_nvcc_a_build_blames_no_candidate(
    task: tasks.Task, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen, "find_nvcc", lambda: None)
    request = measure._request(candidate(task, fake.Knobs(4)))
    target = process.target_json(codegen.make_target({"kind": "cuda", "arch": "sm_90a"}))
    reply = worker.build({**request, "target": target, "path": str(tmp_path / "kernel.so")})
    assert reply["error"]["message"].startswith("ToolchainError: building for cuda needs nvcc")
    assert process.of_machine(reply, tmp_path)


def test_no_folder_for_files_is_a_named_error(
    tmp_path, task: tasks.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        monkeypatch.setattr("tempfile.mkstemp", full)
        with pytest.raises(TuneError, match="set TMPDIR"):
            m.build([candidate(task, fake.Knobs(4))])
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(TuneError, match="set TMPDIR"):
        measure.Measurer(TARGET)


def test_one_library_serves_all_sizes(task: tasks.Task, measurer: measure.Measurer) -> None:
    one = candidate(task, fake.Knobs(8))
    for rows in (1, 64):
        (result,) = measurer.measure(measure.Workload(task, {"B": rows}, seed=2), [one])
        assert result.cause is None
    assert sum(name == one.name for name in measurer._built) == 1


def test_builders_live_on_between_batches_and_end_with_the_measurer(task: tasks.Task) -> None:
    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        work = measure.Workload(task, {"B": 3}, seed=0)
        pids = []
        for tile in (4, 8, 16):
            (result,) = m.measure(work, [candidate(task, fake.Knobs(tile))])
            assert result.cause is None
            pids.append(m._builders[0].pid)
        assert len(set(pids)) == 1 and m._builders[0].served == 4  # the reference's kernel as well
        folder, started = m._folder, {pids[0], m.runners[0].worker.pid}
        assert len(started) == 2 and None not in started and folder.exists()
    assert not folder.exists()
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_do_without_torch_and_intrinsics_and_use_the_threads(
    measurer: measure.Measurer,
) -> None:
    worker = measurer._builders[0]
    assert worker.call({"op": "ping"}, 20) == {}
    assert worker._process is not None
    with open(f"/proc/{worker._process.pid}/maps") as f:
        maps = f.read()
    assert "libtvm" in maps and "libtorch" not in maps
    with open(f"/proc/{worker._process.pid}/environ") as f:
        assert "TVM_NUM_THREADS=2" in f.read().split("\0")


def test_no_device_is_a_named_error() -> None:
    import tvm

    if tvm.cuda(0).exist:
        pytest.skip("there is a GPU here")
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with pytest.raises(TuneError, match="no cuda device"):
        measure.Measurer(target)


def test_a_template_out_of_reach_of_the_workers_is_a_named_error(task: tasks.Task) -> None:
    import dataclasses

    with pytest.raises(TuneError, match="must be a variable"):
        measure.template_ref(dataclasses.replace(task.template, name="loose"))


def test_timeout_of_a_run_is_short() -> None:
    worker = measure.Worker(("sleep", "60"), dict(os.environ), measure.Path("/tmp"))
    start = time.monotonic()
    reply = worker.call({"op": "run"}, 0.2)
    assert reply["error"]["cause"] == "run timeout"
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int32", "bool"])
def test_inputs_are_fresh_by_seed_and_agree_with_themselves(dtype: str) -> None:
    args = [{"shape": [40, 8], "dtype": dtype}]
    (a,), (b,), (c,) = (check.random_inputs(args, seed) for seed in (0, 0, 1))
    assert str(a.dtype) == dtype and np.array_equal(a, b) and not np.array_equal(a, c)
    import tvm

    device = tvm.cpu(0)
    (x,), (y,) = check.to_device([a], device), check.to_device([c], device)
    assert check.mismatch(check.to_numpy(x), check.to_numpy(x), dtype) is None
    assert check.mismatch(check.to_numpy(x), check.to_numpy(y), dtype) is not None


def test_mismatch_forgives_rounding_alone() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((8, 4096)), rng.standard_normal((4096, 64))
    exact = x @ w
    rounded = (x.astype("float32") @ w.astype("float32")).astype("float32")
    assert check.mismatch(rounded, exact.astype("float32"), "float32") is None
    without_last = (x[:, :-8] @ w[:-8]).astype("float32")
    assert check.mismatch(without_last, exact.astype("float32"), "float32") is not None
    one_wrong = rounded.copy()
    one_wrong[3, 5] += 1.0
    assert check.mismatch(one_wrong, exact.astype("float32"), "float32") is not None
    special = np.array([1.0, np.nan, np.inf, -np.inf], "float32")
    assert check.mismatch(special, special.copy(), "float32") is None
    assert check.mismatch(-special, special, "float32") is not None
    assert (
        check.mismatch(np.array([1.0, 2.0, np.inf, -np.inf], "float32"), special, "float32")
        is not None
    )


def test_references_are_of_functions_wherever_they_stand_in_memory(
    measurer: measure.Measurer,
) -> None:
    def key(factor: float) -> str:
        x = te.placeholder((64,), "float32", "x")
        y = te.compute((64,), lambda i: x[i] * tirx.const(factor, "float32"), "y")
        made = tasks.make_task(te.create_prim_func([x, y]), TARGET, lambda func, target: None)
        return measurer._key(measure.Workload(made, {}, seed=1))  # and the task is gone

    factors = [float(i) for i in range(20)]
    keys = [key(factor) for factor in factors]
    assert len(set(keys)) == len(factors)
    assert keys == [key(factor) for factor in factors]

"""Measuring: only right results get a time, and nothing that a candidate does ends the run."""

from __future__ import annotations

import os
import time

import fake_template as fake
import numpy as np
import pytest

from tvmcap.base.errors import TuneError
from tvmcap.kernel import check, measure, tasks

TARGET = fake.target()


def candidate(task: tasks.Task, knobs: fake.Knobs) -> measure.Candidate:
    text = task.template.knobs_to_json(knobs)
    return measure.Candidate(text, task.func, task.template, text)


@pytest.fixture(scope="module")
def task() -> tasks.Task:
    return tasks.extract(fake.module(), TARGET, fake.find_failing)[0]


@pytest.fixture(scope="module")
def measurer():
    with measure.Measurer(TARGET, workers=2, time_s=0.02, build_timeout_s=6, run_timeout_s=6) as m:
        yield m


def test_failures_have_causes_and_spare_the_others(
    task: tasks.Task, measurer: measure.Measurer
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
    results = list(measurer.measure(work, [candidate(task, fake.Knobs(4, mode)) for mode in modes]))
    assert [r.cause for r in results] == [expected[mode] for mode in modes]
    for result in (results[0], results[-1]):
        assert result.median_us and result.p10_us and result.p90_us
        assert 0 < result.p10_us <= result.median_us <= result.p90_us and result.samples >= 5
    assert results[3].error == {"cause": "lower", "message": "ValueError: tile does not divide"}
    assert "cp_async" in (results[4].message or "")
    assert "SIGABRT" in (results[5].message or "")


def test_one_library_serves_all_sizes(task: tasks.Task, measurer: measure.Measurer) -> None:
    one = candidate(task, fake.Knobs(8))
    for rows in (1, 64):
        (result,) = measurer.measure(measure.Workload(task, {"B": rows}, seed=2), [one])
        assert result.cause is None
    assert sum(name == one.name for name in measurer._built) == 1


def test_builders_live_on_between_batches(task: tasks.Task) -> None:
    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        work = measure.Workload(task, {"B": 3}, seed=0)
        pids = []
        for tile in (4, 8, 16):
            (result,) = m.measure(work, [candidate(task, fake.Knobs(tile))])
            assert result.cause is None
            pids.append(m._builders[0].pid)
        assert len(set(pids)) == 1 and m._builders[0].served == 4  # the reference's kernel as well


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


def test_close_leaves_no_process_and_no_file(task: tasks.Task) -> None:
    with measure.Measurer(TARGET, workers=1, time_s=0) as m:
        list(m.measure(measure.Workload(task, {"B": 2}, 0), [candidate(task, fake.Knobs(4))]))
        folder = m._folder
        pids = [
            w._process.pid
            for w in (*m._builders, *(r.worker for r in m.runners))
            if w._process is not None
        ]
        assert len(pids) == 2 and folder.exists()
    assert not folder.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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

"""Host times: the core and the windows; commands of results name no machine."""

import gc
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402
import overheads  # noqa: E402
import runtime_host  # noqa: E402
import steady  # noqa: E402

pins = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned")


def test_the_core_is_that_of_the_smallest_99th_percentile(monkeypatch):
    at, now, calls = [{0, 1, 2, 3}], [0], [0]
    took = {0: (100, 900), 1: (500, 500), 2: (300, 400), 3: (200, 600)}  # ns: most calls, each 20th

    def clock():
        (cpu,) = at[0]
        calls[0] += 1
        usual, rare = took[cpu]
        now[0] += rare if calls[0] % 40 == 0 else usual
        return now[0]

    fake = SimpleNamespace(
        sched_getaffinity=lambda thread: at[0],
        sched_setaffinity=lambda thread, cpus: at.__setitem__(0, cpus),
    )
    monkeypatch.setattr(steady, "os", fake)
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter_ns=clock))
    assert steady.steadiest([0, 1, 2, 3], count=1000) == 2 and at[0] == {0, 1, 2, 3}
    assert steady.steadiest([0, 1], count=1000) == 1
    with steady.on_steadiest_core(count=1000) as core:
        assert core == 2 and at[0] == {2}
    assert at[0] == {0, 1, 2, 3}


@pins
def test_the_affinity_is_restored_after_an_exception_too():
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), steady.on_steadiest_core(count=100) as core:
        assert core in before and os.sched_getaffinity(0) == {core}
        raise KeyError
    assert os.sched_getaffinity(0) == before
    with pytest.raises(OSError):
        steady.steadiest([*before, 1_000_000], count=100)
    assert os.sched_getaffinity(0) == before


def test_nothing_changes_where_threads_cannot_be_pinned(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with steady.on_steadiest_core() as core:
        assert core is None


def test_a_row_tells_of_all_windows_and_of_each():
    row = steady.row(
        [
            steady.Window([1000] * 8 + [3000] * 4, [100] * 12 + [300] * 4, True),
            steady.Window([2000] * 8, [100] * 8 + [300] * 4, False),
        ]
    )
    assert row["samples_ns"] == {"1000": 8, "2000": 8, "3000": 4} and row["median"] == 2.0
    assert row["reference"]["median"] == 0.1 and row["reference"]["p99_over_p50"] == 3.0
    assert row["p99_over_p50_of_windows"] == [3.0, 1.0]
    assert row["reference_of_windows"] == [3.0, 3.0] and row["pinned"] is False


def in_groups(log):
    """Collapse repetitions: [a, a, b] -> [(a, 2), (b, 1)]."""
    return [(name, len(list(same))) for name, same in itertools.groupby(log)]


@pins
def test_groups_of_calls_take_turns_with_the_reference_and_come_after_ready():
    allowed, log = os.sched_getaffinity(0), []
    seen = set()

    def call(i):
        log.append("call")
        seen.add(frozenset(os.sched_getaffinity(0)))

    window = steady.window(
        call, lambda i: log.append("reference"), 3 * steady.GROUP, lambda: log.append("ready")
    )
    a_group = steady.GROUP + 10  # and the calls that are not timed
    assert in_groups(log) == [("reference", a_group), ("ready", 1), ("call", a_group)] * 3
    assert len(window.calls) == len(window.references) == 3 * steady.GROUP
    assert window.pinned is True and len(seen) == 1 and len(min(seen)) == 1
    assert os.sched_getaffinity(0) == allowed


@pins
def test_a_thread_that_left_its_core_is_not_called_pinned():
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("there is one core")
    window = steady.window(
        lambda i: os.sched_setaffinity(0, allowed), lambda i: None, steady.GROUP, lambda: None
    )
    assert window.pinned is False and os.sched_getaffinity(0) == allowed

    def fails(i):
        raise KeyError

    with pytest.raises(KeyError):
        steady.window(fails, lambda i: None, steady.GROUP, lambda: None)
    assert os.sched_getaffinity(0) == allowed


def test_a_window_is_not_called_pinned_where_threads_cannot_be(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    window = steady.window(lambda i: None, lambda i: None, steady.GROUP, lambda: None)
    assert window.pinned is False


@pins
def test_every_mode_ran_on_all_cores_before_the_first_window():
    allowed, seen = os.sched_getaffinity(0), []

    def mode(name):
        return lambda i: seen.append((name, frozenset(os.sched_getaffinity(0))))

    calls = {"a mode": mode("a mode"), "another": mode("another")}
    rows = runtime_host.host_times(calls, "cpu", steady.GROUP, windows=3)
    assert os.sched_getaffinity(0) == allowed and gc.isenabled()
    first_pinned = next(i for i, (_, cores) in enumerate(seen) if len(cores) == 1)
    if len(allowed) > 1:
        assert {name for name, _ in seen[:first_pinned]} == set(calls)
        assert {cores for _, cores in seen[first_pinned:]} <= {frozenset([c]) for c in allowed}
        windows = in_groups(name for name, cores in seen[first_pinned:])
        assert windows == [(name, steady.GROUP + 10) for name in calls] * 3, "in turns"
    assert [row["figure"] for row in rows] == ["call, a mode", "call, another"]
    for row in rows:
        assert len(row["p99_over_p50_of_windows"]) == len(row["reference_of_windows"]) == 3
        assert row["unit"] == "us" and row["pinned"] is True
        assert sum(row["samples_ns"].values()) == 3 * steady.GROUP


@pytest.mark.parametrize(("us", "numbers"), [(6, 1200), (1, 200), (0.004, 1), (0, 1)])
def test_the_reference_takes_as_long_as_the_call(us, numbers, monkeypatch):
    now, made = [0], []

    def adding_up(count):
        made.append(count)
        return lambda i: now.__setitem__(0, now[0] + 5 * count)  # 5 ns a number

    def call(i):
        now[0] += round(1000 * us) + 40_000 * (i % 20 == 0)  # a rare long one changes nothing

    monkeypatch.setattr(steady, "adding_up", adding_up)
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    reference = steady.as_long_as(call)
    assert made[-1] == numbers
    before = now[0]
    reference(0)
    assert now[0] - before == 5 * numbers


def test_percentiles_of_samples_and_the_samples_to_three_digits():
    row = steady.spread([*[3000] * 60, *[1000] * 30, *[2004] * 9, 8000, 91234])
    assert (row["p10"], row["median"], row["p90"], row["p99"]) == (1.0, 3.0, 3.0, 8.0)
    assert row["p99_over_p50"] == 2.667
    assert row["samples_ns"] == {"1000": 30, "2000": 9, "3000": 60, "8000": 1, "91200": 1}


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("run /srv/somebody/libs --json /srv/out.json", "run FOLDER --json OUT"),
        ("run libs --json=results/out.json --budget 5", "run libs --json=OUT --budget 5"),
        ("--settings ../rungs.json --logs=/srv/logs", "--settings FILE --logs=FOLDER"),
        (f"--records {ROOT}/benchmarks/records -x 1x2", "--records benchmarks/records -x 1x2"),
        ("--no-compile", "--no-compile"),
    ],
)
def test_a_command_names_no_place_of_the_machine(words, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert common.command(["/srv/x/walk.py", *words.split()]) == f"walk.py {command}"
    monkeypatch.setattr(sys, "argv", ["/srv/x/walk.py", *words.split()])
    assert common.meta()["command"] == f"walk.py {command}"


def test_the_host_function_is_called_as_the_executor_calls_it(monkeypatch):
    seen = {}

    def measure(calls, budget_s):
        for name, call in calls.items():
            seen[name] = call()
        return {}

    monkeypatch.setattr(overheads, "measure", measure)
    assert overheads.host_time() == []
    assert "host function alone" in seen and seen["torch, out="].shape == (2, 8)

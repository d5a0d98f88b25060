"""Host times: the core and the set that are shown; commands of results name no machine."""

import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402
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


def a_set(reference, ours):
    return [
        {"figure": "call, a mode", "median": 10 * ours, "p99_over_p50": ours},
        {"figure": "call, plain", "median": 1.0, "p99_over_p50": reference},
    ]


def test_the_set_is_chosen_by_the_reference_not_by_the_result():
    shown = steady.steadiest_set([a_set(2.0, 1.1), a_set(1.2, 1.9), a_set(1.3, 1.0)], "call, plain")
    assert [row["median"] for row in shown] == [19.0, 1.0]
    assert [row["p99_over_p50"] for row in shown] == [1.9, 1.2]
    assert shown[0]["p99_over_p50_of_sets"] == [1.1, 1.9, 1.0]
    assert shown[1]["p99_over_p50_of_sets"] == [2.0, 1.2, 1.3]


@pins
def test_each_set_is_timed_on_one_core_after_every_mode_ran_on_all():
    allowed, seen = os.sched_getaffinity(0), []
    calls = {
        steady.REFERENCE: steady.add_up,
        "a mode": lambda i: seen.append(frozenset(os.sched_getaffinity(0))),
    }
    rows, pinned = runtime_host.times_of_sets(calls, "cpu", runtime_host.GROUP, sets=3)
    assert pinned and os.sched_getaffinity(0) == allowed
    assert seen[0] == allowed and len(seen[-1]) == 1
    assert [row["figure"] for row in rows] == [f"call, {steady.REFERENCE}", "call, a mode"]
    for row in rows:
        ratios = row["p99_over_p50_of_sets"]
        assert len(ratios) == 3 and row["p99_over_p50"] in ratios
        assert sum(Counter(row["samples_ns"]).values()) == runtime_host.GROUP
    assert rows[0]["p99_over_p50"] == min(rows[0]["p99_over_p50_of_sets"])
    moved = {**calls, "a mode": lambda i: os.sched_setaffinity(0, allowed)}
    _, pinned = runtime_host.times_of_sets(moved, "cpu", runtime_host.GROUP, sets=1)
    assert pinned == (len(allowed) == 1)


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

"""Which session of a tuning run goes next, and what is looked for meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvmcap.base.config import Config
from tvmcap.kernel import entries
from tvmcap.kernel.tuner import Run


def entry(weight: float, session: Any = None) -> entries.Entry:
    return entries.Entry(session=session, weight=weight, batch=4, before=None)


def measurer(workers: int = 1, **more: Any) -> Any:
    return SimpleNamespace(workers=workers, runners=[None], **more)


def test_weights_prefer_the_heavy_task() -> None:
    heavy, light = entry(0.9), entry(0.1)
    assert heavy.priority > light.priority
    heavy.gain, heavy.batches = 0.0, 60
    assert light.priority > heavy.priority


def test_those_that_never_went_follow_then_the_same_ones() -> None:
    first, second, third = found = [entry(0.5), entry(0.3), entry(0.2)]
    assert entries.following(found, [first], measurer()) == [second]
    assert entries.following(found, [first], measurer(8)) == [second, third]
    second.exhausted = True
    assert entries.following(found, [first], measurer()) == [third]
    third.batches = 1
    assert entries.following(found, [first], measurer()) == [first]


def test_sessions_look_ahead_while_something_is_compiled() -> None:
    """They are asked before what is compiled first, and have ended before anything is timed."""
    heard: list[str] = []

    def session(name: str) -> Any:
        return SimpleNamespace(
            name=name,
            workload=name,
            ahead=lambda count: heard.append(f"{name} ahead {count}"),
            propose=lambda count: [SimpleNamespace(candidate=f"{name}{i}") for i in range(count)],
            settle=lambda: heard.append(f"{name} settle"),
            best=lambda: None,
        )

    one, other = entry(0.6, session("a")), entry(0.4, session("b"))
    built = measurer(build=lambda found, workloads=(): heard.append(f"build {len(found)}"))
    run = Run(Config(target="llvm", tune=6), None, None, None, [one, other])  # type: ignore[arg-type]
    run.measure = lambda *_: [[]]  # type: ignore[method-assign]
    run._round(built, [one])
    settled = ["a settle", "b settle"]
    assert heard == ["a ahead 4", "build 0", "b ahead 2", "build 4", *settled]
    heard.clear()
    run.trials, one.batches = 4, 1
    run._round(built, [other])
    assert heard == ["b ahead 2", "build 0", "build 2", *settled]  # no trials are left

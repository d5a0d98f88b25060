"""The pass list: order, switching off, times, dumps, checks, and which pass an error names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.planned import TARGET, mlp
from tvmcap import contracts, pipeline
from tvmcap.base.config import Config
from tvmcap.base.errors import BuildError, ConfigError, ContractError, RecordError

MOD = mlp((4, 4), rows=2)


def run(passes: Any, mod: Any = MOD, **options: Any) -> tuple[Any, pipeline.Trace]:
    trace = pipeline.Trace()
    return pipeline.run(mod, passes, TARGET, Config(**options), trace), trace


def mark(name: str) -> tuple[str, pipeline.Pass]:
    """A pass that notes that it ran."""
    return name, lambda mod: mod.with_attr(
        "seen", [*mod.attrs.get("seen", []), name] if mod.attrs else [name]
    )


def fails(error: Exception) -> pipeline.Pass:
    def step(mod: Any) -> Any:
        raise error

    return step


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes with real names do what they like."""
    monkeypatch.delenv("TVMCAP_CHECK")


def test_order_times_and_target(unchecked: None) -> None:
    seen = []

    def current(mod: Any) -> Any:
        seen.append(tvm.target.Target.current())
        return mod

    done, trace = run([mark("canonicalize"), ("other", current), mark("fuse")])
    assert list(done.attrs["seen"]) == ["canonicalize", "fuse"]
    assert [name for name, _ in trace.seconds] == ["canonicalize", "other", "fuse"]
    assert all(seconds >= 0 for _, seconds in trace.seconds)
    assert [str(t) for t in seen] == [str(TARGET)]


def test_the_list_is_what_disable_may_name() -> None:
    names = [
        name
        for name, _ in [
            *pipeline.front(TARGET),
            *pipeline.back(TARGET, lambda task: [], pipeline.Trace()),
        ]
    ]
    assert len(set(names)) == len(names) and set(pipeline.OPTIONAL) <= set(names)
    assert (
        names.index("layout")
        < names.index("legalize")
        < names.index("fuse")
        < names.index("schedule")
        < names.index("plan")
    )


@pytest.mark.parametrize("name", pipeline.OPTIONAL)
def test_disable(unchecked: None, name: str) -> None:
    done, trace = run([mark(n) for n in pipeline.OPTIONAL], disable=(name,))
    assert list(done.attrs["seen"]) == [n for n in pipeline.OPTIONAL if n != name]
    assert name not in [n for n, _ in trace.seconds]


@pytest.mark.parametrize("name", ["legalize", "schedule", "plan", "fusion", ""])
def test_disable_of_what_is_needed_or_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match="can be left out are"):
        run([], disable=(name,))


def test_an_error_names_its_pass() -> None:
    with pytest.raises(
        BuildError, match="pass 'fuse' failed: the reason; disable='fuse' goes around it"
    ) as caught:
        run([("fuse", fails(ValueError("Traceback\n  the reason\n\n")))])
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(BuildError, match=r"pass 'plan' failed: KeyError$"):
        run([("plan", fails(KeyError()))])


def test_errors_of_our_own_pass_through() -> None:
    error = RecordError("store")
    with pytest.raises(RecordError) as caught:
        run([("schedule", fails(error))])
    assert caught.value is error


def test_checks_run_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(mod: Any, name: str) -> None:
        raise ContractError(name)

    monkeypatch.setattr(contracts, "check", broken)
    with pytest.raises(ContractError, match="canonicalize"):
        run([mark("canonicalize")])
    monkeypatch.delenv("TVMCAP_CHECK")
    run([mark("canonicalize")])


def test_dumps_are_numbered_over_both_halves(tmp_path: Path) -> None:
    trace, config = pipeline.Trace(), Config(dump=str(tmp_path / "a" / "b"))
    trace.timed("capture", lambda: None)
    mod = pipeline.run(MOD, [mark("canonicalize")], TARGET, config, trace)
    pipeline.run(mod, [mark("plan")], TARGET, config, trace)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "02_canonicalize.py",
        "03_plan.py",
    ]


def test_a_whole_run_has_one_kernel_a_layer() -> None:
    trace = pipeline.Trace()
    config = Config()
    fused = pipeline.run(mlp((8, 8, 8), rows=4), pipeline.front(TARGET), TARGET, config, trace)
    planned = pipeline.run(
        fused, pipeline.back(TARGET, lambda task: [], trace), TARGET, config, trace
    )
    assert pipeline.count_kernels(planned) == 2
    assert pipeline.peak_bytes(planned) == 4 * 8 * 4
    assert all(pipeline.calls(planned, served.task) for served in trace.coverage)
    assert not pipeline.calls(planned, "no_such_kernel")
    apart = pipeline.run(
        mlp((8, 8, 8), rows=4),
        pipeline.front(TARGET),
        TARGET,
        replace(config, disable=("fuse",)),
        pipeline.Trace(),
    )
    again = pipeline.run(
        apart, pipeline.back(TARGET, lambda task: [], trace), TARGET, config, trace
    )
    assert pipeline.count_kernels(again) > 2

"""The Hopper GEMM on a GPU: every way to divide work, to share and to store, against float64."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.schedules.hopper_cases import GROUPS_OF_CASES, chain
from tvmcap.base import codegen
from tvmcap.schedules.hopper_gemm import GROUPS, TILES

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def test_the_cases_meet_every_setting() -> None:
    """Each pair of ways to divide, share, split and store; every tile, layout and dtype."""
    cases = [case for make in GROUPS_OF_CASES.values() for case in make()]
    knobs = [case.knobs for case in cases if not case.knobs.swapped]
    assert {(k.bm, k.bn, k.groups) for k in knobs} == set(TILES)
    ways = {(k.groups, k.cluster_m, k.cluster_n, k.split, k.tma_store) for k in knobs}
    stores = ((1, True), (1, False), (2, False), (4, False))
    for groups, cluster, store in itertools.product(GROUPS, ((1, 1), (2, 1), (1, 2)), stores):
        assert (groups, *cluster, *store) in ways
    assert {(k.groups, k.bk) for k in knobs} >= {(groups, 128) for groups in GROUPS}
    assert {k.groups for k in knobs if not k.persistent} == {"rows", "columns"}
    flags = {(k.groups, k.late, k.dependent, k.warm) for k in knobs}
    for groups, late, early in itertools.product(
        GROUPS, (False, True), ((False, False), (True, False), (True, True))
    ):
        assert (groups, late, *early) in flags
    shapes = [case.shape for case in cases]
    sides = {(s.get("a_layout", "mk"), s.get("layout", "kn")) for s in shapes}
    assert len(sides) == 4 and len({case.name for case in cases}) == len(cases)
    assert {s.get("dtype", "bfloat16") for s in shapes} == {"bfloat16", "float16", "float32"}
    assert any(case.knobs.swapped for case in cases)


def finish(group: str) -> tuple[str, str]:
    """Run a group in a process of its own; return its output and how it ended."""
    command = [sys.executable, "-m", "tests.schedules.hopper_run", group]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as e:
        output = e.stdout or b""
        text = output.decode() if isinstance(output, bytes) else output
        return text, f"no end after {LIMIT_S} s"
    return done.stdout, "" if done.returncode == 0 else done.stderr[-2000:]


@pytest.fixture(scope="module")
def outcomes(request: Any) -> Iterator[dict[str, Future[tuple[str, str]]]]:
    """Start the groups that are asked for, side by side."""
    chosen = [
        item.callspec.params["group"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(max(2, min(len(chosen), (os.cpu_count() or 2) // 2))) as pool:
        yield {group: pool.submit(finish, group) for group in chosen}


@pytest.mark.gpu
@pytest.mark.skipif(codegen.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("group", [*GROUPS_OF_CASES, "chain"])
def test_computes_the_product(group: str, outcomes: Any) -> None:
    output, ended = outcomes[group].result()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    started = [line["start"] for line in lines if "start" in line]
    wrong = {line["name"]: line["error"] for line in lines if line.get("error")}
    last = started[-1] if started else "none"
    assert not ended, f"{ended}; the last case was {last}; wrong so far: {wrong}"
    assert not wrong, wrong
    cases = chain()[::2] if group == "chain" else GROUPS_OF_CASES[group]()
    assert started == [case.name for case in cases]

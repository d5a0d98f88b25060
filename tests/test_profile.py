"""Profiles: every kernel with its time and bytes, and a trace that a viewer can open."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tvmcap
from examples.models import gelu_tanh
from tests import libs
from tvmcap import profile
from tvmcap.base.errors import ConfigError, InputError, LibraryError
from tvmcap.base.score import KernelScore
from tvmcap.view.timeline import Span, summary


def two_layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x @ w) @ w)


@pytest.fixture(scope="module")
def lib() -> Any:
    return libs.quick(two_layers, libs.values(16, 64), libs.values(64, 64), dynamic=libs.B)


def test_calls_are_timed_while_nobody_watches() -> None:
    seen: list[bool] = []
    watchers: list[Any] = []

    class Fake:
        @contextlib.contextmanager
        def watched(self, before: Any, after: Any) -> Any:
            watchers.append((before, after))
            yield
            watchers.clear()

    def call() -> None:
        seen.append(bool(watchers))
        for before, after in watchers:
            before("kernel")
            after("kernel")

    spans, whole = profile._on_cpu(Fake(), call, 3)
    assert seen == [False] * 3 + [True] * 3 and len(whole) == 3
    assert [(span.name, span.call) for span in spans] == [("kernel", i) for i in range(3)]


def test_every_kernel_is_timed(lib: Any) -> None:
    x, w = libs.values(100, 64), libs.values(64, 64)
    found = lib.profile(x, w, calls=7)
    assert [k.name for k in found.kernels] == list(lib.executor.kernel_launches(x, w))
    for kernel in found.kernels:
        assert kernel.nbytes == (100 * 64 * 2 + 64 * 64) * 4
        assert len(kernel.us.samples) == 7 and kernel.us.median > 0
        bound_us = kernel.nbytes / found.bandwidth_gb_s / 1e3
        assert kernel.percent_of_roofline == pytest.approx(100 * bound_us / kernel.us.median)
    assert found.sizes == {"B": 100} and found.device == "cpu:0"
    whole = sum(min(k.us.samples) for k in found.kernels)
    assert whole <= max(found.calls_us.samples)
    text = str(found)
    assert "B=100" in text and all(k.name in text for k in found.kernels)


def test_a_profile_on_a_cpu_needs_no_torch(lib: Any) -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, tvmcap
lib = tvmcap.load(sys.argv[1])
found = lib.profile(np.ones((3, 64), np.float32), np.ones((64, 64), np.float32), calls=2)
assert len(found.kernels) == 2 and "roofline" in str(found)
"""
    subprocess.run([sys.executable, "-c", code, str(lib.path)], check=True, timeout=120)


def test_the_trace_opens_and_holds_every_run(lib: Any, tmp_path: Path) -> None:
    x = np.ones((5, 64), np.float32)
    found = lib.profile(x, np.ones((64, 64), np.float32), calls=3)
    data = json.loads(found.write_trace(tmp_path / "trace.json").read_text())
    runs = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(runs) == 3 * len(found.kernels)
    assert [event["args"]["call"] for event in runs] == sorted([0, 1, 2] * len(found.kernels))
    for now, then in itertools.pairwise(runs):
        assert now["ts"] + now["dur"] <= then["ts"] + 1e-3
    with pytest.raises(LibraryError, match="cannot write"):
        found.write_trace(tmp_path / "none" / "trace.json")


def test_calls_are_as_before_after_a_profile(lib: Any) -> None:
    x, w = libs.values(3, 64), libs.values(64, 64)
    lib.profile(x, w, calls=1)
    torch.testing.assert_close(lib(x, w), two_layers(x, w), rtol=1e-4, atol=1e-4)


def test_wrong_arguments(lib: Any) -> None:
    with pytest.raises(InputError, match="64"):
        lib.profile(libs.values(3, 9), libs.values(64, 64))
    with pytest.raises(ConfigError, match="calls=0"):
        lib.profile(libs.values(3, 64), libs.values(64, 64), calls=0)


def test_spans_of_several_calls_are_grouped_by_place() -> None:
    kernels = [KernelScore("a", 100, 50, "rule"), KernelScore("b", 10, 0, "record")]
    spans = [Span(n, 10.0 * c + i, 2.0 + i + c, c) for c in range(3) for i, n in enumerate("ab")]
    first, second = summary(spans[::-1], kernels, 3, 0.05)
    assert (first.name, first.us.median, first.nbytes) == ("a", 3.0, 150)
    assert second.us.samples == (3.0, 4.0, 5.0) and second.scheduled_by == "record"
    assert first.percent_of_roofline == pytest.approx(100.0)
    with pytest.raises(LibraryError, match="5 kernels were seen in 3 calls"):
        summary(spans[:5], kernels, 3, 0.05)
    with pytest.raises(LibraryError, match="results without elements"):
        summary([], kernels, 3, 0.05)


@pytest.mark.gpu
def test_on_a_gpu_cupti_times_the_kernels() -> None:
    args = tuple(libs.values(*s).bfloat16() for s in ((256, 1024), (1024, 1024), (1024,)))
    lib = libs.quick(gelu_tanh, *args, target="cuda", dynamic=libs.B)
    for replay in (False, True):
        again = tvmcap.load(lib.export(lib.path.with_name("profiled.so")))
        if replay:
            again.use_graphs()
        found = again.profile(*(a.cuda() for a in args), calls=9)
        [kernel] = found.kernels
        assert kernel.name.startswith("fused_") and kernel.nbytes > 0
        assert 1 < kernel.us.median < 200 and len(found.spans) == 9
        assert found.bandwidth_gb_s > 100

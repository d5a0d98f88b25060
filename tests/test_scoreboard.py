"""The scoreboard's counts against counts by hand, and its tables."""

import json
from dataclasses import replace

import pytest
import torch

import tvmcap
from tvmcap import scoreboard
from tvmcap.base.config import Config
from tvmcap.base.manifest import read_manifest
from tvmcap.base.score import Latency, Score
from tvmcap.view import report

K, N, M = 64, 96, 24


def block(x, w, b):
    return torch.nn.functional.gelu(x @ w + b, approximate="tanh")


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoreboard")
    args = torch.randn(M, K), torch.randn(K, N) / 8, torch.randn(N)
    return tvmcap.build(
        block,
        args,
        target="llvm",
        dynamic={"x": {0: "B"}},
        tune="none",
        cache_dir=str(folder / "cache"),
        log_dir=str(folder / "logs"),
    )


def test_one_kernel_that_reads_and_writes_each_tensor_once(lib):
    score = scoreboard.score(lib, {"B": 40}, baselines=False, budget_s=0.05)
    moved = (40 * K + 40 * N) * 4
    assert score.kernels == score.kernels_traced == len(score.per_kernel) == 1
    assert score.hbm_bytes == moved + (K * N + N) * 4
    assert score.activation_traffic == pytest.approx(moved / (40 * N * 4))
    assert score.peak_bytes_planned == score.peak_bytes_measured == 40 * N * 4
    assert score.weight_bytes == 0 and score.sizes == {"B": 40}
    assert score.latency_us.median > 0 and score.eager_us is None and score.speedup is None
    assert (score.tuned_tasks, score.tasks) == (0, 1) and score.verified is True


def test_the_manifest_carries_the_counts_at_the_examples_sizes(lib):
    score = Score.from_json(read_manifest(lib.path).score)
    assert score.sizes == {"B": M} and score.kernels == len(score.per_kernel) == 1
    assert score.hbm_bytes == (M * K + M * N + K * N + N) * 4
    assert score.peak_bytes_planned == M * N * 4 and score.weight_bytes == 0
    assert score.latency_us is score.eager_us is score.speedup is score.peak_bytes_measured is None
    assert score.build_s > 0


def test_eager_is_counted_and_timed_beside_it(lib, monkeypatch):
    monkeypatch.setattr(scoreboard, "_torch_compile", lambda subject, leaves: {})
    steps = []
    score = scoreboard.score(lib, progress=steps.append, budget_s=0.05)
    y = M * N * 4
    assert score.eager_kernels == 3 and score.sizes == {"B": M}
    assert score.eager_activation_traffic == pytest.approx((M * K * 4 + 5 * y) / y)
    assert score.speedup == pytest.approx(score.eager_us.median / score.latency_us.median)
    assert score.torch_compile_us is None and "measuring ours, eager" in steps
    text = report.text(report.score_table(score))
    assert "activation traffic" in text and "0 of 1 tasks tuned" in text


def test_a_torch_compile_that_fails_is_left_out_with_its_reason(lib, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise RuntimeError("no C++ compiler\nfound")

    monkeypatch.setattr(torch, "compile", refuse)
    with caplog.at_level("INFO", logger="tvmcap"):
        score = scoreboard.score(lib, budget_s=0.05)
    assert score.torch_compile_us is None and score.eager_us is not None
    assert "no C++ compiler" in caplog.text


def test_a_library_of_another_machine_is_counted_only(lib):
    score = scoreboard.score(replace(lib, executor=None, foreign="another GPU"))
    assert score.kernels == 1 and score.latency_us is None and score.kernels_traced is None


def chain(x, w, b):
    return torch.relu(x * w + b) * 2.0


def test_the_walk_shows_what_fusion_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(scoreboard, "_torch_compile", lambda subject, leaves: {})
    config = Config(
        target="llvm",
        dynamic={"x": {0: "B"}},
        tune="none",
        verify=False,
        cache_dir=str(tmp_path / "cache"),
        log_dir=str(tmp_path / "logs"),
    )
    args = torch.randn(M, K), torch.randn(K), torch.randn(K)
    steps = {"no fuse": replace(config, disable=("fuse",)), "whole": config}
    rows = scoreboard.walk(chain, args, steps)
    apart, whole = (row.score for row in rows)
    assert apart.kernels == apart.eager_kernels == 4 and whole.kernels == 1
    assert apart.activation_traffic == apart.eager_activation_traffic == pytest.approx(8.0)
    assert whole.activation_traffic == pytest.approx(2.0)
    text = report.text(report.walk_table(rows))
    assert all(name in text for name in ("eager", "no fuse", "whole"))


def test_scores_survive_json():
    latency = Latency(2.0, 1.0, 3.0, (1.0, 2.0, 3.0))
    kernel = scoreboard.Score.from_json
    score = Score({"B": 4}, 1, 10, 2.0, 0, 5, latency_us=latency, eager_parts=("aten.foo",))
    assert kernel(json.loads(json.dumps(score.to_json()))) == score
